// bonfire_sentencepiece MODEL: answers requests on stdin until that ends. First of all, and as every answer, it writes a
// length in bytes (uint32) and that many bytes; a request is a letter, a length and that many bytes:
//   at the start   the vocabulary's size and the end-of-sentence token, or -1 (int32)
//   'e' text       its tokens (int32)
//   'd' tokens     their text
//   'f' piece      its token, or -1 (int32)
// See tokenizer.h for why this is a program of its own; it uses nothing of the library.
#include <sentencepiece_processor.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace {

int complain(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  return 1;
}

bool answer(const void* data, std::size_t bytes) {
  const auto length = static_cast<std::uint32_t>(bytes);
  return std::fwrite(&length, sizeof(length), 1, stdout) == 1 && std::fwrite(data, 1, bytes, stdout) == bytes &&
         std::fflush(stdout) == 0;
}

bool answer(const std::vector<int>& numbers) { return answer(numbers.data(), numbers.size() * sizeof(int)); }

}  // namespace

int main(int argc, char** argv) {
  static_assert(sizeof(int) == sizeof(std::int32_t));
  if (argc != 2) return complain("usage: bonfire_sentencepiece MODEL");
  sentencepiece::SentencePieceProcessor processor;
  if (const auto status = processor.Load(argv[1]); !status.ok()) return complain(status.ToString());
  bool answered = answer({processor.GetPieceSize(), processor.eos_id()});
  while (answered) {
    const int kind = std::getchar();
    if (kind == EOF) return 0;
    std::uint32_t length = 0;
    if (std::fread(&length, sizeof(length), 1, stdin) != 1) return complain("a request ends too early");
    std::string request(length, '\0');
    if (std::fread(request.data(), 1, length, stdin) != length) return complain("a request ends too early");
    if (kind == 'e') {
      std::vector<int> tokens;
      if (const auto status = processor.Encode(request, &tokens); !status.ok()) return complain(status.ToString());
      answered = answer(tokens);
    } else if (kind == 'd') {
      std::vector<int> tokens(length / sizeof(int));
      std::memcpy(tokens.data(), request.data(), tokens.size() * sizeof(int));
      std::string text;
      if (const auto status = processor.Decode(tokens, &text); !status.ok()) return complain(status.ToString());
      answered = answer(text.data(), text.size());
    } else if (kind == 'f') {
      const int token = processor.PieceToId(request);
      answered = answer({processor.IdToPiece(token) == request ? token : -1});
    } else {
      return complain("a request of an unknown kind");
    }
  }
  return complain("an answer cannot be written");
}
