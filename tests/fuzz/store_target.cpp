// What a store is sent, by strangers and by those who know the token. It answers or hangs up, and serves the next one.
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>

#include "bonfire/base/error.h"
#include "bonfire/comm/store_server.h"
#include "bonfire/comm/store_wire.h"
#include "tests/fuzz/require.h"

namespace {

using namespace bonfire;

constexpr const char* token = "token";

Deadline soon() { return deadline_in(std::chrono::seconds(20)); }

std::string answer(const Socket& connection) {
  std::array<char, 4> prefix{};
  receive_all(connection, prefix, soon());
  std::uint32_t length = 0;
  std::memcpy(&length, prefix.data(), 4);
  REQUIRE(length <= wire::kLongestFrame);
  std::string content(length, '\0');
  receive_all(connection, content, soon());
  return content;
}

void introduce(const Socket& connection) {
  send_all(connection, wire::Writer().text(wire::kGreeting).text("nonce").finish(), soon());
  const std::string hello = answer(connection);
  wire::Reader reader(hello);
  REQUIRE(reader.byte() == static_cast<std::uint8_t>(wire::Status::ok));
  const std::string nonce = reader.text();
  send_all(connection, wire::Writer().text(wire::proof(wire::kClient, token, "nonce", nonce)).finish(), soon());
  REQUIRE(answer(connection).at(0) == static_cast<char>(wire::Status::ok));
}

// Until the other side has said all that it will.
void drain(const Socket& connection) {
  shutdown(connection.fd(), SHUT_WR);
  std::array<char, 4096> bytes;
  while (recv(connection.fd(), bytes.data(), bytes.size(), 0) > 0) continue;
}

}  // namespace

// The first byte says whether the rest comes from a stranger; how it is cut into frames is its own business, unless its
// second bit is set: then each frame has a length that is right.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static std::unique_ptr<StoreServer> server;
  static int served = 0;
  if (!server || ++served % 500 == 0)
    server = std::make_unique<StoreServer>(StoreServerOptions{.token = token, .log = Log::silent()});
  if (size == 0) return 0;
  const std::uint8_t how = *data++;
  const std::string_view rest(reinterpret_cast<const char*>(data), --size);
  {
    const Socket connection = connect_to(server->endpoint(), soon());
    if (how & 1) introduce(connection);
    std::string said(rest);
    if (how & 2) {
      const auto length = static_cast<std::uint32_t>(rest.size());
      said.insert(0, reinterpret_cast<const char*>(&length), 4);
    }
    try {
      send_all(connection, said, soon());
    } catch (const Error&) {
      // It has hung up already.
    }
    drain(connection);
  }
  const Socket next = connect_to(server->endpoint(), soon());
  introduce(next);
  return 0;
}
