#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/output_file.h"

namespace bonfire {

enum class TokenFormat { llmc, megatron };

struct TokenWriterOptions {
  std::string path;  // ends in .bin; Megatron's index goes beside it
  TokenFormat format = TokenFormat::llmc;
  std::int64_t vocab = 0;  // decides how wide a token is
};

// Writes a token file, document by document. The file has its name only once it is whole; without finish(), what
// was written goes with the writer.
class BONFIRE_API TokenWriter {
 public:
  explicit TokenWriter(const TokenWriterOptions& options);

  void append(std::span<const std::int64_t> tokens);
  void end_document();
  // Ends the last document too. Nothing may follow.
  void finish();

  std::uint64_t tokens() const { return tokens_; }
  std::uint64_t width() const { return width_; }  // bytes of a token

 private:
  void write_header();
  void write_index(OutputFile& index) const;

  TokenWriterOptions options_;
  std::string index_path_;
  std::optional<OutputFile> file_;
  std::uint64_t width_;
  std::uint64_t tokens_ = 0;
  std::uint64_t in_document_ = 0;
  std::vector<std::int32_t> documents_;  // their lengths
};

}  // namespace bonfire
