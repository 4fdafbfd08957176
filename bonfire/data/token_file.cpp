#include "bonfire/data/token_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <vector>

#include "bonfire/base/error.h"
#include "bonfire/base/input_file.h"
#include "bonfire/data/token_formats.h"

namespace bonfire {
namespace {

// The tokens stand at the end of the memory that they are to fill. From the front on, none is overwritten before it was
// read.
template <class T>
void widen(std::span<std::int64_t> tokens) {
  const auto* from = reinterpret_cast<const char*>(tokens.data() + tokens.size()) - tokens.size() * sizeof(T);
  for (std::size_t at = 0; at < tokens.size(); ++at) {
    T value;
    std::memcpy(&value, from + at * sizeof(T), sizeof(T));
    tokens[at] = static_cast<std::int64_t>(value);
  }
}

// Values of one type, one behind the other in a file, which are wanted in order.
template <class T>
class Column {
 public:
  Column(const InputFile& file, std::uint64_t offset, std::uint64_t size) : file_(file), offset_(offset), size_(size) {}

  T operator[](std::uint64_t index) {
    if (index < first_ || index >= first_ + block_.size()) {
      first_ = index;
      block_.resize(std::min<std::uint64_t>(size_ - index, 1 << 16));
      file_.read(offset_ + index * sizeof(T), std::as_writable_bytes(std::span(block_)));
    }
    return block_[index - first_];
  }

