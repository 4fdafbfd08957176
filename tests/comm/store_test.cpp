#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <iostream>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/comm/store_wire.h"
#include "bonfire/comm/token_store.h"
#include "tests/comm/child.h"
#include "tests/support/port.h"
#include "tests/support/thrown.h"

namespace bonfire::store_test {
namespace {

using namespace std::chrono_literals;
using bonfire::testing::thrown;
using Bytes = std::vector<uint8_t>;

constexpr const char* kToken = "correct horse";

// A server whose complaints can be read.
struct Host {
  explicit Host(StoreServerOptions options = {}) : server(with_log(std::move(options))) {}

  std::shared_ptr<std::mutex> mutex = std::make_shared<std::mutex>();
  std::shared_ptr<std::vector<std::string>> words = std::make_shared<std::vector<std::string>>();
  StoreServer server;

  StoreServerOptions with_log(StoreServerOptions options) const {
    options.token = kToken;
    options.log = Log([m = mutex, w = words](LogLevel, std::string_view text) {
      const std::lock_guard lock(*m);
      w->emplace_back(text);
    });
    return options;
  }

  std::shared_ptr<StoreClient> client(const std::string& token = kToken) const {
    return std::make_shared<StoreClient>(
        StoreClientOptions{.server = server.endpoint(), .token = token, .connect_timeout = 5s});
  }
  c10::intrusive_ptr<TokenStore> store() const { return c10::make_intrusive<TokenStore>(client()); }
  std::string said() const {
    const std::lock_guard lock(*mutex);
    std::string all;
    for (const std::string& word : *words) all += word + "\n";
    return all;
  }
};

TEST(Store, BindsToLoopbackOnly) {
  const Host host;
  EXPECT_EQ(host.server.endpoint().host, "127.0.0.1");
  EXPECT_GT(host.server.endpoint().port, 0);
}

TEST(Store, DoesWhatHashStoreDoes) {
  const Host host;
  const auto ours = c10::make_intrusive<c10d::PrefixStore>("some/prefix", host.store());
  const auto theirs = c10::make_intrusive<c10d::PrefixStore>("some/prefix", c10::make_intrusive<c10d::HashStore>());
  const Random random(7);
  const auto key = [&](std::uint64_t i) { return "k" + std::to_string(random.below(i, 6)); };
  const auto value = [&](std::uint64_t i) {
    return Bytes(random.below(i, 4), static_cast<uint8_t>(random.below(i + 1, 3)));
  };
  for (std::uint64_t i = 0; i < 4000; i += 8) {
    switch (random.below(i, 8)) {
      case 0:
        ours->set(key(i + 1), value(i + 2));
        theirs->set(key(i + 1), value(i + 2));
        break;
      case 1: ASSERT_EQ(ours->check({key(i + 1)}), theirs->check({key(i + 1)})); break;
      case 2:
        if (theirs->check({key(i + 1)})) {
          ASSERT_EQ(ours->get(key(i + 1)), theirs->get(key(i + 1)));
        }
        break;
      case 3: ASSERT_EQ(ours->add("n" + key(i + 1), 3), theirs->add("n" + key(i + 1), 3)); break;
      case 4: ASSERT_EQ(ours->deleteKey(key(i + 1)), theirs->deleteKey(key(i + 1))); break;
      case 5:
        ASSERT_EQ(ours->compareSet(key(i + 1), value(i + 2), value(i + 4)),
                  theirs->compareSet(key(i + 1), value(i + 2), value(i + 4)));
        break;
      case 6:
        ours->append(key(i + 1), value(i + 2));
        theirs->append(key(i + 1), value(i + 2));
        break;
      case 7:
        ours->multiSet({key(i + 1), "m"}, {value(i + 2), value(i + 4)});
        theirs->multiSet({key(i + 1), "m"}, {value(i + 2), value(i + 4)});
        ASSERT_EQ(ours->multiGet({"m", key(i + 1)}), theirs->multiGet({"m", key(i + 1)}));
        break;
    }
    ASSERT_EQ(ours->getNumKeys(), theirs->getNumKeys());
  }
}

TEST(Store, AWaitEndsWhenTheLastKeyIsThere) {
  const Host host;
  const auto store = host.store();
  std::atomic<bool> over{false};
  const std::int64_t before = host.server.traffic().requests;
  std::thread waiter([&] {
    store->wait({"a", "b"}, 20s);
    over = true;
  });
  while (host.server.traffic().requests == before) std::this_thread::yield();  // until the server knows that it waits
  // The same client goes on while one of its threads waits.
  store->set("a", std::string("1"));
  EXPECT_FALSE(store->check({"b"}));
  EXPECT_FALSE(over);
  store->set("b", std::string("2"));
  waiter.join();
  EXPECT_TRUE(over);
}

// All keys at once is what was asked for: one that came and went before the last does not count.
TEST(Store, AKeyThatWasRemovedIsWaitedForAgain) {
  const Host host;
  const auto client = host.client();
  std::atomic<bool> over{false};
  std::vector<std::string> got;
  const std::int64_t before = host.server.traffic().requests;
  std::thread waiter([&] {
    got = host.client()->get({"a", "b", "a"}, 60s);
    over = true;
  });
  while (host.server.traffic().requests < before + 3) std::this_thread::yield();  // hello, proof and the wait
  client->set("a", "early");
  EXPECT_TRUE(client->remove("a"));
  client->set("b", "2");
  EXPECT_EQ(client->count(), 1);
  EXPECT_FALSE(over);
  client->set("a", "1");
  waiter.join();
  EXPECT_EQ(got, (std::vector<std::string>{"1", "2", "1"}));
}

TEST(Store, AWaitThatEndsInVainNamesTheKey) {
  const Host host;
  const auto store = host.store();
  EXPECT_NE(thrown<std::exception>([&] { store->wait({"nobody sets me"}, 50ms); }).find("nobody sets me"),
            std::string::npos);
  EXPECT_THROW(store->wait({"x"}, 1ms), c10::DistStoreError);
  store->set("x", std::string("still works"));
  EXPECT_EQ(store->get_to_str("x"), "still works");
}

TEST(Store, AddFromManyThreadsLosesNothing) {
  const Host host;
  const auto store = host.store();
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) store->add("sum", 1);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store->add("sum", 0), 800);
}

