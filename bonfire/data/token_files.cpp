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

  if (options.end_of_document >= options.vocab)
    fail_config("end_of_document is {}, must be 0 to {}, below the vocabulary of {}", options.end_of_document,
                options.vocab - 1, options.vocab);

  const auto length = static_cast<std::uint64_t>(options.sequence) + 1;
  bool index_everywhere = true;
  std::uint64_t windows = 0;
  for (const auto& path : options.paths) {
    const auto& file = files_.emplace_back(path, options.check == TokenCheck::full ? IndexCheck::entries : IndexCheck::end);
    if (file.size() < length)
      fail_config("'{}': has {} tokens, must have at least {}: a sequence of {} and the token after it", file.path(),
                  file.size(), length, options.sequence);
    if (options.separate_documents && !file.knows_documents() && options.end_of_document < 0)
      fail_config(
          "'{}': llm.c's format does not say where documents end; allowed with data.documents = \"separate\": a Megatron "
          "index beside it, or data.end_of_document = the token that ends each document",
          file.path());
    index_everywhere = index_everywhere && file.knows_documents();
    check_tokens(file, {.how = options.check,
                        .vocab = options.vocab,
                        .sample_bytes = options.sample_bytes / options.paths.size(),
                        .log = options.log});
    ends_.push_back(windows += (file.size() - length) / static_cast<std::uint64_t>(options_.stride) + 1);
  }
  if (options.separate_documents && index_everywhere && options.end_of_document >= 0)
    fail_config(
        "data.end_of_document = {} would not be read: all files have a Megatron index, which says where documents begin; "
        "allowed: no such key",
        options.end_of_document);
}

TokenFiles::Place TokenFiles::place_of(std::uint64_t index) const {
  require(index < size(), "sample {} asked of {}", index, size());
  const auto file = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin());
  const auto before = file == 0 ? 0 : ends_[file - 1];
  return {files_[file], (index - before) * static_cast<std::uint64_t>(options_.stride)};
}

void TokenFiles::window(std::uint64_t index, std::span<std::int64_t> tokens) const {
  const auto [file, first] = place_of(index);
  file.copy(first, tokens);
  file.require_tokens(first, tokens, options_.vocab);
}

void TokenFiles::document_starts(std::uint64_t index, std::span<std::int64_t> starts) const {
  const auto [file, first] = place_of(index);
  if (file.knows_documents()) return file.document_starts(first, starts);
  std::vector<std::int64_t> tokens(starts.size());
  file.copy(first, tokens);
  std::int64_t begin = 0;
  for (std::size_t at = 0; at < starts.size(); ++at) {
    starts[at] = begin;
    if (tokens[at] == options_.end_of_document) begin = static_cast<std::int64_t>(at) + 1;
  }
}

}  // namespace bonfire
