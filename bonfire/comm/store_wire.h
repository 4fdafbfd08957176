#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/error.h"
#include "bonfire/comm/secret.h"

// What a store's server and its clients say to each other.
//
// A frame is a 32-bit length and that many bytes. First both sides prove that they know the job's token, which itself never
// travels: the client says hello (kGreeting and a nonce), the server answers with a nonce of its own, the client sends its
// proof over both nonces, and the server, where that is right, its own. Each further frame of a client is a request, an Op
// and its operands. Each frame of a client gets one back, a Status and its content. Numbers are little-endian; a string is a
// 32-bit length and its bytes. All of it stays in one machine's memory order: x86-64 only.
namespace bonfire::wire {

inline constexpr std::string_view kGreeting = "bonfire store 2";
inline constexpr std::uint32_t kLongestHello = 1024;       // before the proof was seen
inline constexpr std::uint32_t kLongestFrame = 64u << 20;  // afterwards

enum class Op : std::uint8_t { set, get, add, compare_set, remove, check, wait, count, append, multi_set, list, will };
// `unheard`: a connection that was dropped for others before it had proved anything; its owner may come again.
enum class Status : std::uint8_t { ok, refused, timeout, invalid, unheard };

// Who proves. The word is part of what is proved, so that no proof can be sent back to the one it came from.
inline constexpr std::string_view kClient = "client", kServer = "server";

// What only somebody who knows the token can say, and only about these two nonces.
inline std::string proof(std::string_view who, std::string_view token, std::string_view client_nonce,
                         std::string_view server_nonce) {
  return hmac_sha256(token, fmt::format("{} {} {} {}", kGreeting, who, client_nonce, server_nonce));
}

class Writer {
 public:
  explicit Writer(std::uint8_t first) : frame_(4, '\0') { frame_ += static_cast<char>(first); }
  Writer() : frame_(4, '\0') {}

  Writer& number(std::int64_t value) {
    frame_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& text(std::string_view value) {
    const auto length = static_cast<std::uint32_t>(value.size());
    require(value.size() < kLongestFrame, "a value of {} bytes is too long for the store: at most {}", value.size(),
            kLongestFrame);
    frame_.append(reinterpret_cast<const char*>(&length), sizeof length);
    frame_.append(value);
    return *this;
  }
  Writer& texts(const std::vector<std::string>& values) {
    number(static_cast<std::int64_t>(values.size()));
    for (const std::string& value : values) text(value);
    return *this;
  }

  // The whole frame, with its length in front.
  std::string finish() {
    const std::size_t length = frame_.size() - 4;
    require(length <= kLongestFrame, "a request of {} bytes is too long for the store: at most {}", length, kLongestFrame);
    const auto prefix = static_cast<std::uint32_t>(length);
    std::memcpy(frame_.data(), &prefix, 4);
    return std::move(frame_);
  }

 private:
  std::string frame_;
};

// Takes a frame's content apart; throws Error where it is shorter than it claims.
class Reader {
 public:
  explicit Reader(std::string_view content) : rest_(content) {}

  std::uint8_t byte() { return static_cast<std::uint8_t>(take(1)[0]); }
  std::int64_t number() {
    std::int64_t value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }
  std::string text() {
    std::uint32_t length;
    std::memcpy(&length, take(sizeof length).data(), sizeof length);
    return std::string(take(length));
  }
  std::vector<std::string> texts() {
    const std::int64_t count = number();
    // Each has at least its length: a count beyond that is a lie, and nothing may be allocated for it.
    require(count >= 0 && static_cast<std::uint64_t>(count) <= rest_.size() / 4, "a list of {} values in {} bytes", count,
            rest_.size());
    std::vector<std::string> values;
    values.reserve(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) values.push_back(text());
    return values;
  }
  void finish() const { require(rest_.empty(), "{} bytes too many in a frame", rest_.size()); }

 private:
  std::string_view take(std::size_t length) {
    require(length <= rest_.size(), "a frame ends early");
    const std::string_view taken = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return taken;
  }

  std::string_view rest_;
};

}  // namespace bonfire::wire
