#include "bonfire/comm/rendezvous.h"

#include <unistd.h>

#include <optional>
#include <vector>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/version.h"
#include "bonfire/comm/socket.h"
#include "bonfire/comm/store_client.h"
#include "bonfire/comm/store_server.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr const char* kArrived = "check-in/arrived";
constexpr const char* kGathered = "check-in/gathered";  // all have arrived, or there is a verdict already
constexpr const char* kVerdict = "check-in/verdict";
constexpr const char* kCallers = "check-in/callers";  // who would say that rank 0 is missing
constexpr const char* kAgreed = "agreed";
constexpr const char* kDiffer = "ranks differ in their ";
constexpr const char* kCalledOff = "the run was asked to stop before all ranks were there";

std::string key_of(int rank) { return fmt::format("check-in/rank/{}", rank); }

class Meeting {
 public:
  Meeting(c10d::Store& store, const CheckIn& self) : store_(store), self_(self) {}

  void arrive() {
    const std::string mine = own_words().dump();
    const std::string there = store_.compareSet(key_of(self_.rank), "", mine);
    if (there != mine) {
      const std::string verdict =
          fmt::format("two processes say they are rank {}: {} and {}", self_.rank, who(there), who(mine));
      judge(verdict);
      fail("{}", verdict);
    }
    if (store_.add(kArrived, 1) == self_.size) store_.set(kGathered, kAgreed);
  }

  void return_alone() {
    const std::string verdict = difference(json::parse(store_.get_to_str(key_of(0))), own_words(), self_.rank);
    if (verdict != kAgreed) fail_config("{}", verdict);
  }

  void wait() {
    const auto deadline = Clock::now() + self_.timeout;
    // Rank 0 decides for all.
    if (self_.rank == 0) {
      if (!wait_until(kGathered, deadline, true)) judge_absent();
      if (!store_.check({kVerdict})) judge(compare());
    } else if (!wait_until(kVerdict, deadline + 2s, self_.rank == 1)) {
      // It does not: one of the others calls the roll, and the rest wait for what it says.
      if (store_.add(kCallers, 1) == 1)
        judge_absent();
      else
        wait_until(kVerdict, Clock::now() + 60s, false);
    }
    const std::string verdict = store_.get_to_str(kVerdict);
    if (verdict == kAgreed) return;
    if (verdict == kCalledOff) throw StoppedOnRequest(verdict);
    // Nothing has started yet, and starting again would not help.
    if (verdict.starts_with(kDiffer)) fail_config("{}", verdict);
    fail("{}", verdict);
  }

 private:
  json own_words() const {
    return {
        {"host", host_name()}, {"pid", getpid()},          {"arrival", random_token()},  // two ranks of one process are two
        {"size", self_.size},  {"version", self_.version}, {"configuration", self_.configuration}};
  }

  static std::string who(const std::string& text) {
    const json value = json::parse(text, nullptr, false);
    if (!value.is_object()) return "?";
    return fmt::format("pid {} on {}", value.value("pid", 0), value.value("host", "?"));
  }

  // The first verdict stands.
  void judge(const std::string& verdict) {
    store_.compareSet(kVerdict, "", verdict);
    store_.set(kGathered, kAgreed);
  }

  void judge_absent() {
    judge(fmt::format("{} after {:.1f} s", roll_call(), std::chrono::duration<double>(self_.timeout).count()));
  }

  // Sleeps in the store, and says from time to time who is missing, if it is for this rank to say. False at the deadline.
  bool wait_until(const char* key, Clock::time_point deadline, bool may_speak) {
    while (true) {
      const auto slice = may_speak ? std::min(deadline, Clock::now() + self_.report_every) : deadline;
      try {
        store_.wait({key}, std::max(1ms, std::chrono::ceil<std::chrono::milliseconds>(slice - Clock::now())));
        return true;
      } catch (const std::exception&) {
        if (Clock::now() + 50ms < slice) throw;  // that was not for want of time
      }
      // Who differs says more than who is missing. Where sizes differ it may be that nobody thinks it is the last.
      if (self_.rank == 0)
        if (const std::string verdict = compare(); verdict != kAgreed) {
          judge(verdict);
          return true;
        }
      if (Clock::now() >= deadline) return false;
      if (self_.rank == 0 || !store_.check({key_of(0)})) self_.log.info("{}", roll_call());
    }
  }

