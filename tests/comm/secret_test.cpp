#include "bonfire/comm/secret.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <mutex>
#include <thread>

#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/launcher.h"
#include "bonfire/comm/store_client.h"
#include "bonfire/comm/store_server.h"
#include "bonfire/comm/store_wire.h"
#include "tests/comm/child.h"
#include "tests/support/thrown.h"

namespace bonfire::secret_test {
namespace {

using namespace std::chrono_literals;
using bonfire::testing::thrown;
using test::Folder;

std::string bytes(int count, int value) { return std::string(static_cast<std::size_t>(count), static_cast<char>(value)); }

// FIPS 180-4's examples, and a length on each side of a block's end.
TEST(Secret, HashesAsPublished) {
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(bytes(1'000'000, 'a'))), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  EXPECT_EQ(hex(sha256(bytes(55, 'a'))), "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(hex(sha256(bytes(56, 'a'))), "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  EXPECT_EQ(hex(sha256(bytes(64, 'a'))), "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
}

// RFC 4231, test cases 1 to 4, 6 and 7.
TEST(Secret, AuthenticatesAsPublished) {
  EXPECT_EQ(hex(hmac_sha256(bytes(20, 0x0b), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hex(hmac_sha256(bytes(20, 0xaa), bytes(50, 0xdd))),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string key;
  for (char byte = 1; byte <= 25; ++byte) key += byte;
  EXPECT_EQ(hex(hmac_sha256(key, bytes(50, 0xcd))), "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hex(hmac_sha256(bytes(131, 0xaa), "Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hex(hmac_sha256(bytes(131, 0xaa),
                            "This is a test using a larger than block-size key and a larger than block-size data. The key "
                            "needs to be hashed before being used by the HMAC algorithm.")),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

// Passes everything on between clients and a server, and writes it down.
class Wiretap {
 public:
  explicit Wiretap(Endpoint server) : server_(std::move(server)), listener_(listen_on({"127.0.0.1", 0})) {}

  Endpoint endpoint() const { return endpoint_of(listener_); }

  // One client, until it has hung up. Both sides speak in turns, one frame each.
  void pass_on() {
    const Socket client = accept_one();
    const Socket server = connect_to(server_, deadline_in(20s));
    try {
      while (true) {
        copy(client, server, from_client);
        copy(server, client, from_server);
      }
    } catch (const Error&) {
    }
  }

  std::vector<std::string> from_client, from_server;

 private:
  Socket accept_one() const {
    while (true) {
      Socket socket(accept(listener_.fd(), nullptr, nullptr));
      if (socket) return socket;
      std::this_thread::yield();
    }
  }
  static void copy(const Socket& from, const Socket& to, std::vector<std::string>& heard) {
    std::uint32_t length = 0;
    receive_all(from, std::span(reinterpret_cast<char*>(&length), sizeof length), deadline_in(20s));
    std::string content(length, '\0');
    receive_all(from, content, deadline_in(20s));
    heard.push_back(std::string(reinterpret_cast<const char*>(&length), sizeof length) + content);
    send_all(to, heard.back(), deadline_in(20s));
  }

  Endpoint server_;
  Socket listener_;
};

std::string answer_to(const Socket& socket, const std::string& frame) {
  send_all(socket, frame, deadline_in(20s));
  std::uint32_t length = 0;
  receive_all(socket, std::span(reinterpret_cast<char*>(&length), sizeof length), deadline_in(20s));
  std::string content(length, '\0');
  receive_all(socket, content, deadline_in(20s));
  return content;
}

TEST(Proof, TheTokenDoesNotTravelAndWhatWasHeardIsOfNoUse) {
  const std::string token = random_token();
  const StoreServer server({.token = token, .log = Log::silent()});
  Wiretap tap(server.endpoint());
  std::thread wire([&] { tap.pass_on(); });
  {
    StoreClient client({.server = tap.endpoint(), .token = token});
    client.set("key", "value");
  }
  wire.join();
  ASSERT_EQ(tap.from_client.size(), 3u);  // hello, proof, request
  for (const auto& heard : {tap.from_client, tap.from_server})
    for (const std::string& frame : heard) EXPECT_EQ(frame.find(token), std::string::npos);

  // The same words a second time: the server asks something else now.
  const Socket stranger = connect_to(server.endpoint(), deadline_in(20s));
  answer_to(stranger, tap.from_client[0]);
  EXPECT_EQ(static_cast<wire::Status>(answer_to(stranger, tap.from_client[1]).at(0)), wire::Status::refused);
  EXPECT_EQ(server.refused(), 1);
  // Nor does the server's own proof make a client.
  const Socket mirror = connect_to(server.endpoint(), deadline_in(20s));
  answer_to(mirror, tap.from_client[0]);
  EXPECT_EQ(static_cast<wire::Status>(answer_to(mirror, tap.from_server[1]).at(0)), wire::Status::refused);
}

// Somebody else sits at the store's address and agrees with everything.
TEST(Proof, AnImpostorIsFoundOutBeforeItHearsARequest) {
  const Socket listener = listen_on({"127.0.0.1", 0});
  std::vector<std::string> heard;
  std::thread impostor([&] {
    Socket socket;
    while (!socket) socket = Socket(accept(listener.fd(), nullptr, nullptr));
    try {
      while (true) {
        std::uint32_t length = 0;
        receive_all(socket, std::span(reinterpret_cast<char*>(&length), sizeof length), deadline_in(20s));
        std::string content(length, '\0');
        receive_all(socket, content, deadline_in(20s));
        heard.push_back(content);
        // Its nonce first; then, as proof, what it has just been told.
        send_all(socket,
                 wire::Writer(static_cast<std::uint8_t>(wire::Status::ok))
                     .text(heard.size() == 1 ? "nonce" : wire::Reader(content).text())
                     .finish(),
                 deadline_in(20s));
      }
    } catch (const Error&) {
    }
  });
  const std::string error =
      thrown<std::exception>([&] { StoreClient({.server = endpoint_of(listener), .token = "t"}).set("a", "secret"); });
  impostor.join();
  EXPECT_NE(error.find("does not know the job's token"), std::string::npos) << error;
  EXPECT_EQ(heard.size(), 2u);
}

TEST(Strangers, AreNotHeardForLong) {
  const StoreServer server({.token = "t", .log = Log::silent(), .stranger_patience = 30ms});
  const Socket silent = connect_to(server.endpoint(), deadline_in(20s));
  const Socket slow = connect_to(server.endpoint(), deadline_in(20s));
  answer_to(slow, wire::Writer().text(wire::kGreeting).text("n").finish());  // and then no proof
  for (const Socket* socket : {&silent, &slow}) {
    char byte;
    const std::string error = thrown<std::exception>([&] {
      while (true) receive_all(*socket, std::span(&byte, 1), deadline_in(20s));
    });
    EXPECT_EQ(error.find("no answer"), std::string::npos) << error;
  }
  EXPECT_EQ(server.refused(), 2);
}

// However many there are, few are held at once, and a friend gets through.
TEST(Strangers, AreNeverManyAtOnce) {
  const StoreServer server(
      {.token = "t", .log = Log::silent(), .most_strangers = 4, .stranger_patience = 60s, .crowded_patience = 5ms});
  StoreClient before({.server = server.endpoint(), .token = "t"});
  std::vector<Socket> strangers;
  for (int i = 0; i < 40; ++i) strangers.push_back(connect_to(server.endpoint(), deadline_in(20s)));
  StoreClient after({.server = server.endpoint(), .token = "t"});
  after.set("here", "1");
  EXPECT_TRUE(before.check({"here"}));
  // Behind 40 strangers, of whom at most 3 can be left beside it when it was let in.
  EXPECT_GE(server.refused(), 37);
}

TEST(JobToken, IsTheSameForAJobAndDoesNotTellTheKey) {
  const Folder home;
  const Variables variables = {{"HOME", home.path()}};
  const std::string token = job_token(variables, "job 1");
  EXPECT_EQ(job_token(variables, "job 1"), token);
  EXPECT_NE(job_token(variables, "job 2"), token);
  EXPECT_EQ(job_token({{"HOME", home.path()}, {"BONFIRE_TOKEN", "given"}}, "job 1"), "given");
  std::string key;
  std::ifstream(home.path() + "/.config/bonfire/key") >> key;
  EXPECT_EQ(key.size(), 32u);
  EXPECT_EQ(token.find(key), std::string::npos);
  EXPECT_EQ(token, hex(hmac_sha256(key, "bonfire job job 1")));
}

TEST(JobToken, AKeyThatOthersMayReadIsRefused) {
  const Folder home;
  const Variables variables = {{"HOME", home.path()}};
  const std::string token = job_token(variables, "job"), file = home.path() + "/.config/bonfire/key";
  struct stat state {};
  ASSERT_EQ(stat(file.c_str(), &state), 0);
  EXPECT_EQ(state.st_mode & 07777, 0600u);
  for (const mode_t mode : {0640, 0604, 0620, 0660, 0777}) {
    ASSERT_EQ(chmod(file.c_str(), mode), 0);
    const std::string error = thrown<std::exception>([&] { job_token(variables, "job"); });
    EXPECT_NE(error.find(file), std::string::npos) << error;
    EXPECT_NE(error.find(fmt::format("{:04o}", mode)), std::string::npos) << error;
    EXPECT_NE(error.find("chmod 600"), std::string::npos) << error;
  }
  ASSERT_EQ(chmod(file.c_str(), 0400), 0);
  EXPECT_EQ(job_token(variables, "job"), token);
}

// Whatever the umask lets others see.
TEST(JobToken, TheFolderOfTheKeyIsTheUsersAlone) {
  const Folder home;
  const mode_t before = umask(0);
  job_token({{"HOME", home.path()}}, "job");
  umask(before);
  struct stat state {};
  ASSERT_EQ(stat((home.path() + "/.config/bonfire").c_str(), &state), 0);
  EXPECT_EQ(state.st_mode & 07777, 0700u);
}

TEST(JobToken, AKeyOfSomebodyElseIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  const Folder home;
  const Variables variables = {{"HOME", home.path()}};
  const std::string token = job_token(variables, "job"), file = home.path() + "/.config/bonfire/key";
  ASSERT_EQ(chown(file.c_str(), 65534, 65534), 0);
  const std::string error = thrown<ConfigError>([&] { job_token(variables, "job"); });
  EXPECT_NE(error.find(file), std::string::npos) << error;
  EXPECT_NE(error.find("belongs to user 65534"), std::string::npos) << error;
  ASSERT_EQ(chown(file.c_str(), 0, 0), 0);
  EXPECT_EQ(job_token(variables, "job"), token);
}

TEST(JobToken, WhatHoldsNoKeyIsNamed) {
  const Folder home;
  const Variables variables = {{"HOME", home.path()}};
  const std::string file = home.path() + "/.config/bonfire/key";
  job_token(variables, "job");
  std::ofstream(file) << "short";
  EXPECT_NE(thrown<std::exception>([&] { job_token(variables, "job"); }).find("holds no key"), std::string::npos);
  ASSERT_EQ(unlink(file.c_str()), 0);
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  EXPECT_NE(thrown<std::exception>([&] { job_token(variables, "job"); }).find("is no file"), std::string::npos);
}

}  // namespace
}  // namespace bonfire::secret_test
