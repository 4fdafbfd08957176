// Who is at the other end of Gloo's connections.
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/socket.h"
#include "bonfire/comm/token_store.h"
#include "bonfire/comm/world.h"
#include "tests/comm/launched.h"

namespace bonfire::pairs_test {
namespace {

using namespace std::chrono_literals;

using test::kBonfire;
using test::kProgram;
using Bytes = std::vector<std::uint8_t>;

// A store in which two ranks meet, and a stranger who reads where they listen before the other one can, connects there, and
// says the number by which the other one would be known.
class Overheard : public c10d::HashStore {
 public:
  using c10d::HashStore::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    if (const auto address = listening(value)) intrude(*address, key.ends_with("/0") ? 1 : 0);
    c10d::HashStore::set(key, value);
  }

  // Bytes that were sent to the stranger.
  std::size_t heard() {
    const std::lock_guard lock(mutex_);
    std::size_t bytes = 0;
    char buffer[4096];
    for (const Socket& socket : strangers_)
      for (ssize_t got; (got = recv(socket.fd(), buffer, sizeof buffer, MSG_DONTWAIT)) > 0;)
        bytes += static_cast<std::size_t>(got);
    return bytes;
  }
  std::size_t strangers() const { return strangers_.size(); }

 private:
  struct Address {
    int port;
    std::vector<std::int64_t> numbers;  // one for each rank that may connect
  };

  // What Gloo publishes: the lengths of a host's name and of an address, each before its bytes, and numbers.
  static std::optional<Address> listening(const std::vector<std::uint8_t>& value) {
    std::size_t at = 0;
    const auto length = [&]() -> std::size_t {
      std::size_t size = 0;
      if (at + sizeof size > value.size()) return std::string::npos;
      std::memcpy(&size, value.data() + at, sizeof size);
      at += sizeof size;
      return size;
    };
    const std::size_t host = length();
    if (host == 0 || host > 255 || at + host > value.size()) return std::nullopt;
    at += host;
    const std::size_t size = length();
    sockaddr_in name{};
    if (size < sizeof(sockaddr_storage) || at + size > value.size()) return std::nullopt;
    std::memcpy(&name, value.data() + at, sizeof name);
    at += size;
    Address address{ntohs(name.sin_port), std::vector<std::int64_t>((value.size() - at) / sizeof(std::int64_t))};
    std::memcpy(address.numbers.data(), value.data() + at, address.numbers.size() * sizeof(std::int64_t));
    if (name.sin_family != AF_INET || address.numbers.size() != 2) return std::nullopt;
    return address;
  }

  void intrude(const Address& address, std::size_t as) {
    Socket socket = connect_to({"127.0.0.1", address.port}, deadline_in(20s));
    const std::int64_t number = address.numbers[as];
    send_all(socket, {reinterpret_cast<const char*>(&number), sizeof number}, deadline_in(20s));
    const std::lock_guard lock(mutex_);
    strangers_.push_back(std::move(socket));
  }

  std::mutex mutex_;
  std::vector<Socket> strangers_;
};

TEST(Pairs, AStrangerInARanksPlaceIsNoticedBeforeDataFlows) {
  const auto store = c10::make_intrusive<Overheard>();
  std::vector<std::string> errors(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      try {
        const World world = World::from_store(store, rank, 2, {.timeout = 3s});
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store->strangers(), 2u);
  // One of the two was to be connected to, and has the stranger instead.
  const bool zero = errors[0].find("in the place of rank 1 has not proved") != std::string::npos;
  const bool one = errors[1].find("in the place of rank 0 has not proved") != std::string::npos;
  EXPECT_TRUE(zero || one) << errors[0] << "\n" << errors[1];
  for (const std::string& error : errors) EXPECT_NE(error, "");
  EXPECT_LT(store->heard(), 512u);  // announcements and a proof that is of no use to it
}

// Somebody who can read and write all that the ranks of a job can, and knows another token, or the same.
class Guest : public TokenStore {
 public:
  Guest(c10::intrusive_ptr<c10d::Store> overheard, std::shared_ptr<StoreClient> own)
      : TokenStore(own), overheard_(std::move(overheard)), own_(std::move(own)) {}
  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<Guest>(overheard_, own_); }
  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const Bytes& value) override { overheard_->set(key, value); }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return overheard_->compareSet(key, expected, desired);
  }
  Bytes get(const std::string& key) override { return overheard_->get(key); }
  int64_t add(const std::string& key, int64_t value) override { return overheard_->add(key, value); }
  bool deleteKey(const std::string& key) override { return overheard_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return overheard_->check(keys); }
  void wait(const std::vector<std::string>& keys) override { overheard_->wait(keys); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    overheard_->wait(keys, timeout);
  }
  void append(const std::string& key, const Bytes& value) override { overheard_->append(key, value); }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override { return overheard_->multiGet(keys); }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override {
    overheard_->multiSet(keys, values);
  }

 private:
  const c10::intrusive_ptr<c10d::Store> overheard_;
  const std::shared_ptr<StoreClient> own_;
};

// The proof is one over the job's token, not only over what is in its store.
TEST(Pairs, WhoReadsTheStoreAndDoesNotKnowTheTokenIsNoRank) {
  for (const std::string token : {"the job's", "another job's"}) {
    const StoreServer server({.token = "the job's", .log = Log::silent()}), other({.token = token, .log = Log::silent()});
    const auto store = [](const StoreServer& at, const std::string& known) {
      return std::make_shared<StoreClient>(StoreClientOptions{.server = at.endpoint(), .token = known});
    };
    std::vector<std::string> errors(2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank)
      threads.emplace_back([&, rank] {
        try {
          c10::intrusive_ptr<c10d::Store> own = c10::make_intrusive<TokenStore>(store(server, "the job's"));
          if (rank == 1) own = c10::make_intrusive<Guest>(std::move(own), store(other, token));
          const World world = World::from_store(own, rank, 2, {.timeout = 20s});
        } catch (const std::exception& error) {
          errors[static_cast<std::size_t>(rank)] = error.what();
        }
      });
    for (std::thread& thread : threads) thread.join();
    if (token == "the job's") {
      EXPECT_EQ(errors, std::vector<std::string>(2));
    } else {
      EXPECT_NE(errors[0].find("in the place of rank 1 has not proved"), std::string::npos) << errors[0];
      EXPECT_NE(errors[1].find("in the place of rank 0 has not proved"), std::string::npos) << errors[1];
    }
  }
}

// Where an address was given, the interface's name in the environment does not move the listener elsewhere.
TEST(Pairs, ListenWhereTheyWereTold) {
  test::Child run({kBonfire, "launch", "-n", "2", "--address", "127.0.0.3", "--", kProgram},
                  {{"STEPS", "1"}, {"GLOO_SOCKET_IFNAME", "lo"}});
  EXPECT_EQ(run.wait(60s), 0) << run.output();
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_NE(run.output().find(fmt::format("rank {} listens at 127.0.0.3.\n", rank)), std::string::npos) << run.output();
  test::Child list({kBonfire, "launch", "-n", "2", "--", kProgram}, {{"STEPS", "1"}, {"GLOO_SOCKET_IFNAME", "lo,none0"}});
  EXPECT_EQ(list.wait(60s), 0) << list.output();
  EXPECT_NE(list.output().find("rank 0 listens at 127.0.0.1.\n"), std::string::npos) << list.output();
}

}  // namespace
}  // namespace bonfire::pairs_test
