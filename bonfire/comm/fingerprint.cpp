#include "bonfire/comm/fingerprint.h"

#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/secret.h"

namespace bonfire {

FingerprintBoard::FingerprintBoard(c10::intrusive_ptr<c10d::Store> store, std::string group, std::vector<int> world_ranks,
                                   int rank, std::chrono::milliseconds timeout)
    : store_(std::move(store)),
      group_(std::move(group)),
      id_(short_hash(group_)),
      world_ranks_(std::move(world_ranks)),
      rank_(rank),
      timeout_(timeout),
      sent_(world_ranks_.size()),
      received_(world_ranks_.size()) {}

std::string FingerprintBoard::read(const std::string& key, int rank, const std::string& meanwhile) {
  try {
    store_->wait({key}, timeout_);
  } catch (const std::exception&) {
    fail("group '{}': rank {} is in {}, but rank {} did not come to it within {} s", group_, world_ranks_[rank_], meanwhile,
         world_ranks_[rank], std::chrono::duration<double>(timeout_).count());
  }
  const auto bytes = store_->get(key);
  return {bytes.begin(), bytes.end()};
}

void FingerprintBoard::compare(std::int64_t sequence, const std::string& what) {
  const auto key = [&](std::int64_t number, int rank) { return fmt::format("fingerprint/{}/{}/{}", id_, number, rank); };
  store_->set(key(sequence, rank_), what);
  for (int other = 0; other < static_cast<int>(world_ranks_.size()); ++other) {
    if (other == rank_) continue;
    const auto theirs = read(key(sequence, other), other, fmt::format("collective #{} ({})", sequence, what));
    require(theirs == what, "group '{}', collective #{}: rank {} calls {}, but rank {} calls {}", group_, sequence,
            world_ranks_[rank_], what, world_ranks_[other], theirs);
  }
  // Everybody has read number s - 1 before anybody writes s + 1, so the one before can go.
  if (sequence > 2) store_->deleteKey(key(sequence - 2, rank_));
}

void FingerprintBoard::announce_send(int to, const std::string& what) {
  store_->set(fmt::format("message/{}/{}-{}/{}", id_, rank_, to, sent_.at(to)++), what);
}

void FingerprintBoard::compare_receive(int from, std::int64_t number, const std::string& what) {
  const auto key = fmt::format("message/{}/{}-{}/{}", id_, from, rank_, number);
  const auto theirs = read(key, from, fmt::format("receive of message #{} ({})", number, what));
  require(theirs == what, "group '{}', message #{} from rank {} to rank {}: sent is {}, but expected is {}", group_, number,
          world_ranks_[from], world_ranks_[rank_], theirs, what);
  store_->deleteKey(key);
}

}  // namespace bonfire
