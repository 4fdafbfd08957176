#include "tests/support/port.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace bonfire::testing {

// Bound and not listening: another socket with the same option may listen there, and the kernel gives the number to nobody.
Port::Port(const std::string& address) : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const int on = 1;
  setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  socklen_t length = sizeof name;
  EXPECT_EQ(inet_pton(AF_INET, address.c_str(), &name.sin_addr), 1);
  EXPECT_EQ(bind(socket_, reinterpret_cast<const sockaddr*>(&name), length), 0);
  EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&name), &length), 0);
  number_ = std::to_string(ntohs(name.sin_port));
}

Port::~Port() { close(socket_); }

}  // namespace bonfire::testing
