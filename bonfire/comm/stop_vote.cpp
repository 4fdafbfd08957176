#include "bonfire/comm/stop_vote.h"

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

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
    if (votes_->add(key("votes"), 1) != options_.size) return;
    std::int64_t last = *promised_;
    for (int rank = 0; rank < options_.size; ++rank)
      last = std::max<std::int64_t>(last, std::stoll(votes_->get_to_str(key(std::to_string(rank)))));
    const std::string text = std::to_string(last);
    votes_->compareSet(key("decision"), std::vector<std::uint8_t>(), {text.begin(), text.end()});
  } catch (const std::exception&) {
    // The store is gone, and the run with it: others say so.
  }
}

bool StopVote::is_last(std::int64_t step) {
  {
    const std::lock_guard lock(mutex_);
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
      decisions_->wait({key("decision")}, options_.patience);
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
