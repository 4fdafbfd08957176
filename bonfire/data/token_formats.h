#pragma once

#include <cstdint>

// The bytes of the two token formats, all little-endian; read by TokenFile, written by TokenWriter.
namespace bonfire {

// .bin: 256 int32 (magic, version, number of tokens, zeros), then the tokens.
namespace llmc {
inline constexpr std::int32_t magic_u16 = 20240520, version_u16 = 1;
inline constexpr std::int32_t magic_u32 = 20240801, version_u32 = 7;
inline constexpr std::uint64_t header_bytes = 1024;
}  // namespace llmc

// .idx: this header, then int32 length and int64 byte pointer of every sequence, then int64 bounds of the documents, counted
// in sequences. The tokens are in the .bin.
namespace megatron {
inline constexpr char magic[] = "MMIDIDX\0";  // and the zero that ends it
inline constexpr std::uint64_t magic_bytes = 9;
inline constexpr std::uint64_t version_at = 9, code_at = 17, sequences_at = 18, documents_at = 26, header_bytes = 34;
inline constexpr std::uint8_t code_i32 = 4, code_u16 = 8;
}  // namespace megatron

}  // namespace bonfire
