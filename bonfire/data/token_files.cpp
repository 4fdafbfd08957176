#include "bonfire/data/token_files.h"

#include <algorithm>

#include "bonfire/base/error.h"

namespace bonfire {

TokenFiles::TokenFiles(const TokenFilesOptions& options) : options_(options) {
  if (options.paths.empty()) fail_config("no token file is given");
  if (options.vocab < 1) fail_config("vocab is {}, must be at least 1", options.vocab);
  if (options.sequence < 1) fail_config("sequence is {}, must be at least 1", options.sequence);
  if (options.stride < 0) fail_config("stride is {}, must not be negative", options.stride);
  if (options_.stride == 0) options_.stride = options.sequence;

  const auto length = static_cast<std::uint64_t>(options.sequence) + 1;
  std::uint64_t windows = 0;
  for (const auto& path : options.paths) {
    const auto& file = files_.emplace_back(path, options.check == TokenCheck::full ? IndexCheck::entries : IndexCheck::end);
    if (file.size() < length)
      fail_config("'{}': has {} tokens, must have at least {}: a sequence of {} and the token after it", file.path(),
                  file.size(), length, options.sequence);
    check_tokens(file, {.how = options.check,
                        .vocab = options.vocab,
                        .sample_bytes = options.sample_bytes / options.paths.size(),
                        .log = options.log});
    ends_.push_back(windows += (file.size() - length) / static_cast<std::uint64_t>(options_.stride) + 1);
  }
}

void TokenFiles::window(std::uint64_t index, std::span<std::int64_t> tokens) const {
  require(index < size(), "sample {} asked of {}", index, size());
  const auto file = std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin();
  const auto before = file == 0 ? 0 : ends_[static_cast<std::size_t>(file) - 1];
  const auto first = (index - before) * static_cast<std::uint64_t>(options_.stride);
  files_[static_cast<std::size_t>(file)].copy(first, tokens);
  files_[static_cast<std::size_t>(file)].require_tokens(first, tokens, options_.vocab);
}

}  // namespace bonfire
