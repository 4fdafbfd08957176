#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"
#include "bonfire/comm/socket.h"

namespace bonfire {

namespace wire {
class Writer;
}

// A key did not appear in time.
class BONFIRE_API StoreTimeout : public Error {
 public:
  using Error::Error;
};

struct StoreClientOptions {
  Endpoint server;
  std::string token;  // what both sides prove that they know; it does not travel
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(5);
  // How long the server may take for a request beyond the time that the request asks it to wait.
  std::chrono::milliseconds answer_timeout = std::chrono::seconds(30);
  int given_up = -1;  // a descriptor; once it is readable, all calls fail at once
};

// Speaks to a StoreServer. Safe to use from any thread: a call that waits holds a connection of its own, so nobody waits
// for anybody else's key.
class BONFIRE_API StoreClient {
 public:
  using Milliseconds = std::chrono::milliseconds;

  // Connects at once. A server that drops a connection before it was heard, for it has too many, is asked again. Throws
  // Error where nobody answers in time, the server does not believe that this process knows the token, or does not prove
  // that it knows it itself.
  explicit StoreClient(StoreClientOptions options);

  void set(const std::string& key, const std::string& value);
  // Waits until all of them are there. Throws StoreTimeout.
  std::vector<std::string> get(const std::vector<std::string>& keys, Milliseconds timeout);
  void wait(const std::vector<std::string>& keys, Milliseconds timeout);
  std::int64_t add(const std::string& key, std::int64_t increment);
  // Sets where the value is `expected` (empty: or not there) and returns what is there afterwards; `expected` where a key
  // with a value was expected and is not there.
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired);
  bool remove(const std::string& key);
  bool check(const std::vector<std::string>& keys);
  std::int64_t count();
  void append(const std::string& key, const std::string& value);
  void multi_set(const std::vector<std::string>& keys, const std::vector<std::string>& values);
  std::vector<std::string> list();

  const Endpoint& server() const { return options_.server; }
  // Made from the token, for other proofs than those of the store.
  std::string secret() const;

  // A connection of one's own, whose end the server notices.
  class BONFIRE_API Presence {
   public:
    Presence(const StoreClient& client, const std::string& key, const std::string& last_words);
    // Goes in good order: nothing is said.
    void leave();

   private:
    const StoreClient& client_;
    std::string key_;
    Socket connection_;
  };

 private:
  Socket connect(Milliseconds most) const;
  Socket greet(const Patience& patience) const;
  // The content of the answer.
  std::string ask(wire::Writer request, Milliseconds patience = Milliseconds(0));
  Patience answer_within(Milliseconds more = Milliseconds(0)) const;
  std::string exchange(const Socket& connection, const std::string& request, const Patience& patience,
                       std::uint32_t longest) const;

  StoreClientOptions options_;
  std::mutex mutex_;
  std::vector<Socket> idle_;
};

}  // namespace bonfire
