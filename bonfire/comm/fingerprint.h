#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}

namespace bonfire {

// The debug mode of a group: before a collective begins, every rank writes what it is about to do where all can read it,
// and compares. A mismatch, which would hang or corrupt, becomes an error that names both sides.
class FingerprintBoard {
 public:
  FingerprintBoard(c10::intrusive_ptr<c10d::Store> store, std::string group, std::vector<int> world_ranks, int rank,
                   std::chrono::milliseconds timeout);

  // Collective: throws unless all ranks of the group say the same `what` for their collective number `sequence`.
  void compare(std::int64_t sequence, const std::string& what);

  // Point-to-point: the sender announces, and the receiver compares when it waits, so neither holds up the other.
  void announce_send(int to, const std::string& what);
  std::int64_t next_receive(int from) { return received_.at(static_cast<std::size_t>(from))++; }
  void compare_receive(int from, std::int64_t number, const std::string& what);

 private:
  std::string read(const std::string& key, int rank, const std::string& meanwhile);

  c10::intrusive_ptr<c10d::Store> store_;
  std::string group_;
  std::string id_;  // of the group, in keys: its name holds all of its members
  std::vector<int> world_ranks_;
  int rank_;
  std::chrono::milliseconds timeout_;
  std::vector<std::int64_t> sent_, received_;  // messages so far, per peer
};

}  // namespace bonfire
