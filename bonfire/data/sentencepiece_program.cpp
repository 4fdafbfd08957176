// bonfire_sentencepiece MODEL [TEXT]: writes the model's vocabulary size, or the tokens of a text file, as int32 numbers to
// stdout. See tokenizer.h for why this is a program of its own; it uses nothing of the library.
#include <sentencepiece_processor.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace {

// Text is encoded in pieces of at least so many bytes, each up to the end of a line: a bound on memory.
constexpr std::size_t piece_bytes = 1 << 20;

int complain(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  return 1;
}

bool write(const std::vector<std::int32_t>& numbers) {
  return std::fwrite(numbers.data(), sizeof(std::int32_t), numbers.size(), stdout) == numbers.size();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) return complain("usage: bonfire_sentencepiece MODEL [TEXT]");
  sentencepiece::SentencePieceProcessor processor;
  if (const auto status = processor.Load(argv[1]); !status.ok()) return complain(status.ToString());
  if (argc == 2) return write({processor.GetPieceSize()}) ? 0 : complain("stdout cannot be written");

  std::ifstream file(argv[2], std::ios::binary);
  if (!file) return complain(std::string(argv[2]) + " cannot be read");
  std::string piece;
  for (std::string line; std::getline(file, line);) {
    piece += line;
    if (!file.eof()) piece += '\n';
    if (piece.size() < piece_bytes && !file.eof() && file.peek() != std::ifstream::traits_type::eof()) continue;
    std::vector<int> tokens;
    if (const auto status = processor.Encode(piece, &tokens); !status.ok()) return complain(status.ToString());
    if (!write({tokens.begin(), tokens.end()})) return complain("stdout cannot be written");
    piece.clear();
  }
  if (file.bad()) return complain(std::string(argv[2]) + " cannot be read to its end");
  const bool whole = (processor.eos_id() < 0 || write({processor.eos_id()})) && std::fflush(stdout) == 0;
  return whole ? 0 : complain("stdout cannot be written");
}
