// Token files: llm.c's alone, and Megatron's index with its tokens. What is accepted can be read to the end.
#include <algorithm>
#include <cstring>
#include <vector>

#include "bonfire/base/error.h"
#include "bonfire/data/token_file.h"
#include "tests/fuzz/scratch_file.h"

namespace {

void read_all(const std::string& path) {
  const bonfire::TokenFile file(path);
  std::vector<std::int64_t> tokens(std::min<std::uint64_t>(file.size(), 1 << 16));
  file.copy(0, tokens);
  file.copy(file.size() - tokens.size(), tokens);
  file.require_tokens(0, tokens, 50257);
}

// What nobody has checked beforehand.
void read_documents(const std::string& path) {
  const bonfire::TokenFile file(path, bonfire::IndexCheck::end);
  std::vector<std::int64_t> starts(std::min<std::uint64_t>(file.size(), 1 << 12));
  file.document_starts(0, starts);
  file.document_starts(file.size() - starts.size(), starts);
}

}  // namespace

// The first byte says which format, and of Megatron's, by sixteenths, how much of the rest is the index.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bonfire::fuzz::ScratchFiles files;
  if (size == 0) return 0;
  const std::uint8_t how = *data++;
  --size;
  const auto attempt = [](const auto& read, const std::string& path) {
    try {
      read(path);
    } catch (const bonfire::Error&) {
    }
  };
  if (how < 16) {
    const std::size_t index = size * how / 15;
    files.write("megatron.bin", data + index, size - index);
    const auto path = files.write("megatron.idx", data, index);
    attempt(read_documents, path);
    attempt(read_all, path);
  } else {
    attempt(read_all, files.write("llmc.bin", data, size));
  }
  return 0;
}
