// A safetensors file: what is accepted lies inside of the file, and can be read.
#include <algorithm>
#include <vector>

#include "bonfire/checkpoint/safetensors.h"
#include "tests/fuzz/require.h"
#include "tests/fuzz/scratch_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bonfire::fuzz::ScratchFiles files;
  try {
    const bonfire::SafetensorsFile file(files.write("a.safetensors", data, size));
    std::uint64_t end = 0;
    std::vector<std::byte> bytes;
    for (const auto& tensor : file.tensors()) {
      REQUIRE(tensor.begin >= end && tensor.bytes <= size && tensor.begin <= size - tensor.bytes);
      REQUIRE(file.find(tensor.name) == &tensor);
      end = tensor.begin + tensor.bytes;
      bytes.resize(tensor.bytes);
      file.read(tensor, 0, bytes);
    }
  } catch (const bonfire::Error&) {
  }
  return 0;
}