 private:
  const InputFile& file_;
  std::uint64_t offset_;
  std::uint64_t size_;
  std::uint64_t first_ = 0;
  std::vector<T> block_;
};

TokenType megatron_type(const InputFile& index) {
  const auto code = index.at<std::uint8_t>(megatron::code_at);
  switch (code) {
    case 1: return TokenType::u8;
    case 2: return TokenType::i8;
    case 3: return TokenType::i16;
    case 4: return TokenType::i32;
    case 5: return TokenType::i64;
    case 8: return TokenType::u16;
    default:
      fail_config("'{}': dtype code at byte {} is {}, must be 1 (u8), 2 (i8), 3 (i16), 4 (i32), 5 (i64) or 8 (u16)",
                  index.path(), megatron::code_at, code);
  }
}

bool exists(const std::string& path) { return std::filesystem::exists(path); }

}  // namespace

std::uint64_t bytes_of(TokenType type) {
  switch (type) {
    case TokenType::u8:
    case TokenType::i8: return 1;
    case TokenType::u16:
    case TokenType::i16: return 2;
    case TokenType::u32:
    case TokenType::i32: return 4;
    case TokenType::i64: return 8;
  }
  return 0;
}

bool is_signed(TokenType type) {
  return type == TokenType::i8 || type == TokenType::i16 || type == TokenType::i32 || type == TokenType::i64;
}

TokenFile::TokenFile(const std::string& path, IndexCheck check) {
  std::string prefix = path;
  if (path.ends_with(".idx") || path.ends_with(".bin")) prefix.resize(path.size() - 4);
  // An index beside a .bin makes it Megatron's, whose tokens may begin with anything.
  if (path.ends_with(".idx") || exists(prefix + ".idx"))
    open_megatron(prefix + ".idx", prefix + ".bin", check);
  else
    open_llmc(path);
}

void TokenFile::open_llmc(const std::string& path) {
  file_ = std::make_shared<InputFile>(path);
  if (file_->size() == 0) fail_config("'{}': is empty", path);
  const auto magic = file_->at<std::int32_t>(0);
  if (magic != llmc::magic_u16 && magic != llmc::magic_u32)
    fail_config(
        "'{}': magic at byte 0 is {}, must be {} (u16 tokens) or {} (u32 tokens); there is no Megatron index beside it",
        path, magic, llmc::magic_u16, llmc::magic_u32);
  type_ = magic == llmc::magic_u16 ? TokenType::u16 : TokenType::u32;
  const auto version = file_->at<std::int32_t>(4);
  const auto expected = magic == llmc::magic_u16 ? llmc::version_u16 : llmc::version_u32;
  if (version != expected) fail_config("'{}': version at byte 4 is {}, must be {}", path, version, expected);
  const auto count = file_->at<std::int32_t>(8);
  if (count < 1) fail_config("'{}': number of tokens at byte 8 is {}, must be at least 1", path, count);
  size_ = static_cast<std::uint64_t>(count);
  offset_ = llmc::header_bytes;
  if (file_->size() != offset_ + size_ * bytes_of(type_))
    fail_config("'{}': has {} bytes, must have {}: a header of {} and the {} tokens of {} bytes that byte 8 says", path,
                file_->size(), offset_ + size_ * bytes_of(type_), offset_, size_, bytes_of(type_));
}

void TokenFile::open_megatron(const std::string& index_path, const std::string& path, IndexCheck check) {
  index_ = std::make_shared<InputFile>(index_path);
  const InputFile& index = *index_;
  char magic[megatron::magic_bytes] = {};
  if (index.size() >= megatron::header_bytes) index.read(0, std::as_writable_bytes(std::span(magic)));
  if (std::memcmp(magic, megatron::magic, megatron::magic_bytes) != 0)
    fail_config("'{}': does not begin with the {} bytes MMIDIDX\\0\\0 and a header of {} bytes", index_path,
                megatron::magic_bytes, megatron::header_bytes);
  const auto version = index.at<std::uint64_t>(megatron::version_at);
  if (version != 1) fail_config("'{}': version at byte {} is {}, must be 1", index_path, megatron::version_at, version);
  type_ = megatron_type(index);
  const auto width = bytes_of(type_);

  const auto sequences = index.at<std::uint64_t>(megatron::sequences_at);
  const auto bounds = index.at<std::uint64_t>(megatron::documents_at);
  // Compared before they are multiplied, so that no product overflows.
  if (sequences < 1 || sequences > index.size())
    fail_config("'{}': number of sequences at byte {} is {}, must be 1 to what {} bytes can hold", index_path,
                megatron::sequences_at, sequences, index.size());
  if (bounds < 2 || bounds > index.size())
    fail_config("'{}': number of document bounds at byte {} is {}, must be 2 to what {} bytes can hold", index_path,
                megatron::documents_at, bounds, index.size());
  const auto lengths_at = megatron::header_bytes, pointers_at = lengths_at + 4 * sequences;
  const auto documents_at = pointers_at + 8 * sequences;
  if (index.size() != documents_at + 8 * bounds)
    fail_config("'{}': has {} bytes, must have {}: {} sequences and {} document bounds", index_path, index.size(),
                documents_at + 8 * bounds, sequences, bounds);

  Column<std::int32_t> lengths(index, lengths_at, sequences);
  Column<std::int64_t> pointers(index, pointers_at, sequences);
  const bool entries = check == IndexCheck::entries;
  std::uint64_t end = 0;
  for (std::uint64_t at = entries ? 0 : sequences - 1; at < sequences; ++at) {
    const auto length = lengths[at];
    if (length < 0)
      fail_config("'{}': length of sequence {} at byte {} is {}, must not be negative", index_path, at, lengths_at + 4 * at,
                  length);
    const auto pointer = pointers[at];
    if (pointer < 0 || (entries && static_cast<std::uint64_t>(pointer) != end))
      fail_config("'{}': pointer of sequence {} at byte {} is {}, must be {}, where the one before it ends", index_path, at,
                  pointers_at + 8 * at, pointer, end);
    end = static_cast<std::uint64_t>(pointer) + static_cast<std::uint64_t>(length) * width;
  }
  Column<std::int64_t> documents(index, documents_at, bounds);
  std::int64_t before = 0;
  for (std::uint64_t at = 0; entries && at < bounds; ++at) {
    const auto bound = documents[at];
    const auto least = before, most = at == 0 ? 0 : static_cast<std::int64_t>(sequences);
    if (bound < least || bound > most || (at + 1 == bounds && bound != most))
      fail_config("'{}': document bound {} at byte {} is {}, must be {} to {}", index_path, at, documents_at + 8 * at, bound,
                  at + 1 == bounds ? most : least, most);
    before = bound;
  }
  if (end == 0) fail_config("'{}': holds no token", index_path);
  sequences_ = sequences;
  documents_ = bounds - 1;

  file_ = std::make_shared<InputFile>(path);
  if (file_->size() != end)
    fail_config("'{}': has {} bytes, must have the {} that '{}' says", path, file_->size(), end, index_path);
  size_ = end / width;
  if (size_ * width != end) fail_config("'{}': has {} bytes, must have whole tokens of {} bytes", path, end, width);
}

const std::string& TokenFile::path() const { return file_->path(); }
std::uint64_t TokenFile::bytes() const { return file_->size(); }
std::int64_t TokenFile::modified_ns() const { return file_->modified_ns(); }

void TokenFile::read(std::uint64_t first, std::span<std::byte> bytes) const {
  const auto width = bytes_of(type_), count = bytes.size() / width;
  require(first <= size_ && count <= size_ - first, "'{}': {} tokens from {} asked of {}", path(), count, first, size_);
  file_->read(offset_ + first * width, bytes);
}

void TokenFile::copy(std::uint64_t first, std::span<std::int64_t> tokens) const {
  read(first, std::as_writable_bytes(tokens).last(tokens.size() * bytes_of(type_)));
  switch (type_) {
    case TokenType::u8: return widen<std::uint8_t>(tokens);
    case TokenType::i8: return widen<std::int8_t>(tokens);
    case TokenType::u16: return widen<std::uint16_t>(tokens);
    case TokenType::i16: return widen<std::int16_t>(tokens);
    case TokenType::u32: return widen<std::uint32_t>(tokens);
    case TokenType::i32: return widen<std::int32_t>(tokens);
    case TokenType::i64: return;
  }
}

std::uint64_t TokenFile::document_begin(std::uint64_t number) const {
  const auto pointers_at = megatron::header_bytes + 4 * sequences_, bound_at = pointers_at + 8 * sequences_ + 8 * number;
  const auto bound = index_->at<std::int64_t>(bound_at);
  if (bound < 0 || static_cast<std::uint64_t>(bound) > sequences_)
    fail_config("'{}': document bound {} at byte {} is {}, must be 0 to {}", index_->path(), number, bound_at, bound,
                sequences_);
  if (static_cast<std::uint64_t>(bound) == sequences_) return size_;
  const auto pointer_at = pointers_at + 8 * static_cast<std::uint64_t>(bound);
  const auto pointer = index_->at<std::int64_t>(pointer_at);
  const auto width = bytes_of(type_);
  if (pointer < 0 || static_cast<std::uint64_t>(pointer) > size_ * width || static_cast<std::uint64_t>(pointer) % width != 0)
    fail_config("'{}': pointer of sequence {} at byte {} is {}, must be a multiple of {} from 0 to {}", index_->path(),
                bound, pointer_at, pointer, width, size_ * width);
  return static_cast<std::uint64_t>(pointer) / width;
}

void TokenFile::document_starts(std::uint64_t first, std::span<std::int64_t> starts) const {
  require(index_ && first <= size_ && starts.size() <= size_ - first, "'{}': documents of {} tokens from {} asked of {}",
          path(), starts.size(), first, size_);
  // The last document that begins at `first` or before it.
  std::uint64_t document = 0, after = documents_;
  while (after - document > 1) {
    const auto middle = document + (after - document) / 2;
    (document_begin(middle) <= first ? document : after) = middle;
  }
  std::int64_t begin = 0;
  std::uint64_t next = after;
  for (std::size_t at = 0; at < starts.size();) {
    const auto end = next <= documents_ ? document_begin(next) : size_;
    ++next;
    const auto count = end > first ? std::min<std::uint64_t>(end - first, starts.size()) : 0;
    if (count <= at) continue;
    for (; at < count; ++at) starts[at] = begin;
    begin = static_cast<std::int64_t>(count);
  }
}

void TokenFile::require_tokens(std::uint64_t first, std::span<const std::int64_t> tokens, std::int64_t vocab) const {
  const auto bad =
      std::find_if(tokens.begin(), tokens.end(), [=](std::int64_t token) { return token < 0 || token >= vocab; });
  if (bad == tokens.end()) return;
  const auto index = first + static_cast<std::uint64_t>(bad - tokens.begin());
  fail_config("'{}': token {} at byte {} is {}, must be 0 to {}, below the vocabulary of {}", path(), index,
              offset_ + index * bytes_of(type_), *bad, vocab - 1, vocab);
}

}  // namespace bonfire
