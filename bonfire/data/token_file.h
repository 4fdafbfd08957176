#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "bonfire/base/api.h"

namespace bonfire {

class MappedFile;

enum class TokenType { u8, i8, u16, i16, u32, i32, i64 };

BONFIRE_API std::uint64_t bytes_of(TokenType type);

// The tokens of one file, memory-mapped: llm.c's (.bin) or Megatron's (.idx and .bin). The headers, the sizes and every
// entry of an index are checked at open; what is wrong is a ConfigError that names the file, the byte, the value there and
// what is allowed. A small value handle: copies share the mapping. Any thread may read.
class BONFIRE_API TokenFile {
 public:
  // `path` is an llm.c file, or a Megatron .idx, its .bin, or what the two have in common.
  explicit TokenFile(const std::string& path);

  const std::string& path() const;  // of the file that holds the tokens
  std::uint64_t size() const { return size_; }
  TokenType type() const { return type_; }

  // REQUIRES: first + tokens.size() <= size().
  void copy(std::uint64_t first, std::span<std::int64_t> tokens) const;
  // Reads the whole file. Throws ConfigError with the first token that is not in {0, ..., vocab - 1}.
  void check_tokens(std::int64_t vocab) const;

 private:
  void open_llmc(const std::string& path);
  void open_megatron(const std::string& index_path, const std::string& path);
  std::int64_t token(std::uint64_t index) const;

  std::shared_ptr<const MappedFile> file_;
  std::uint64_t offset_ = 0;  // of the first token, in bytes
  std::uint64_t size_ = 0;
  TokenType type_ = TokenType::u16;
};

}  // namespace bonfire
