#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bonfire/data/source.h"
#include "bonfire/data/token_check.h"
#include "bonfire/data/token_file.h"

namespace bonfire {

struct TokenFilesOptions {
  std::vector<std::string> paths;
  std::int64_t vocab = 0;
  std::int64_t sequence = 0;
  // Whether samples are divided into documents: by Megatron's index; in llm.c's files each ends with this token.
  bool separate_documents = false;
  std::int64_t end_of_document = -1;  // -1: none is known
  std::int64_t stride = 0;            // tokens from a window's start to the next one's; 0: sequence
  // Before anything is read: one rank of a machine is enough. A sample is one of all files together.
  TokenCheck check = TokenCheck::sample;
  std::uint64_t sample_bytes = 256 << 20;
  Log log{};
};

// Token files as one source. Windows lie in one file each and, by default, share one token with their neighbours, so that
// every token but a file's first is a target exactly once. What is left at a file's end, less than a window, is not used.
class BONFIRE_API TokenFiles : public TokenSource {
 public:
  // Throws ConfigError where a file is not as it should be, or holds no window.
  explicit TokenFiles(const TokenFilesOptions& options);

  std::uint64_t size() const override { return ends_.back(); }
  std::int64_t vocab() const override { return options_.vocab; }
  std::int64_t sequence() const override { return options_.sequence; }
  // Throws ConfigError where a token is not in the vocabulary, Error where the file has shrunk.
  void window(std::uint64_t index, std::span<std::int64_t> tokens) const override;
  bool separates_documents() const override { return options_.separate_documents; }
  void document_starts(std::uint64_t index, std::span<std::int64_t> starts) const override;

 private:
  struct Place {
    const TokenFile& file;
    std::uint64_t first;  // token
  };
  Place place_of(std::uint64_t index) const;

  TokenFilesOptions options_;
  std::vector<TokenFile> files_;
  std::vector<std::uint64_t> ends_;  // number of windows in the files up to and including each
};

}  // namespace bonfire