  std::string roll_call() {
    std::vector<int> missing;
    for (int rank = 0; rank < self_.size; ++rank)
      if (!store_.check({key_of(rank)})) missing.push_back(rank);
    constexpr std::size_t kMostNamed = 16;
    const std::size_t count = missing.size();
    const bool many = count > kMostNamed;
    if (many) missing.resize(kMostNamed);
    return fmt::format("have {} of {}, missing rank{} {}{}", static_cast<std::size_t>(self_.size) - count, self_.size,
                       count == 1 ? "" : "s", fmt::join(missing, ", "), many ? ", ..." : "");
  }

  // Everybody's words against rank 0's.
  std::string compare() {
    std::vector<std::string> keys;
    for (int rank = 0; rank < self_.size; ++rank) keys.push_back(key_of(rank));
    // Not all may be there yet.
    if (!store_.check(keys)) std::erase_if(keys, [&](const std::string& key) { return !store_.check({key}); });
    const auto words = store_.multiGet(keys);
    const json first = json::parse(words.front());
    for (std::size_t at = 1; at < keys.size(); ++at) {
      const int rank = std::stoi(keys[at].substr(key_of(0).size() - 1));
      if (auto verdict = difference(first, json::parse(words[at]), rank); verdict != kAgreed) return verdict;
    }
    return kAgreed;
  }

  static std::string difference(const json& first, const json& other, int rank) {
    for (const char* what : {"size", "version", "configuration"}) {
      if (other.at(what) == first.at(what)) continue;
      const auto text = [&](const json& of) {
        return of.at(what).is_string() ? of.at(what).get<std::string>() : of.at(what).dump();
      };
      return fmt::format("{}{}: rank 0 ({}) has '{}', rank {} ({}) has '{}'", kDiffer, what, who(first.dump()), text(first),
                         rank, who(other.dump()), text(other));
    }
    return kAgreed;
  }

  c10d::Store& store_;
  const CheckIn& self_;
};

constexpr const char *kLeft = "check-out/left", *kAll = "check-out/all left";

// As long as the milliseconds fit into an int, which some stores count them in.
void wait_until_all_left(c10d::Store& store) { store.wait({kAll}, std::chrono::hours(24 * 20)); }

// A rank that is lost between the two counts twice: the others then leave one rank early. The other way round they would
// wait for ever.
template <class Store>
void count_out(Store& store, const std::string& prefix, int rank, int size) {
  const std::string counted = fmt::format("{}check-out/rank/{}", prefix, rank), yes = "yes";
  if (store.check({counted})) return;
  if (store.add(prefix + kLeft, 1) == size) store.set(prefix + kAll, yes);
  store.set(counted, yes);
}

}  // namespace

std::string CheckIn::own_version() { return "bonfire " BONFIRE_VERSION ", LibTorch " BONFIRE_TORCH_VERSION; }

void check_in(c10d::Store& store, const CheckIn& self) {
  require(self.size >= 1 && self.rank >= 0 && self.rank < self.size, "rank {} of {}: ranks are numbered 0..size-1",
          self.rank, self.size);
  Meeting meeting(store, self);
  meeting.arrive();
  meeting.wait();
}

void check_in_again(c10d::Store& store, const CheckIn& self) { Meeting(store, self).return_alone(); }

void call_off_check_in(c10d::Store& store) {
  store.compareSet(kVerdict, "", kCalledOff);
  store.set(kGathered, kAgreed);
}

void check_out(c10d::Store& store, int size) {
  if (store.add(kLeft, 1) == size) store.set(kAll, "yes");
  wait_until_all_left(store);
}

void check_out_once(c10d::Store& store, int rank, int size) {
  count_out(store, "", rank, size);
  wait_until_all_left(store);
}

void check_out_lost(StoreClient& store, const std::string& prefix, int rank, int size) {
  count_out(store, prefix, rank, size);
}

}  // namespace bonfire
