// Runs a target on every file of the folders that it is given, and on each with its end cut off and with single bits
// flipped. What must not be crashes or throws, and the file is named.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

void run(const Bytes& bytes) { LLVMFuzzerTestOneInput(bytes.data(), bytes.size()); }

// Some hundred of them, whatever the size.
void run_changed(const Bytes& bytes) {
  const std::size_t step = bytes.size() / 100 + 1;
  for (std::size_t at = 0; at < bytes.size(); at += step) {
    run(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(at)));
    for (const int bit : {0, 5, 7}) {
      Bytes changed = bytes;
      changed[at] ^= static_cast<std::uint8_t>(1 << bit);
      run(changed);
    }
  }
}

}  // namespace

int main(int count, char** words) {
  int files = 0;
  for (int at = 1; at < count; ++at)
    for (const auto& file : std::filesystem::directory_iterator(words[at])) {
      std::ifstream in(file.path(), std::ios::binary);
      const Bytes bytes(std::istreambuf_iterator<char>(in), {});
      std::fprintf(stderr, "%s\n", file.path().c_str());
      try {
        run(bytes);
        run_changed(bytes);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", file.path().c_str(), error.what());
        return 1;
      }
      ++files;
    }
  std::fprintf(stderr, "%d files\n", files);
  return files > 0 ? 0 : 1;
}
