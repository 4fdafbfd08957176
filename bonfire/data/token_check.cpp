#include "bonfire/data/token_check.h"

#include <algorithm>
#include <optional>
#include <vector>

#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/json.h"
#include "bonfire/base/output_file.h"
#include "bonfire/base/size.h"
#include "bonfire/data/token_scan.h"

namespace bonfire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t check_piece_bytes = 1 << 20;

// What a full check has found.
struct Finding {
  std::int64_t bytes = 0;
  std::int64_t modified_ns = 0;
  std::int64_t largest = 0;
};

std::string record_of(const TokenFile& file) { return file.path() + ".checked"; }

std::optional<Finding> kept_finding(const TokenFile& file) {
  try {
    const Json json = read_json(record_of(file));
    const Finding finding{json.at("bytes").integer(), json.at("modified_ns").integer(), json.at("largest_token").integer()};
    if (finding.bytes == static_cast<std::int64_t>(file.bytes()) && finding.modified_ns == file.modified_ns() &&
        finding.largest >= 0)
      return finding;
  } catch (const Error&) {
    // None, or one that is not whole: the file is checked again.
  }
  return std::nullopt;
}

void keep_finding(const TokenFile& file, std::int64_t largest, const Log& log) {
  const nlohmann::ordered_json json{
      {"bytes", file.bytes()}, {"modified_ns", file.modified_ns()}, {"largest_token", largest}};
  try {
    write_file(record_of(file), json.dump() + '\n', Survives::process);
  } catch (const WriteError& error) {
    log.info("{}; '{}' will be checked again next time", error.what(), file.path());
  }
}

// Reads pieces of a file, one after another.
class Check {
 public:
  Check(const TokenFile& file, const TokenCheckOptions& options, std::uint64_t tokens)
      : file_(file), options_(options), left_(tokens), all_(tokens), said_(Clock::now()) {}

  void piece(std::uint64_t first, std::uint64_t count) {
    const auto width = bytes_of(file_.type());
    buffer_.resize(count * width);
    file_.read(first, std::as_writable_bytes(std::span(buffer_)));
    const auto largest = largest_unsigned(reinterpret_cast<const std::byte*>(buffer_.data()), count, width);
    // Taken as unsigned, a negative token is larger than any that its type can hold.
    const auto limit = is_signed(file_.type()) ? (std::uint64_t{1} << (8 * width - 1)) - 1 : ~std::uint64_t{0};
    if (largest >= static_cast<std::uint64_t>(options_.vocab) || largest > limit) {
      std::vector<std::int64_t> tokens(count);
      file_.copy(first, tokens);
      file_.require_tokens(first, tokens, options_.vocab);
      fail("'{}': changed while it was checked", file_.path());
    }
    largest_ = std::max(largest_, static_cast<std::int64_t>(largest));
    left_ -= std::min(left_, count);
    say();
  }

  std::int64_t largest() const { return largest_; }

 private:
  void say() {
    const auto now = Clock::now();
    if (now - said_ < options_.progress_every || left_ == 0) return;
    said_ = now;
    const auto width = bytes_of(file_.type());
    const auto done = all_ - left_;
    options_.log.info("checking '{}': {} of {}, {:.0f}%", file_.path(),
                      format_bytes(static_cast<std::int64_t>(done * width)),
                      format_bytes(static_cast<std::int64_t>(all_ * width)),
                      100.0 * static_cast<double>(done) / static_cast<double>(all_));
  }

  const TokenFile& file_;
  const TokenCheckOptions& options_;
  std::uint64_t left_;
  std::uint64_t all_;
  Clock::time_point said_;
  std::int64_t largest_ = 0;
  std::vector<char> buffer_;
};

}  // namespace

void check_tokens(const TokenFile& file, const TokenCheckOptions& options) {
  require(options.vocab > 0, "vocabulary is {}, must be positive", options.vocab);
  if (options.how == TokenCheck::off) return;
  if (const auto finding = kept_finding(file); finding && finding->largest < options.vocab) return;

  const auto width = bytes_of(file.type());
  const auto piece = check_piece_bytes / width;
  const auto pieces = (file.size() + piece - 1) / piece;
  const bool all = options.how == TokenCheck::full || file.size() * width <= options.sample_bytes;
  const auto wanted = all ? pieces : std::max<std::uint64_t>(options.sample_bytes / check_piece_bytes, 1);
  Check check(file, options, all ? file.size() : wanted * piece);
  for (std::uint64_t number = 0; number < wanted; ++number) {
    // The first piece and the last are always among them.
    const auto which = wanted == pieces ? number : wanted == 1 ? 0 : number * (pieces - 1) / (wanted - 1);
    const auto first = which * piece;
    check.piece(first, std::min(piece, file.size() - first));
  }
  if (options.how == TokenCheck::full) keep_finding(file, check.largest(), options.log);
}

}  // namespace bonfire
