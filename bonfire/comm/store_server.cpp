#include "bonfire/comm/store_server.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <list>
#include <map>
#include <optional>
#include <thread>
#include <vector>

#include "bonfire/base/error.h"
#include "bonfire/comm/store_wire.h"

namespace bonfire {
namespace {

using Clock = std::chrono::steady_clock;
using wire::Op;
using wire::Status;

constexpr auto kHelloTime = std::chrono::seconds(10);
constexpr int kMostRefusalsLogged = 16;

// What a parked request waits for.
struct Parked {
  std::vector<std::string> keys;
  bool wants_values = false;
  Deadline deadline;
};

struct Client {
  Socket socket;
  std::string peer;
  bool admitted = false;
  bool doomed = false;  // close when everything was sent
  Deadline hello_until;
  std::string in;
  std::string out;
  std::optional<Parked> parked;
  std::map<std::string, std::string> wills;  // set when this client goes without a word
};

}  // namespace

class StoreServer::Loop {
 public:
  explicit Loop(StoreServerOptions options) : options_(std::move(options)) {
    require(!options_.token.empty(), "a store needs a token");
    listener_ = listen_on(options_.listen);
    endpoint_ = endpoint_of(listener_);
    wake_ = Socket(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    thread_ = std::thread([this] { run(); });
  }

  ~Loop() {
    stopping_ = true;
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_.fd(), &one, sizeof one);
    thread_.join();
  }

  const Endpoint& endpoint() const { return endpoint_; }
  int refused() const { return refused_; }

 private:
  void run() {
    std::optional<Deadline> drained_by;
    while (true) {
      if (stopping_) {
        if (!drained_by) drained_by = Clock::now() + options_.drain;
        const bool anyone = std::any_of(clients_.begin(), clients_.end(), [](const Client& c) { return c.admitted; });
        if (!anyone || Clock::now() >= *drained_by) return;
      }
      Deadline next = drained_by.value_or(Clock::now() + std::chrono::hours(1));
      std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
      // Out of file descriptors: let the others be served before asking again.
      if (Clock::now() < listen_again_) {
        entries[1].fd = -1;
        next = std::min(next, listen_again_);
      }
      for (const Client& client : clients_) {
        const int listening = client.doomed ? 0 : POLLIN;
        const int speaking = client.out.empty() ? 0 : POLLOUT;
        entries.push_back({client.socket.fd(), static_cast<short>(listening | speaking), 0});
        if (!client.admitted) next = std::min(next, client.hello_until);
        if (client.parked) next = std::min(next, client.parked->deadline);
      }
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
      if (poll(entries.data(), entries.size(), static_cast<int>(std::clamp<long long>(left, 0, 1 << 30))) < 0 &&
          errno != EINTR)
        return;
      drain_wake(entries[0]);
      auto client = clients_.begin();
      for (std::size_t i = 2; i < entries.size(); ++i) {
        const bool keep = serve(*client, entries[i].revents);
        if (!keep) last_words(*client);
        client = keep ? std::next(client) : clients_.erase(client);
      }
      if (entries[1].revents != 0) accept_all();
    }
  }

  void drain_wake(const pollfd& entry) {
    if (entry.revents == 0) return;
    std::uint64_t count;
    [[maybe_unused]] const ssize_t got = read(wake_.fd(), &count, sizeof count);
  }

