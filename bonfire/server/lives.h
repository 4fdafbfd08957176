#pragma once

#include <cstdint>
#include <string>

#include <fmt/format.h>

namespace bonfire {

// Where in the store a worker and the servers say who is there. A worker that was lost and is back has another life: each
// has connections of its own.
struct Lives {
  const std::string& name;  // of the parameter server
  int worker;

  // How many it has had.
  std::string count() const { return fmt::format("{}/worker {}/lives", name, worker); }
  // There once it has done all its steps, so that its end is no loss: how many they were.
  std::string steps_of_one_that_left() const { return fmt::format("{}/worker {}/left", name, worker); }
  // Where it and a server connect.
  std::string connection(int server, std::int64_t life) const {
    return fmt::format("{}/{} to {}/life {}", name, server, worker, life);
  }
  // There once the server connects to that life, any but the first.
  std::string accepted(int server, std::int64_t life) const { return connection(server, life) + "/accepted"; }
};

}  // namespace bonfire
