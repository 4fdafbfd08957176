#include "bonfire/data/tokenizer.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

#include "bonfire/base/system_error.h"

namespace bonfire {
namespace {

constexpr std::size_t piece_bytes = 1 << 16;

void check_readable(const std::string& path) {
  if (!std::ifstream(path)) fail_config("'{}': {}", path, std::strerror(errno));
  if (!std::filesystem::is_regular_file(path)) fail_config("'{}': is not a file", path);
}

class Bytes : public Tokenizer {
 public:
  std::int64_t vocab() const override { return 256; }

  void encode_file(const std::string& path, const Take& take) const override {
    check_readable(path);
    std::ifstream file(path, std::ios::binary);
    std::vector<char> text(piece_bytes);
    while (file) {
      file.read(text.data(), static_cast<std::streamsize>(text.size()));
      std::vector<std::int64_t> tokens;
      for (std::streamsize at = 0; at < file.gcount(); ++at) tokens.push_back(static_cast<unsigned char>(text[at]));
      take(tokens);
    }
    require(file.eof(), "'{}': cannot be read to its end", path);
  }
};

class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return number_; }
  void close() {
    if (number_ >= 0) ::close(std::exchange(number_, -1));
  }

 private:
  int number_;
};

// Fills `buffer` as far as it goes; less only at the end.
std::size_t read_fully(int descriptor, char* buffer, std::size_t size) {
  std::size_t filled = 0;
  while (filled < size) {
    const auto got = ::read(descriptor, buffer + filled, size - filled);
    if (got == 0) break;
    if (got < 0 && errno == EINTR) continue;
    require_system(got > 0, "a pipe cannot be read");
    filled += static_cast<std::size_t>(got);
  }
  return filled;
}

struct Pipe {
  Pipe() { require_system(::pipe2(ends, O_CLOEXEC) == 0, "no pipe can be made"); }
  int ends[2];
};

class SentencePiece : public Tokenizer {
 public:
  explicit SentencePiece(const SentencePieceOptions& options) : options_(options) {
    if (!std::filesystem::exists(options.program))
      fail_config(
          "tokenizer '{}' needs '{}', which is built where libsentencepiece-dev is installed; tokenizer 'bytes' does not",
          options.model, options.program);
    check_readable(options.model);
    run({}, [&](std::span<const std::int64_t> numbers) { vocab_ = numbers.empty() ? 0 : numbers[0]; });
    require(vocab_ > 0, "'{}': has a vocabulary of {}", options.model, vocab_);
  }

  std::int64_t vocab() const override { return vocab_; }

  void encode_file(const std::string& path, const Take& take) const override {
    check_readable(path);
    run({path}, take);
  }

 private:
  // The program's answer is int32 numbers: of the text named, its tokens; of no text, the size of the vocabulary.
  void run(const std::vector<std::string>& texts, const Take& take) const {
    std::vector<std::string> arguments{options_.program, options_.model};
    arguments.insert(arguments.end(), texts.begin(), texts.end());
    std::vector<char*> pointers;
    for (auto& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);

    const Pipe output, errors;
    Descriptor output_read(output.ends[0]), output_write(output.ends[1]);
    Descriptor errors_read(errors.ends[0]), errors_write(errors.ends[1]);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, output_write.get(), STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, errors_write.get(), STDERR_FILENO);
    pid_t child = 0;
    const int error = posix_spawn(&child, options_.program.c_str(), &actions, nullptr, pointers.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    require(error == 0, "'{}' does not start: {}", options_.program, std::strerror(error));
    output_write.close();
    errors_write.close();

    std::exception_ptr thrown;
    try {
      read_numbers(output_read.get(), take);
    } catch (...) {
      thrown = std::current_exception();
    }
    // Closed early, the pipe ends the child where nobody wants more of it. What it complains of is short: it fits the pipe.
    output_read.close();
    std::string complaint(4096, '\0');
    complaint.resize(read_fully(errors_read.get(), complaint.data(), complaint.size()));
    errors_read.close();
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (thrown) std::rethrow_exception(thrown);
    if (complaint.ends_with('\n')) complaint.pop_back();
    if (status != 0) fail_config("'{}': SentencePiece failed: {}", options_.model, complaint);
  }

  static void read_numbers(int descriptor, const Take& take) {
    std::vector<std::int32_t> numbers(piece_bytes);
    const auto bytes = numbers.size() * sizeof(numbers[0]);
    for (std::size_t got = bytes; got == bytes;) {
      got = read_fully(descriptor, reinterpret_cast<char*>(numbers.data()), bytes);
      take(std::vector<std::int64_t>(numbers.begin(),
                                     numbers.begin() + static_cast<std::ptrdiff_t>(got / sizeof(numbers[0]))));
    }
  }

  SentencePieceOptions options_;
  std::int64_t vocab_ = 0;
};

}  // namespace

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<Bytes>(); }

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const SentencePieceOptions& options) {
  return std::make_unique<SentencePiece>(options);
}

}  // namespace bonfire