TEST(Store, LargeValuesTravelWhole) {
  const Host host;
  const auto store = host.store();
  Bytes large(10 << 20);
  for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<uint8_t>(i * 2654435761u >> 24);
  store->set("large", large);
  EXPECT_EQ(store->get("large"), large);
}

TEST(Store, RefusesStrangers) {
  const Host host;
  for (const char* token : {"", "wrong", "correct horsf", "correct horse and more", "correct hors"}) {
    const std::string error = thrown<std::exception>([&] { host.client(token); });
    EXPECT_NE(error.find("BONFIRE_TOKEN"), std::string::npos) << token << ": " << error;
  }
  EXPECT_EQ(host.server.refused(), 5);
  EXPECT_NE(host.said().find("refused 127.0.0.1:"), std::string::npos) << host.said();
  host.client()->set("friends", "welcome");
}

// Sends bytes and reads until the server hangs up; true where nothing but a refusal came back.
bool turned_away(const Host& host, const std::string& bytes) {
  const Socket socket = connect_to(host.server.endpoint(), deadline_in(5s));
  try {
    send_all(socket, bytes, deadline_in(5s));
  } catch (const Error&) {
    return true;  // it hung up while we were still speaking
  }
  shutdown(socket.fd(), SHUT_WR);
  std::string answer;
  try {
    while (true) {
      char byte;
      receive_all(socket, std::span(&byte, 1), deadline_in(5s));
      answer += byte;
    }
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find("no answer"), std::string::npos) << "the server neither answered nor hung up";
  }
  return answer.empty() || static_cast<wire::Status>(answer.at(4)) == wire::Status::refused;
}