  void accept_all() {
    while (true) {
      sockaddr_storage address{};
      socklen_t length = sizeof address;
      Socket socket(accept4(listener_.fd(), reinterpret_cast<sockaddr*>(&address), &length, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket) {
        if (errno == EMFILE || errno == ENFILE) listen_again_ = deadline_in(std::chrono::milliseconds(100));
        return;
      }
      const int on = 1;
      setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      // A machine that vanished without a word is noticed within some 15 seconds.
      const int idle = 5, interval = 2, probes = 5;
      setsockopt(socket.fd(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
      setsockopt(socket.fd(), IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
      setsockopt(socket.fd(), IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
      setsockopt(socket.fd(), IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
      Client client;
      client.peer = peer_of(socket);
      client.socket = std::move(socket);
      client.hello_until = deadline_in(kHelloTime);
      clients_.push_back(std::move(client));
    }
  }

  static std::string peer_of(const Socket& socket) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    if (getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return "?";
    char host[64] = "?", port[16] = "?";
    getnameinfo(reinterpret_cast<sockaddr*>(&address), length, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    return fmt::format("{}:{}", host, port);
  }

  // False: this client is over.
  bool serve(Client& client, short events) {
    if ((events & (POLLIN | POLLHUP | POLLERR)) != 0 && !client.doomed && !receive(client)) return false;
    const Deadline now = Clock::now();
    if (!client.admitted && !client.doomed && now >= client.hello_until) refuse(client, "said nothing in time");
    if (client.parked && now >= client.parked->deadline) {
      client.parked.reset();
      reply(client, wire::Writer(static_cast<std::uint8_t>(Status::timeout)));
      if (!take_frames(client)) return false;
    }
    return flush(client) && !(client.doomed && client.out.empty());
  }

  bool receive(Client& client) {
    char bytes[16384];
    while (true) {
      const ssize_t got = recv(client.socket.fd(), bytes, sizeof bytes, 0);
      if (got == 0) return false;
      if (got < 0) {
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK;
      }
      client.in.append(bytes, static_cast<std::size_t>(got));
      if (!take_frames(client)) return false;
      if (client.doomed) return true;
    }
  }

  // Performs whatever has arrived in full. A client that waits for an answer is not listened to meanwhile.
  bool take_frames(Client& client) {
    while (!client.parked && !client.doomed && client.in.size() >= 4) {
      std::uint32_t length;
      std::memcpy(&length, client.in.data(), 4);
      if (length > (client.admitted ? wire::kLongestFrame : wire::kLongestHello)) {
        refuse(client, fmt::format("announced a frame of {} bytes", length));
        return true;
      }
      if (client.in.size() < 4 + static_cast<std::size_t>(length)) return true;
      const std::string frame = client.in.substr(4, length);
      client.in.erase(0, 4 + static_cast<std::size_t>(length));
      if (client.admitted)
        perform(client, frame);
      else
        admit(client, frame);
    }
    return true;
  }

  void admit(Client& client, const std::string& frame) {
    try {
      wire::Reader reader(frame);
      const std::string greeting = reader.text();
      const std::string token = reader.text();
      reader.finish();
      if (greeting != wire::kGreeting) return refuse(client, "does not speak this store's language");
      if (!same_secret(token, options_.token)) return refuse(client, "does not know the job's token");
    } catch (const Error&) {
      return refuse(client, "sent no greeting");
    }
    client.admitted = true;
    reply(client, wire::Writer(static_cast<std::uint8_t>(Status::ok)));
  }

  void refuse(Client& client, const std::string& why) {
    const int before = refused_++;
    if (before < kMostRefusalsLogged)
      options_.log.warning("store at {}: refused {}, which {}", to_string(endpoint_), client.peer, why);
    client.doomed = true;
    client.in.clear();
    reply(client, wire::Writer(static_cast<std::uint8_t>(Status::refused)).text(why));
  }

  void perform(Client& client, const std::string& frame) {
    try {
      wire::Reader reader(frame);
      answer(client, reader);
    } catch (const Error& error) {
      reply(client, wire::Writer(static_cast<std::uint8_t>(Status::invalid)).text(error.what()));
    }
  }

  static wire::Writer ok() { return wire::Writer(static_cast<std::uint8_t>(Status::ok)); }

  void answer(Client& client, wire::Reader& request) {
    switch (static_cast<Op>(request.byte())) {
      case Op::set: {
        const std::string key = request.text();
        std::string value = request.text();
        request.finish();
        put(key, std::move(value));
        return reply(client, ok());
      }
      case Op::append: {
        const std::string key = request.text();
        const std::string value = request.text();
        request.finish();
        put(key, values_[key] + value);
        return reply(client, ok());
      }
      case Op::multi_set: {
        const std::vector<std::string> keys = request.texts();
        std::vector<std::string> values = request.texts();
        request.finish();
        require(keys.size() == values.size(), "{} keys and {} values", keys.size(), values.size());
        for (std::size_t i = 0; i < keys.size(); ++i) put(keys[i], std::move(values[i]));
        return reply(client, ok());
      }
      case Op::add: {
        const std::string key = request.text();
        const std::int64_t increment = request.number();
        request.finish();
        const std::int64_t sum = number_at(key) + increment;
        put(key, std::to_string(sum));
        return reply(client, ok().number(sum));
      }
      case Op::compare_set: {
        const std::string key = request.text();
        const std::string expected = request.text();
        const std::string desired = request.text();
        request.finish();
        return reply(client, ok().text(compare_set(key, expected, desired)));
      }
      case Op::remove: {
        const std::string key = request.text();
        request.finish();
        return reply(client, ok().number(static_cast<std::int64_t>(values_.erase(key))));
      }
      case Op::check: {
        const std::vector<std::string> keys = request.texts();
        request.finish();
        return reply(client, ok().number(all_there(keys) ? 1 : 0));
      }
      case Op::get:
      case Op::wait: break;
      case Op::count: {
        request.finish();
        return reply(client, ok().number(static_cast<std::int64_t>(values_.size())));
      }
      case Op::list: {
        request.finish();
        std::vector<std::string> keys;
        for (const auto& [key, value] : values_) keys.push_back(key);
        return reply(client, ok().texts(keys));
      }
      case Op::will: {
        const std::string key = request.text();
        const std::string value = request.text();
        request.finish();
        if (value.empty())
          client.wills.erase(key);
        else
          client.wills[key] = value;
        return reply(client, ok());
      }
      default: fail("no such operation");
    }
    Parked parked;
    parked.wants_values = request.number() != 0;
    const std::int64_t milliseconds = std::clamp<std::int64_t>(request.number(), 0, std::int64_t{1} << 40);
    parked.keys = request.texts();
    request.finish();
    parked.deadline = deadline_in(std::chrono::milliseconds(milliseconds));
    if (all_there(parked.keys))
      grant(client, parked);
    else
      client.parked = std::move(parked);
  }

  void grant(Client& client, const Parked& parked) {
    wire::Writer answer = ok();
    if (parked.wants_values) {
      std::vector<std::string> values;
      for (const std::string& key : parked.keys) values.push_back(values_.at(key));
      answer.texts(values);
    }
    reply(client, std::move(answer));
  }

  bool all_there(const std::vector<std::string>& keys) const {
    return std::all_of(keys.begin(), keys.end(), [&](const std::string& key) { return values_.contains(key); });
  }

  std::int64_t number_at(const std::string& key) const {
    const auto found = values_.find(key);
    if (found == values_.end()) return 0;
    std::int64_t number = 0;
    const std::string& text = found->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    require(error == std::errc() && end == text.data() + text.size(), "key '{}' does not hold a number", key);
    return number;
  }

  // An empty expectation also means "not there yet".
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
    const auto found = values_.find(key);
    if (found == values_.end() ? !expected.empty() : found->second != expected)
      return found == values_.end() ? expected : found->second;
    put(key, desired);
    return desired;
  }

  void put(const std::string& key, std::string value) {
    values_[key] = std::move(value);
    for (Client& client : clients_) {
      if (!client.parked || !all_there(client.parked->keys)) continue;
      const Parked parked = std::move(*client.parked);
      client.parked.reset();
      grant(client, parked);
    }
  }

  // The client is gone: what it asked to be said in that case.
  void last_words(Client& client) {
    client.parked.reset();
    for (const auto& [key, value] : client.wills) compare_set(key, "", value);
  }

  void reply(Client& client, wire::Writer answer) {
    client.out += answer.finish();
    flush(client);
  }

  // False: the connection is lost.
  bool flush(Client& client) {
    while (!client.out.empty()) {
      const ssize_t sent = send(client.socket.fd(), client.out.data(), client.out.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
      client.out.erase(0, static_cast<std::size_t>(sent));
    }
    return true;
  }

  StoreServerOptions options_;
  Socket listener_;
  Socket wake_;
  Endpoint endpoint_;
  Deadline listen_again_{};
  std::list<Client> clients_;
  std::map<std::string, std::string> values_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> refused_{0};
  std::thread thread_;
};

StoreServer::StoreServer(StoreServerOptions options) : loop_(std::make_unique<Loop>(std::move(options))) {}
StoreServer::~StoreServer() = default;
const Endpoint& StoreServer::endpoint() const { return loop_->endpoint(); }
int StoreServer::refused() const { return loop_->refused(); }

bool same_secret(const std::string& a, const std::string& b) {
  // Every byte of both is looked at, whatever the first ones were.
  volatile unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const unsigned char x = i < a.size() ? static_cast<unsigned char>(a[i]) : 0;
    const unsigned char y = i < b.size() ? static_cast<unsigned char>(b[i]) : 0;
    difference = static_cast<unsigned char>(difference | (x ^ y));
  }
  return difference == 0;
}

std::string random_token() {
  unsigned char bytes[16];
  require(getrandom(bytes, sizeof bytes, 0) == sizeof bytes, "the kernel gives no random bytes: {}", std::strerror(errno));
  std::string token;
  for (const unsigned char byte : bytes) token += fmt::format("{:02x}", byte);
  return token;
}

}  // namespace bonfire
