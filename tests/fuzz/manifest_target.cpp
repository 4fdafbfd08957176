// manifest.json: what is accepted is the same when it is written and read again.
#include <string_view>

#include "bonfire/checkpoint/manifest.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto manifest = bonfire::parse_manifest(text, "manifest.json");
    REQUIRE(bonfire::parse_manifest(bonfire::to_json(manifest), "again") == manifest);
    for (const auto& tensor : manifest.tensors)
      for (const auto& piece : tensor.pieces) REQUIRE(piece.file.find('/') == std::string::npos);
  } catch (const bonfire::ConfigError&) {
  }
  try {
    const auto tensors = bonfire::parse_pieces(text, "rank-00000.json");
    REQUIRE(bonfire::parse_pieces(bonfire::pieces_to_json(tensors), "again") == tensors);
    bonfire::merge_pieces({tensors, tensors});
  } catch (const bonfire::Error&) {
  }
  return 0;
}