TEST(Store, SurvivesGarbageFromStrangers) {
  const Host host;
  host.client()->set("here", "before");
  EXPECT_TRUE(turned_away(host, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  EXPECT_TRUE(turned_away(host, std::string("\xff\xff\xff\xff", 4)));
  EXPECT_TRUE(turned_away(host, std::string("\x00\x00\x00\x00", 4)));
  const std::uint64_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  const Random random(seed);
  for (std::uint64_t round = 0; round < 200; ++round) {
    std::string noise(random.below(round, 300), '\0');
    for (std::size_t i = 0; i < noise.size(); ++i) noise[i] = static_cast<char>(random.below(1000 + round * 512 + i, 256));
    // Half of them with a plausible length, so that the content is looked at.
    if (noise.size() >= 4 && round % 2 == 0) {
      const auto length = static_cast<std::uint32_t>(noise.size() - 4);
      std::memcpy(noise.data(), &length, 4);
    }
    EXPECT_TRUE(turned_away(host, noise)) << round;
  }
  EXPECT_EQ(host.client()->get({"here"}, 1s).front(), "before");
}

// Ranks that come all at once are dropped for each other where the store hears few at a time: they come again.
TEST(Store, HonestClientsThatAreDroppedForOthersComeAgain) {
  const Host host({.most_strangers = 2, .crowded_patience = 0ms});
  std::atomic<int> heard{0};
  std::mutex mutex;
  std::string errors;
  std::vector<std::thread> clients;
  for (int i = 0; i < 64; ++i)
    clients.emplace_back([&] {
      try {
        StoreClient client({.server = host.server.endpoint(), .token = kToken, .connect_timeout = 60s});
        client.add("heard", 1);
        ++heard;
      } catch (const Error& error) {
        const std::lock_guard lock(mutex);
        errors = error.what();
      }
    });
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(heard, 64) << errors;
  // Those who were dropped have not been counted as the store's traffic.
  EXPECT_EQ(host.server.traffic().requests, 64 * 3);
}

TEST(Store, AConnectionThatIsLostBeforeItWasHeardIsTriedAgain) {
  const testing::Port port;  // between the two listeners
  Socket first = listen_on({"127.0.0.1", std::stoi(port.number())});
  const Endpoint place = endpoint_of(first);
  std::unique_ptr<StoreServer> server;
  std::thread somebody([&] {
    pollfd entry{first.fd(), POLLIN, 0};
    EXPECT_EQ(poll(&entry, 1, 20000), 1);
    Socket(accept(first.fd(), nullptr, nullptr)).close();
    first.close();
    server = std::make_unique<StoreServer>(StoreServerOptions{.listen = place, .token = kToken, .log = Log::silent()});
  });
  StoreClient client({.server = place, .token = kToken, .connect_timeout = 60s});
  somebody.join();
  client.set("a", "b");
}

// Nobody is told to look at a token that was never compared.
TEST(Store, WhoIsNeverHeardSaysSo) {
  const Socket listener = listen_on({"127.0.0.1", 0});
  std::atomic<bool> over{false};
  std::thread somebody([&] {
    while (!over) {
      pollfd entry{listener.fd(), POLLIN, 0};
      if (poll(&entry, 1, 20) == 1) Socket(accept(listener.fd(), nullptr, nullptr)).close();
    }
  });
  const std::string error = thrown<Error>(
      [&] { const StoreClient client({.server = endpoint_of(listener), .token = kToken, .connect_timeout = 300ms}); });
  over = true;
  somebody.join();
  EXPECT_NE(error.find("did not hear this process within"), std::string::npos) << error;
  EXPECT_EQ(error.find("BONFIRE_TOKEN"), std::string::npos) << error;
}

// One frame there and one back.
std::string ask(const Socket& socket, const std::string& frame) {
  send_all(socket, frame, deadline_in(20s));
  std::uint32_t length = 0;
  receive_all(socket, std::span(reinterpret_cast<char*>(&length), sizeof length), deadline_in(20s));
  std::string content(length, '\0');
  receive_all(socket, content, deadline_in(20s));
  return content;
}

wire::Status status_of(const std::string& answer) { return static_cast<wire::Status>(answer.at(0)); }
std::string text_of(const std::string& answer) { return wire::Reader(std::string_view(answer).substr(1)).text(); }

// A connection that has proved what it must, byte for byte as the wire says.
Socket friend_of(const Host& host) {
  Socket socket = connect_to(host.server.endpoint(), deadline_in(5s));
  const std::string theirs = text_of(ask(socket, wire::Writer().text(wire::kGreeting).text("mine").finish()));
  const std::string proof = wire::proof(wire::kClient, kToken, "mine", theirs);
  const std::string answer = text_of(ask(socket, wire::Writer().text(proof).finish()));
  EXPECT_EQ(answer, wire::proof(wire::kServer, kToken, "mine", theirs));
  return socket;
}

wire::Writer request_of(wire::Op op) { return wire::Writer(static_cast<std::uint8_t>(op)); }

// Well-formed, one of every kind. Waits are short.
std::vector<std::string> requests() {
  using wire::Op;
  return {request_of(Op::set).text("a").text("1").finish(),
          request_of(Op::get).number(1).number(2).texts({"a", "never"}).finish(),
          request_of(Op::add).text("a").number(3).finish(),
          request_of(Op::compare_set).text("a").text("").text("2").finish(),
          request_of(Op::remove).text("a").finish(),
          request_of(Op::check).texts({"a", "b"}).finish(),
          request_of(Op::wait).number(0).number(2).texts({"never"}).finish(),
          request_of(Op::count).finish(),
          request_of(Op::append).text("a").text("x").finish(),
          request_of(Op::multi_set).texts({"a", "b"}).texts({"1", "2"}).finish(),
          request_of(Op::list).finish(),
          request_of(Op::will).text("w").text("gone").finish()};
}

TEST(Store, EveryRequestIsAnsweredOnce) {
  const Host host;
  const Socket socket = friend_of(host);
  for (const std::string& request : requests()) {
    const wire::Status status = status_of(ask(socket, request));
    EXPECT_TRUE(status == wire::Status::ok || status == wire::Status::timeout) << int(request.at(4));
  }
  const StoreTraffic traffic = host.server.traffic();
  EXPECT_EQ(traffic.requests, static_cast<std::int64_t>(2 + requests().size()));
  EXPECT_EQ(traffic.answers, traffic.requests);
}

// Every kind of request, broken in every way that is drawn apart from it: cut off, longer than it says inside, any byte
// another. Each gets an answer, and the next request on the same connection as well.
TEST(Store, SurvivesGarbageFromFriends) {
  const Host host;
  const std::uint64_t seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937_64 random(seed);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  const std::vector<std::string> well_formed = requests();
  std::set<std::pair<char, wire::Status>> seen;
  for (int round = 0; round < 600; ++round) {
    std::string request = well_formed[below(well_formed.size())].substr(4);
    const bool known = below(10) != 0;
    if (!known) request[0] = static_cast<char>(below(256));
    switch (below(4)) {
      case 0: request.resize(1 + below(request.size())); break;
      case 1: request.append(below(40), static_cast<char>(below(8))); break;
      case 2: request[below(request.size())] = static_cast<char>(below(256)); break;
      case 3: break;
    }
    const auto op = static_cast<wire::Op>(request[0]);
    const bool may_wait = op == wire::Op::get || op == wire::Op::wait;
    const auto length = static_cast<std::uint32_t>(request.size());
    const Socket socket = friend_of(host);
    const std::string frame = std::string(reinterpret_cast<const char*>(&length), 4) + request;
    if (may_wait) {
      // It may have been told to wait for years. Others are answered all the same, and later than this one if that is at
      // all.
      const std::int64_t before = host.server.traffic().requests;
      send_all(socket, frame, deadline_in(5s));
      ASSERT_TRUE(test::eventually([&] { return host.server.traffic().requests > before; })) << round;
      ASSERT_EQ(status_of(ask(friend_of(host), request_of(wire::Op::count).finish())), wire::Status::ok) << round;
      pollfd answer{socket.fd(), POLLIN, 0};
      if (poll(&answer, 1, 0) == 1) seen.insert({request[0], status_of(ask(socket, ""))});
      continue;
    }
    seen.insert({request[0], status_of(ask(socket, frame))});
    ASSERT_EQ(status_of(ask(socket, request_of(wire::Op::count).finish())), wire::Status::ok) << round;
  }
  // Both sides of what a request can meet were seen for most kinds: the noise is neither always nor never understood.
  EXPECT_GE(std::count_if(seen.begin(), seen.end(), [](const auto& one) { return one.second == wire::Status::ok; }), 6);
  EXPECT_GE(std::count_if(seen.begin(), seen.end(), [](const auto& one) { return one.second == wire::Status::invalid; }), 6);
  for (const wire::Op op : {wire::Op::get, wire::Op::wait})
    EXPECT_TRUE(seen.contains({static_cast<char>(op), wire::Status::invalid})) << static_cast<int>(op);
  const auto client = host.client();
  client->set("alive", "yes");
  EXPECT_EQ(client->get({"alive"}, 1s).front(), "yes");
}

TEST(Store, BytesMayComeOneByOne) {
  const Host host;
  const Socket socket = connect_to(host.server.endpoint(), deadline_in(5s));
  const std::string hello = wire::Writer().text(wire::kGreeting).text("mine").finish();
  for (const char c : hello.substr(0, hello.size() - 1)) send_all(socket, std::string_view(&c, 1), deadline_in(5s));
  EXPECT_EQ(status_of(ask(socket, hello.substr(hello.size() - 1))), wire::Status::ok);
}

// Requests that a client sent while it waited are answered when its wait has ended.
TEST(Store, RequestsBehindAWaitAreNotForgotten) {
  const Host host;
  const Socket socket = friend_of(host);
  const std::string wait = request_of(wire::Op::wait).number(0).number(60'000).texts({"key"}).finish();
  const std::string set = request_of(wire::Op::set).text("behind").text("1").finish();
  send_all(socket, wait + set, deadline_in(5s));
  const auto client = host.client();
  client->set("key", "now");
  client->wait({"behind"}, 20s);
  EXPECT_EQ(status_of(ask(socket, "")), wire::Status::ok);  // of the wait
  EXPECT_EQ(status_of(ask(socket, "")), wire::Status::ok);  // of the set
}

TEST(Store, LastWordsAreSaidOnlyByThoseWhoVanish) {
  const Host host;
  const auto client = host.client();
  {
    StoreClient::Presence leaves(*client, "left", "vanished");
    leaves.leave();
  }
  { const StoreClient::Presence vanishes(*client, "gone", "vanished"); }
  EXPECT_EQ(client->get({"gone"}, 30s).front(), "vanished");
  EXPECT_FALSE(client->check({"left"}));
}

TEST(Store, APortInUseIsNamed) {
  const Host host;
  const int port = host.server.endpoint().port;
  const std::string error = thrown<std::exception>([&] {
    StoreServer second({.listen = {"127.0.0.1", port}, .token = "t"});
  });
  EXPECT_NE(error.find("port " + std::to_string(port)), std::string::npos) << error;
  EXPECT_NE(error.find("in use"), std::string::npos) << error;
  EXPECT_EQ(error.find('\n'), std::string::npos);
}

char state_of(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::size_t name = text.rfind(')');
  return name == std::string::npos || name + 2 >= text.size() ? '?' : text[name + 2];
}

TEST(Store, TheHostWaitsForItsGuests) {
  auto server = std::make_shared<StoreServer>(StoreServerOptions{.token = "t", .drain = 60s, .log = Log::silent()});
  auto guest = std::make_shared<StoreClient>(StoreClientOptions{.server = server->endpoint(), .token = "t"});
  std::atomic<bool> closed{false};
  std::atomic<pid_t> thread{0};
  std::thread owner([&] {
    thread = gettid();
    server.reset();
    closed = true;
  });
  // From here on its owner does nothing but end the server: where it sleeps, it waits for that.
  while (thread == 0 || (state_of(thread) != 'S' && !closed)) std::this_thread::yield();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(guest->add("late", 1), i + 1);
  EXPECT_FALSE(closed);
  guest.reset();
  owner.join();
}

TEST(Endpoint, Parse) {
  EXPECT_EQ(parse_endpoint("host:29500").host, "host");
  EXPECT_EQ(parse_endpoint("host:29500").port, 29500);
  EXPECT_EQ(parse_endpoint("[::1]:80").host, "::1");
  for (const char* bad : {"", "host", "host:", ":80", "host:0", "host:65536", "host:8x"})
    EXPECT_THROW(parse_endpoint(bad), ConfigError) << bad;
}

TEST(Interface, HasAnAddressOrIsNamed) {
  EXPECT_EQ(address_of_interface("lo"), "127.0.0.1");
  EXPECT_NE(thrown<std::exception>([] { address_of_interface("nope0"); }).find("nope0"), std::string::npos);
  EXPECT_EQ(address_towards("127.0.0.1"), "127.0.0.1");
  for (const char* meant : {"127.0.0.2", "::1", "localhost"}) EXPECT_EQ(address_for_others(meant), meant);
}

}  // namespace
}  // namespace bonfire::store_test
