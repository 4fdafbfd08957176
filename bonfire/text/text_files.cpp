#include "bonfire/text/text_files.h"

#include <algorithm>
#include <cctype>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/base/input_file.h"
#include "bonfire/base/json.h"
#include "bonfire/text/utf8.h"

namespace bonfire {
namespace {

// Text is read in pieces of about so many bytes: a bound on memory, where it can be cut.
constexpr std::uint64_t piece_bytes = 1 << 20;

struct Piece {
  std::string path{};
  bool json_lines = false;
  std::string text{};
  int line = 1;  // of its start in the file
  bool begins = true, ends = true;
};

// Files as pieces, one after the other.
class Pieces {
 public:
  explicit Pieces(const std::vector<std::string>& paths) : paths_(paths) {
    for (const auto& path : paths) const InputFile readable(path);
  }

  std::optional<Piece> next() {
    if (!file_) {
      if (at_ == paths_.size()) return std::nullopt;
      file_.emplace(paths_[at_++]);
      offset_ = 0;
      line_ = 1;
    }
    Piece piece{
        .path = file_->path(), .json_lines = file_->path().ends_with(".jsonl"), .line = line_, .begins = offset_ == 0};
    piece.text = std::move(rest_);
    rest_.clear();
    std::size_t end = 0;
    while (end == 0 && offset_ < file_->size()) {
      const std::size_t had = piece.text.size();
      piece.text.resize(had + std::min(piece_bytes, file_->size() - offset_));
      file_->read(offset_, std::as_writable_bytes(std::span(piece.text).subspan(had)));
      offset_ += piece.text.size() - had;
      end = cut(piece.text, had == 0 ? 0 : had - 1);
    }
    piece.ends = offset_ == file_->size();
    if (piece.ends) {
      file_.reset();
    } else {
      rest_ = piece.text.substr(end);
      piece.text.resize(end);
      line_ += static_cast<int>(std::count(piece.text.begin(), piece.text.end(), '\n'));
    }
    return piece;
  }

 private:
  static bool is_space(std::string_view text) { return utf8::space_at_start(text.substr(0, 4)) > 0; }

  // Whether tokens end at `at`, whatever the tokenizer: behind a line that does not end with white space, where a letter, a
  // digit or a character beyond ASCII follows that is no white space either. Expressions look ahead over white space, and
  // punctuation at the start of a line some join to the end of the line before.
  static bool may_cut(std::string_view text, std::size_t at) {
    const auto before = static_cast<unsigned char>(text[at - 2]), after = static_cast<unsigned char>(text[at]);
    if (text[at - 1] != '\n' || (after < 0x80 ? std::isalnum(after) == 0 : is_space(text.substr(at)))) return false;
    return before < 0x80 ? std::isspace(before) == 0 : utf8::space_at_end(text.substr(0, at - 1)) == 0;
  }

  // The last place behind `from` where the text may be cut; 0: there is none.
  static std::size_t cut(std::string_view text, std::size_t from) {
    for (std::size_t at = text.size() - 1; at > from + 1; --at)
      if (may_cut(text, at)) return at;
    return 0;
  }

  const std::vector<std::string>& paths_;
  std::size_t at_ = 0;
  std::optional<InputFile> file_;
  std::uint64_t offset_ = 0;
  int line_ = 1;
  std::string rest_;
};

struct Encoded {
  std::vector<std::int64_t> tokens{};
  std::vector<std::size_t> ends{};  // of documents
};

class FilesEncoder {
 public:
  FilesEncoder(const Tokenizer& tokenizer, const EncodeFilesOptions& options, const TakeTokens& take)
      : tokenizer_(tokenizer), options_(options), take_(take), pieces_(options.paths) {}

  void run() {
    {
      std::vector<std::jthread> others;
      for (int i = 1; i < options_.threads; ++i) others.emplace_back([this] { work(); });
      work();
    }
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  void work() {
    try {
      const auto encoder = tokenizer_.encoder();
      while (encode_next(*encoder)) {
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
      turn_comes_.notify_all();
    }
  }

  bool encode_next(Encoder& encoder) {
    std::optional<Piece> piece;
    std::uint64_t number = 0;
    {
      const std::lock_guard lock(reading_);
      piece = pieces_.next();
      number = read_++;
    }
    if (!piece) return false;
    // What is wrong with a piece is said when its turn comes: the first fault of the files, whatever the threads do.
    Encoded encoded;
    std::exception_ptr fault;
    try {
      encoded = piece->json_lines ? lines_of(*piece, encoder) : document_of(*piece, encoder);
    } catch (...) {
      fault = std::current_exception();
    }
    std::unique_lock lock(mutex_);
    turn_comes_.wait(lock, [&] { return failure_ || turn_ == number; });
    if (failure_) return false;
    if (fault) std::rethrow_exception(fault);
    give(encoded);
    ++turn_;
    turn_comes_.notify_all();
    return true;
  }

  void give(const Encoded& encoded) {
    const std::span<const std::int64_t> tokens(encoded.tokens);
    std::size_t begin = 0;
    for (const auto end : encoded.ends) {
      take_(tokens.subspan(begin, end - begin), true);
      begin = end;
    }
    if (begin < tokens.size()) take_(tokens.subspan(begin), false);
  }

  void end_document(Encoded& encoded) const {
    const auto end = tokenizer_.end_of_text();
    const bool there = end && !encoded.tokens.empty() && encoded.tokens.back() == *end;
    if (end && !there) encoded.tokens.push_back(*end);
    encoded.ends.push_back(encoded.tokens.size());
  }

  Encoded document_of(const Piece& piece, Encoder& encoder) const {
    Encoded encoded;
    encoder.encode(piece.text, {.begins = piece.begins, .ends = piece.ends}, encoded.tokens);
    if (piece.ends) end_document(encoded);
    return encoded;
  }

  Encoded lines_of(const Piece& piece, Encoder& encoder) const {
    Encoded encoded;
    int line = piece.line;
    for (std::size_t begin = 0; begin < piece.text.size(); ++line) {
      const std::size_t end = std::min(piece.text.find('\n', begin), piece.text.size());
      const std::string_view text = std::string_view(piece.text).substr(begin, end - begin);
      begin = end + 1;
      if (text.find_first_not_of(" \t\r") == std::string_view::npos) continue;
      encoder.encode(parse_json(text, piece.path, line).at(options_.field).string(), {}, encoded.tokens);
      end_document(encoded);
    }
    return encoded;
  }

  const Tokenizer& tokenizer_;
  const EncodeFilesOptions& options_;
  const TakeTokens& take_;
  std::mutex reading_;
  Pieces pieces_;
  std::uint64_t read_ = 0;
  std::mutex mutex_;
  std::condition_variable turn_comes_;
  std::uint64_t turn_ = 0;
  std::exception_ptr failure_;
};

}  // namespace

void encode_files(const Tokenizer& tokenizer, const EncodeFilesOptions& options, const TakeTokens& take) {
  if (options.threads < 1) fail_config("threads is {}, must be at least 1", options.threads);
  FilesEncoder(tokenizer, options, take).run();
}

}  // namespace bonfire
