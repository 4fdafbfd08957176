#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <utility>

#include "bonfire/base/input_file.h"
#include "bonfire/base/system_error.h"
#include "bonfire/text/tokenizer.h"

namespace bonfire {
namespace {

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

// A running bonfire_sentencepiece, which one thread at a time may ask.
class SentencePieceProcess {
 public:
  explicit SentencePieceProcess(const SentencePieceOptions& options) : options_(options) {
    // A socket, because a write to it can fail without a signal.
    int talk[2], errors[2];
    require_system(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, talk) == 0, "no socket can be made");
    talk_.emplace(talk[0]);
    const Descriptor theirs(talk[1]);
    require_system(::pipe2(errors, O_CLOEXEC) == 0, "no pipe can be made");
    errors_.emplace(errors[0]);
    const Descriptor complains(errors[1]);

    std::vector<std::string> arguments{options.program, options.model};
    std::vector<char*> pointers{arguments[0].data(), arguments[1].data(), nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, complains.get(), STDERR_FILENO);
    const int error = posix_spawn(&child_, options.program.c_str(), &actions, nullptr, pointers.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    require(error == 0, "'{}' does not start: {}", options.program, std::strerror(error));
  }

  ~SentencePieceProcess() { end(); }
  SentencePieceProcess(const SentencePieceProcess&) = delete;
  SentencePieceProcess& operator=(const SentencePieceProcess&) = delete;

  std::string ask(char kind, std::string_view request) {
    const auto length = static_cast<std::uint32_t>(request.size());
    require(length == request.size(), "a text of {} bytes is too large for SentencePiece", request.size());
    std::string message(1, kind);
    message.append(reinterpret_cast<const char*>(&length), sizeof(length)).append(request);
    for (std::size_t sent = 0; sent < message.size();) {
      const auto bytes = ::send(talk_->get(), message.data() + sent, message.size() - sent, MSG_NOSIGNAL);
      if (bytes < 0 && errno == EINTR) continue;
      if (bytes < 0) complain();
      sent += static_cast<std::size_t>(bytes);
    }
    return answer();
  }

  std::string answer() {
    std::uint32_t length = 0;
    receive(reinterpret_cast<char*>(&length), sizeof(length));
    std::string bytes(length, '\0');
    receive(bytes.data(), bytes.size());
    return bytes;
  }

 private:
  void receive(char* buffer, std::size_t size) {
    for (std::size_t got = 0; got < size;) {
      const auto bytes = ::recv(talk_->get(), buffer + got, size - got, 0);
      if (bytes < 0 && errno == EINTR) continue;
      if (bytes <= 0) complain();
      got += static_cast<std::size_t>(bytes);
    }
  }

  // It has ended; what it complained of is short and fits the pipe.
  [[noreturn]] void complain() {
    talk_->close();
    std::string words(4096, '\0');
    std::size_t got = 0;
    for (ssize_t bytes = 1; bytes > 0 && got < words.size();) {
      bytes = ::read(errors_->get(), words.data() + got, words.size() - got);
      if (bytes < 0 && errno == EINTR)
        bytes = 1;
      else if (bytes > 0)
        got += static_cast<std::size_t>(bytes);
    }
    words.resize(got);
    if (words.ends_with('\n')) words.pop_back();
    fail_config("'{}': SentencePiece failed: {}", options_.model, words);
  }

  void end() {
    talk_->close();
    int status = 0;
    while (::waitpid(child_, &status, 0) < 0 && errno == EINTR) {
    }
  }

  SentencePieceOptions options_;
  std::optional<Descriptor> talk_, errors_;
  pid_t child_ = 0;
};

std::vector<std::int32_t> numbers_in(const std::string& bytes) {
  std::vector<std::int32_t> numbers(bytes.size() / sizeof(std::int32_t));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(std::int32_t));
  return numbers;
}

class SentencePieceEncoder : public Encoder {
 public:
  explicit SentencePieceEncoder(const SentencePieceOptions& options) : process_(options) { process_.answer(); }

  void encode(std::string_view text, const EncodeOptions&, std::vector<std::int64_t>& tokens) override {
    const auto numbers = numbers_in(process_.ask('e', text));
    tokens.insert(tokens.end(), numbers.begin(), numbers.end());
  }

 private:
  SentencePieceProcess process_;
};

class SentencePiece : public Tokenizer {
 public:
  explicit SentencePiece(const SentencePieceOptions& options) : options_(options) {
    if (!std::filesystem::exists(options.program))
      fail_config("tokenizer '{}' needs '{}', which is built where libsentencepiece-dev is installed; others do not",
                  options.model, options.program);
    const InputFile readable(options.model);
    process_.emplace(options);
    const auto about = numbers_in(process_->answer());
    require(about.size() == 2 && about[0] > 0, "'{}': has no vocabulary", options.model);
    vocab_ = about[0];
    if (about[1] >= 0) end_ = about[1];
  }

  std::int64_t vocab() const override { return vocab_; }
  std::optional<std::int64_t> end_of_text() const override { return end_; }
  std::unique_ptr<Encoder> encoder() const override { return std::make_unique<SentencePieceEncoder>(options_); }

  // Its control tokens, which are special, are never written.
  std::string decode(std::span<const std::int64_t> tokens, const DecodeOptions&) const override {
    std::string request;
    for (const auto token : tokens) {
      if (token < 0 || token >= vocab_) continue;
      const auto number = static_cast<std::int32_t>(token);
      request.append(reinterpret_cast<const char*>(&number), sizeof(number));
    }
    return ask('d', request);
  }

  std::optional<std::int64_t> find(std::string_view token) const override {
    const auto found = numbers_in(ask('f', token)).at(0);
    if (found < 0) return std::nullopt;
    return found;
  }

 private:
  std::string ask(char kind, std::string_view request) const {
    const std::lock_guard lock(asking_);
    return process_->ask(kind, request);
  }

  SentencePieceOptions options_;
  mutable std::mutex asking_;
  mutable std::optional<SentencePieceProcess> process_;
  std::int64_t vocab_ = 0;
  std::optional<std::int64_t> end_;
};

}  // namespace

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const SentencePieceOptions& options) {
  return std::make_unique<SentencePiece>(options);
}

}  // namespace bonfire
