// What launchers tell each other, and the ranks' watchers, through the store: also where that does not answer.
#include <csignal>
#include <future>
#include <memory>
#include <set>
#include <thread>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "bonfire/base/clock.h"
#include "bonfire/comm/held_ranks.h"
#include "bonfire/comm/node_link.h"
#include "bonfire/comm/stall.h"
#include "bonfire/comm/store_server.h"
#include "tests/comm/child.h"
#include "tests/support/port.h"

namespace bonfire::launchers_test {
namespace {

using namespace std::chrono_literals;

// Does it end, where it must not wait for a store that says nothing?
template <class Function>
bool ends(const Function& function) {
  auto running = std::async(std::launch::async, function);
  return running.wait_for(60s) == std::future_status::ready;
}

StoreClientOptions patient(const Endpoint& server) {
  return {.server = server, .token = "t", .connect_timeout = 10min, .answer_timeout = 10min};
}

std::string held(StoreClient& client, int rank) {
  const std::string key = "attempt 0/" + held_key(rank);
  return client.check({key}) ? client.get({key}, 1s).front() : "";
}

// One call that fails is not the last word: neither a hold nor its end may be lost.
TEST(HeldRanks, AreToldOnceTheStoreCanBeReached) {
  const testing::Port port;
  const Endpoint place{"127.0.0.1", std::stoi(port.number())};
  HeldRanks ranks({.store = {.server = place, .token = "t", .connect_timeout = 50ms}, .log = Log::silent()});
  ranks.hold(2, "a debugger");
  EXPECT_FALSE(ranks.told(300ms));
  auto server = std::make_unique<StoreServer>(StoreServerOptions{.listen = place, .token = "t", .log = Log::silent()});
  ASSERT_TRUE(ranks.told(60s));
  {
    StoreClient client(patient(place));
    EXPECT_TRUE(client.check({std::string("attempt 0/") + kAnyHeld}));
    EXPECT_TRUE(says_held(held(client, 2)));
    EXPECT_EQ(held(client, 1), "");
  }
  server.reset();
  ranks.hold(2, "");
  EXPECT_FALSE(ranks.told(300ms));
  server = std::make_unique<StoreServer>(StoreServerOptions{.listen = place, .token = "t", .log = Log::silent()});
  ASSERT_TRUE(ranks.told(60s));
  StoreClient client(patient(place));
  EXPECT_FALSE(says_held(held(client, 2)));
}

// A hold that was over before anybody looked is one that they can see.
TEST(HeldRanks, EveryHoldLeavesAnotherText) {
  StoreServer server({.token = "t", .log = Log::silent()});
  StoreClient client(patient(server.endpoint()));
  HeldRanks ranks({.store = patient(server.endpoint()), .log = Log::silent()});
  std::set<std::string> texts = {held(client, 0)};
  for (int round = 0; round < 3; ++round) {
    ranks.hold(0, "a debugger");
    ranks.hold(0, "");
    ASSERT_TRUE(ranks.told(60s));
    EXPECT_FALSE(says_held(held(client, 0)));
    texts.insert(held(client, 0));
  }
  EXPECT_EQ(texts.size(), 4u);
}

TEST(HeldRanks, AStoreThatDoesNotAnswerKeepsNobody) {
  const Socket deaf = listen_on({"127.0.0.1", 0});
  EXPECT_TRUE(ends([&] {
    HeldRanks ranks({.store = patient(endpoint_of(deaf)), .log = Log::silent()});
    ranks.hold(0, "a debugger");
    EXPECT_FALSE(ranks.told(100ms));
  }));
}

TEST(NodeLink, AStoreThatDoesNotAnswerKeepsNobody) {
  const Socket deaf = listen_on({"127.0.0.1", 0});
  EXPECT_TRUE(ends([&] {
    NodeLink link({.node = 1, .nodes = 2, .store = patient(endpoint_of(deaf))});
    link.tell_user_signal();
    link.tell_stop(SIGTERM);
    link.tell({.rank = 3});
    link.ended();
    EXPECT_FALSE(link.told(100ms));
    EXPECT_FALSE(link.news().has_value());
  }));
}

TEST(NodeLink, AStoreThatCannotBeReachedIsNews) {
  const testing::Port port;
  const Endpoint nobody{"127.0.0.1", std::stoi(port.number())};
  NodeLink link({.node = 1, .nodes = 2, .store = {.server = nobody, .token = "t", .connect_timeout = 50ms}});
  ASSERT_TRUE(test::eventually([&] { return link.news().has_value(); }));
  ASSERT_TRUE(link.news()->failure.has_value());
  EXPECT_NE(link.news()->failure->note->message.find("the launcher of node 0 is gone"), std::string::npos);
}

struct Links {
  Links() {
    for (int node = 0; node < 2; ++node)
      links.push_back(
          std::make_unique<NodeLink>(NodeLink::Options{.node = node, .nodes = 2, .store = patient(server.endpoint())}));
  }
  StoreServer server{{.token = "t", .log = Log::silent()}};
  std::vector<std::unique_ptr<NodeLink>> links;
};

// Three hellos and proofs, two wills and that it is here; then one waits for news and one, with a connection of its own, for
// signals.
constexpr std::int64_t kRequestsOfALink = 2 + 2 * (2 + 1) + 1 + 1 + 2 + 1;

// The figures of docs/scale.md.
TEST(NodeLink, CostsWhatThePageSays) {
  constexpr int kNodes = 2;
  const auto messages = [](const StoreTraffic& all) { return all.requests + all.answers; };
  const auto bytes = [](const StoreTraffic& all) { return all.request_bytes + all.answer_bytes; };
  {
    const Links links;
    ASSERT_TRUE(test::eventually([&] { return messages(links.server.traffic()) >= 24 * kNodes; }));
    // A will says who would be gone and when it was made, by a clock that counts from the start of the machine.
    const auto said = static_cast<std::int64_t>(host_name().size() + std::to_string(now_ns()).size());
    EXPECT_EQ(bytes(links.server.traffic()), kNodes * (1126 + said));
  }
  // Each round asks for news and for signals, and hears twice that there is none yet.
  const StoreServer server({.token = "t", .log = Log::silent()});
  StoreClientOptions often = patient(server.endpoint());
  often.answer_timeout = 3s;
  const NodeLink link({.node = 0, .nodes = 1, .store = often});
  ASSERT_TRUE(test::eventually([&] { return messages(server.traffic()) >= 24; }));
  const StoreTraffic before = server.traffic();
  StoreTraffic later;
  ASSERT_TRUE(test::eventually([&] {
    later = server.traffic();
    const bool all_wait = later.requests - later.answers == before.requests - before.answers;
    return all_wait && messages(later) >= messages(before) + 4 * 2;
  }));
  const double round =
      4.0 * static_cast<double>(bytes(later) - bytes(before)) / static_cast<double>(messages(later) - messages(before));
  EXPECT_NEAR(round, 111, 5);  // one of the two may be a round ahead
}

TEST(NodeLink, WaitsAndAsksNothingMeanwhile) {
  Links two;
  ASSERT_TRUE(test::eventually([&] { return two.server.traffic().requests >= 2 * kRequestsOfALink; }));
  std::this_thread::sleep_for(2500ms);
  EXPECT_EQ(two.server.traffic().requests, 2 * kRequestsOfALink);
}

TEST(NodeLink, EverySignalOfAUserIsHeardOnceByTheOthers) {
  Links two;
  for (int round = 0; round < 3; ++round) {
    two.links[1]->tell_user_signal();
    EXPECT_TRUE(test::eventually([&] { return two.links[0]->take_user_signal(); })) << round;
    EXPECT_FALSE(two.links[0]->take_user_signal());
    EXPECT_FALSE(two.links[1]->take_user_signal());
  }
}

TEST(NodeLink, ALauncherThatIsStoppedIsKnownToBeUntilItGoesOn) {
  Links two;
  for (int round = 0; round < 2; ++round) {
    two.links[0]->pause(60s);
    EXPECT_EQ(two.links[1]->paused_by(), 0) << "known when it returns";
    EXPECT_FALSE(two.links[0]->paused_by().has_value());
    two.links[1]->pause(60s);
    EXPECT_EQ(two.links[0]->paused_by(), 1);
    two.links[0]->resume();
    two.links[1]->resume();
    for (const auto& link : two.links)
      EXPECT_TRUE(test::eventually([&] { return !link->paused_by().has_value(); })) << round;
  }
  two.links[1]->tell_user_signal();
  EXPECT_TRUE(test::eventually([&] { return two.links[0]->take_user_signal(); }));
}

TEST(NodeLink, AllAreReadyOnceEverybodySaysSo) {
  Links two;
  two.links[0]->ready(60s);
  EXPECT_FALSE(two.links[0]->all_ready().has_value());
  two.links[1]->ready(60s);
  for (const auto& link : two.links) {
    ASSERT_TRUE(test::eventually([&] { return link->all_ready().has_value(); }));
    EXPECT_TRUE(*link->all_ready());
  }
}

TEST(NodeLink, NobodyWaitsForANodeThatWillNotComeAgain) {
  Links two;
  two.links[0]->ready(60min);
  two.links[1]->not_again();
  ASSERT_TRUE(test::eventually([&] { return two.links[0]->all_ready().has_value(); }));
  EXPECT_FALSE(*two.links[0]->all_ready());
}

TEST(NodeLink, TheFirstNewsIsEverybodys) {
  Links two;
  two.links[0]->tell({.rank = 1, .code = 4});
  ASSERT_TRUE(two.links[0]->told(60s));
  two.links[1]->tell({.rank = 2, .code = 5});
  two.links[1]->tell_stop(SIGTERM);
  for (const auto& link : two.links) {
    ASSERT_TRUE(test::eventually([&] { return link->news().has_value(); }));
    ASSERT_TRUE(link->news()->failure.has_value());
    EXPECT_EQ(link->news()->failure->rank, 1);
  }
}

}  // namespace
}  // namespace bonfire::launchers_test
