#include "bonfire/comm/rendezvous.h"

#include <unistd.h>

#include <optional>
#include <thread>
#include <vector>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/version.h"
#include "bonfire/comm/socket.h"
#include "bonfire/comm/store_server.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr const char* kArrived = "check-in/arrived";
constexpr const char* kVerdict = "check-in/verdict";
constexpr const char* kAgreed = "agreed";
constexpr const char* kDiffer = "ranks differ in their ";

std::string key_of(int rank) { return fmt::format("check-in/rank/{}", rank); }

class Meeting {
 public:
  Meeting(c10d::Store& store, const CheckIn& self) : store_(store), self_(self) {}

  void arrive() {
    const std::string mine = json{{"host", host_name()},
                                  {"pid", getpid()},
                                  {"arrival", random_token()},  // two ranks of one process are two
                                  {"size", self_.size},
                                  {"version", self_.version},
                                  {"configuration", self_.configuration}}
                                 .dump();
    const std::string there = store_.compareSet(key_of(self_.rank), "", mine);
    if (there != mine) {
      const std::string verdict =
          fmt::format("two processes say they are rank {}: {} and {}", self_.rank, who(there), who(mine));
      judge(verdict);
      fail("{}", verdict);
    }
    store_.add(kArrived, 1);
  }

  void wait() {
    const auto start = Clock::now();
    // Rank 0 decides for all; the others decide for themselves only where it does not.
    const auto deadline = start + self_.timeout + (self_.rank == 0 ? 0ms : 2000ms);
    auto report = start + self_.report_every;
    auto pause = 1ms;
    while (!store_.check({kVerdict})) {
      if (self_.rank == 0 && store_.add(kArrived, 0) == self_.size) {
        judge(compare());
        break;
      }
      if (Clock::now() >= deadline)
        judge(fmt::format("{} after {:.1f} s", roll_call(), std::chrono::duration<double>(self_.timeout).count()));
      if (Clock::now() >= report && speaks()) {
        self_.log.info("{}", roll_call());
        report += self_.report_every;
      }
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, 50ms);
    }
    const std::string verdict = store_.get_to_str(kVerdict);
    if (verdict == kAgreed) return;
    // Nothing has started yet, and starting again would not help.
    if (verdict.starts_with(kDiffer)) fail_config("{}", verdict);
    fail("{}", verdict);
  }

 private:
  static std::string who(const std::string& text) {
    const json value = json::parse(text, nullptr, false);
    if (!value.is_object()) return "?";
    return fmt::format("pid {} on {}", value.value("pid", 0), value.value("host", "?"));
  }

  // The first verdict stands.
  void judge(const std::string& verdict) { store_.compareSet(kVerdict, "", verdict); }

  bool speaks() { return self_.rank == 0 || (self_.rank == 1 && !store_.check({key_of(0)})); }

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
    const json first = json::parse(store_.get_to_str(key_of(0)));
    for (int rank = 1; rank < self_.size; ++rank) {
      const json other = json::parse(store_.get_to_str(key_of(rank)));
      for (const char* what : {"size", "version", "configuration"}) {
        if (other.at(what) == first.at(what)) continue;
        const auto text = [&](const json& of) {
          return of.at(what).is_string() ? of.at(what).get<std::string>() : of.at(what).dump();
        };
        return fmt::format("{}{}: rank 0 ({}) has '{}', rank {} ({}) has '{}'", kDiffer, what, who(first.dump()),
                           text(first), rank, who(other.dump()), text(other));
      }
    }
    return kAgreed;
  }

  c10d::Store& store_;
  const CheckIn& self_;
};

}  // namespace

std::string CheckIn::own_version() { return "bonfire " BONFIRE_VERSION ", LibTorch " BONFIRE_TORCH_VERSION; }

void check_in(c10d::Store& store, const CheckIn& self) {
  require(self.size >= 1 && self.rank >= 0 && self.rank < self.size, "rank {} of {}: ranks are numbered 0..size-1",
          self.rank, self.size);
  Meeting meeting(store, self);
  meeting.arrive();
  meeting.wait();
}

void check_out(c10d::Store& store, int size) {
  constexpr const char* kLeft = "check-out/left";
  std::int64_t left = store.add(kLeft, 1);
  for (auto pause = 1ms; left < size; pause = std::min(pause * 2, 100ms)) {
    std::this_thread::sleep_for(pause);
    left = store.add(kLeft, 0);
  }
}

}  // namespace bonfire
