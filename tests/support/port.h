#pragma once

#include <string>

namespace bonfire::testing {

// A free port of an address of this machine, which nobody is given while it lives, but which a program may listen on.
class Port {
 public:
  explicit Port(const std::string& address = "127.0.0.1");
  ~Port();
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;
  const std::string& number() const { return number_; }

 private:
  int socket_;
  std::string number_;
};

}  // namespace bonfire::testing
