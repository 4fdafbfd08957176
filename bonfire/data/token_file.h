#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "bonfire/base/api.h"

namespace bonfire {

class InputFile;

enum class TokenType { u8, i8, u16, i16, u32, i32, i64 };

BONFIRE_API std::uint64_t bytes_of(TokenType type);
BONFIRE_API bool is_signed(TokenType type);

// What of a Megatron index is checked at open: every entry, or only where the last sequence ends, which takes no time.
enum class IndexCheck { entries, end };

// The tokens of one file: llm.c's (.bin) or Megatron's (.idx and .bin). The headers, the sizes and an index are checked at
// open; what is wrong is a ConfigError that names the file, the byte, the value there and what is allowed. A small value
// handle: copies share the open file. Any thread may read.
class BONFIRE_API TokenFile {
 public:
  // `path` is an llm.c file, or a Megatron .idx, its .bin, or what the two have in common.
  explicit TokenFile(const std::string& path, IndexCheck check = IndexCheck::entries);

  const std::string& path() const;  // of the file that holds the tokens
  std::uint64_t size() const { return size_; }
  TokenType type() const { return type_; }

  // Of the file that holds the tokens, when it was opened.
  std::uint64_t bytes() const;
  std::int64_t modified_ns() const;

  // Throws Error where the file has shrunk or cannot be read. REQUIRES: first + tokens.size() <= size().
  void copy(std::uint64_t first, std::span<std::int64_t> tokens) const;
  // The same as they are in the file, for as many as `bytes` holds.
  void read(std::uint64_t first, std::span<std::byte> bytes) const;
  // Whether there is an index that says where documents begin.
  bool knows_documents() const { return index_ != nullptr; }
  // For each of the tokens from `first` on, where its document begins, counted from `first`; 0 where that is before it.
  // Throws ConfigError where the index is not as it should be. REQUIRES: knows_documents(), first + starts.size() <= size().
  void document_starts(std::uint64_t first, std::span<std::int64_t> starts) const;
  // Throws ConfigError with the first of `tokens`, which begin at `first`, that is not in {0, ..., vocab - 1}.
  void require_tokens(std::uint64_t first, std::span<const std::int64_t> tokens, std::int64_t vocab) const;

 private:
  // The first token of document `number`, and of what would follow the last.
  std::uint64_t document_begin(std::uint64_t number) const;
  void open_llmc(const std::string& path);
  void open_megatron(const std::string& index_path, const std::string& path, IndexCheck check);

  std::shared_ptr<const InputFile> file_;
  std::shared_ptr<const InputFile> index_{};  // Megatron's
  std::uint64_t sequences_ = 0, documents_ = 0;
  std::uint64_t offset_ = 0;  // of the first token, in bytes
  std::uint64_t size_ = 0;
  TokenType type_ = TokenType::u16;
};

}  // namespace bonfire
