#include "bonfire/comm/stop_vote.h"

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/comm/stall.h"

namespace bonfire {
namespace {

constexpr const char* kNone = "none";

}  // namespace

StopVote::StopVote(c10d::Store& store, Options options)
    : votes_(store.clone()), decisions_(store.clone()), options_(std::move(options)), current_(options_.first_step) {}

StopVote::~StopVote() = default;

std::string StopVote::key(const std::string& what) const { return fmt::format("stop/{}/{}", round_, what); }

void StopVote::ask() {
  const std::lock_guard lock(mutex_);
  if (promised_) return;
  promised_ = current_;
  try {
    // Votes that failed before this rank heard of them.
    while (votes_->check({key("decision")}) && votes_->get_to_str(key("decision")) == kNone) ++round_;
    votes_->set(key(std::to_string(options_.rank)), std::to_string(*promised_));
    if (votes_->add(key("votes"), 1) == options_.size)
      conclude(*votes_);
    else
      conclude_without_the_lost(*votes_);
  } catch (const std::exception&) {
    // The store is gone, and the run with it: others say so.
  }
}

// Unless a rank has not voted that somebody waits for.
void StopVote::conclude(c10d::Store& store) const {
  std::int64_t last = 0;
  for (int rank = 0; rank < options_.size; ++rank) {
    if (const auto vote = key(std::to_string(rank)); store.check({vote}))
      last = std::max<std::int64_t>(last, std::stoll(store.get_to_str(vote)));
    else if (!store.check({lost_key(rank)}) || !lost_for_good(store.get_to_str(lost_key(rank))))
      return;
  }
  const std::string text = std::to_string(last);
  store.compareSet(key("decision"), std::vector<std::uint8_t>(), {text.begin(), text.end()});
}

void StopVote::conclude_without_the_lost(c10d::Store& store) const {
  if (store.check({kAnyLost})) conclude(store);
}

// What the others have agreed on while this rank was away.
void StopVote::hear() {
  try {
    while (votes_->check({key("decision")})) {
      const std::string decision = votes_->get_to_str(key("decision"));
      if (decision != kNone) {
        promised_ = decided_ = std::stoll(decision);
        return;
      }
      ++round_;
    }
  } catch (const std::exception&) {
    // The store is gone, and the run with it: others say so.
  }
}

bool StopVote::is_last(std::int64_t step) {
  {
    const std::lock_guard lock(mutex_);
    if (options_.returned && !promised_) hear();
    if (!promised_ || step < *promised_) {
      current_ = step + 1;
      return false;
    }
  }
  // The vote is given, so nobody writes what is read here.
  if (!decided_) decided_ = decision();
  const std::lock_guard lock(mutex_);
  current_ = step + 1;
  if (decided_) return step >= *decided_;
  ++round_;
  promised_.reset();
  if (options_.failed) options_.failed();
  return false;
}

std::optional<std::int64_t> StopVote::decision() {
  std::string decided = kNone;
  try {
    try {
      // Whoever is lost while the others wait for its vote says nothing any more: they look.
      constexpr auto slice = std::chrono::milliseconds(500);
      for (auto left = options_.patience; left.count() > 0; left -= slice) {
        const auto before = std::chrono::steady_clock::now();
        try {
          decisions_->wait({key("decision")}, std::min(left, slice));
          break;
        } catch (const std::exception&) {
          if (std::chrono::steady_clock::now() < before + std::min(left, slice) / 2) throw;  // not for want of time
        }
        conclude_without_the_lost(*decisions_);
      }
    } catch (const std::exception&) {
      // Somebody has not voted.
    }
    // Written once: what was decided meanwhile counts.
    const auto bytes = [](const std::string& text) { return std::vector<std::uint8_t>(text.begin(), text.end()); };
    const auto answer = decisions_->compareSet(key("decision"), bytes(""), bytes(kNone));
    decided.assign(answer.begin(), answer.end());
  } catch (const std::exception&) {
    // The store is gone, and the run with it: others say so.
  }
  if (decided != kNone) return std::stoll(decided);
  options_.log.warning(
      "rank {} was asked to end the run, but not all ranks were within {:.0f} s: it goes on; ask the launcher",
      options_.rank, std::chrono::duration<double>(options_.patience).count());
  return std::nullopt;
}

}  // namespace bonfire
