#include "bonfire/comm/store_server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "bonfire/base/system_error.h"
#include "bonfire/comm/keep_alive.h"
#include "bonfire/comm/store_table.h"
#include "bonfire/comm/store_wire.h"

namespace bonfire {
namespace {

using Clock = std::chrono::steady_clock;
using wire::Op;
using wire::Status;

constexpr int kMostRefusalsLogged = 16;
constexpr std::size_t kMostReadAtOnce = 1 << 20;  // of one client, so that the others get their turn

using ClientId = std::uint64_t;  // in the order in which they came
constexpr ClientId kWake = 0, kListener = 1, kFirstClient = 2;

struct Client {
  ClientId id = 0;
  Socket socket;
  std::string peer;
  Deadline came;
  std::string client_nonce, server_nonce;  // empty: no hello yet
  bool admitted = false;
  bool doomed = false;               // close when everything was sent
  bool waits = false;                // for keys: its further requests are not looked at
  bool wants_values = false;         // of the keys it waits for
  std::uint32_t interest = EPOLLIN;  // what epoll tells of
  std::optional<Deadline> deadline;
  std::string in;
  std::string out;
  std::size_t sent = 0;                      // of `out`
  std::map<std::string, std::string> wills;  // set when this client goes without a word
  StoreTraffic traffic;                      // before it was admitted
};

wire::Writer answer_of(Status status) { return wire::Writer(static_cast<std::uint8_t>(status)); }
wire::Writer ok() { return answer_of(Status::ok); }

}  // namespace

class StoreServer::Loop {
 public:
  explicit Loop(StoreServerOptions options) : options_(std::move(options)) {
    require(!options_.token.empty(), "a store needs a token");
    require(options_.most_strangers >= 1, "a store that hears {} strangers hears nobody", options_.most_strangers);
    listener_ = listen_on(options_.listen);
    endpoint_ = endpoint_of(listener_);
    wake_ = Socket(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    epoll_ = Socket(epoll_create1(EPOLL_CLOEXEC));
    require_system(wake_ && epoll_, "cannot make a store at {}", to_string(endpoint_));
    require_system(control(EPOLL_CTL_ADD, wake_, kWake, EPOLLIN) && control(EPOLL_CTL_ADD, listener_, kListener, EPOLLIN),
                   "cannot watch the store's port at {}", to_string(endpoint_));
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
  StoreTraffic traffic() const {
    const std::lock_guard lock(traffic_mutex_);
    return traffic_;
  }

 private:
  void run() {
    std::optional<Deadline> drained_by;
    std::array<epoll_event, 256> events;
    while (true) {
      if (stopping_) {
        if (!drained_by) drained_by = Clock::now() + options_.drain;
        if (guests_ == 0 || Clock::now() >= *drained_by) return;
      }
      const int ready = epoll_wait(epoll_.fd(), events.data(), static_cast<int>(events.size()), patience(drained_by));
      if (ready < 0 && errno != EINTR) return;
      bool newcomers = false;
      for (int i = 0; i < ready; ++i) {
        // Copies: the system's struct is packed, and has no place to which a reference may be bound.
        const auto [what, whose] = events[static_cast<std::size_t>(i)];
        const std::uint64_t id = whose.u64;
        if (id == kWake) drain_wake();
        if (id == kListener) newcomers = true;
        if (const auto client = clients_.find(id); client != clients_.end())
          keep_or_end(client->second, serve(client->second, what));
      }
      end_what_is_late();
      if (listen_again_ && (Clock::now() >= *listen_again_ || !crowded())) listen(true);
      if (newcomers && !listen_again_) accept_all();
    }
  }

  int patience(const std::optional<Deadline>& drained_by) const {
    Deadline next = drained_by.value_or(Clock::now() + std::chrono::hours(1));
    if (listen_again_) next = std::min(next, *listen_again_);
    if (!deadlines_.empty()) next = std::min(next, deadlines_.begin()->first);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
    return static_cast<int>(std::clamp<long long>(left, 0, 1 << 30));
  }

  bool control(int what, const Socket& socket, ClientId id, std::uint32_t events) const {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    return epoll_ctl(epoll_.fd(), what, socket.fd(), &event) == 0;
  }

  void drain_wake() {
    std::uint64_t count;
    [[maybe_unused]] const ssize_t got = read(wake_.fd(), &count, sizeof count);
  }

  // Newcomers wait in the kernel's queue while nobody listens.
  void listen(bool on) {
    control(EPOLL_CTL_MOD, listener_, kListener, on ? static_cast<std::uint32_t>(EPOLLIN) : 0u);
    if (on) listen_again_.reset();
  }
  void listen_not_before(Deadline time) {
    listen(false);
    listen_again_ = time;
  }

  bool crowded() const { return static_cast<int>(strangers_.size()) >= options_.most_strangers; }

  void accept_all() {
    while (true) {
      if (crowded()) {
        Client& oldest = clients_.at(*strangers_.begin());
        const Deadline patience = oldest.came + options_.crowded_patience;
        if (Clock::now() < patience) return listen_not_before(patience);
        if (!oldest.doomed) refuse(oldest, "said nothing in time", Status::unheard);
        end(oldest);
      }
      Socket socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      const ClientId id = next_id_++;
      if (!socket || !control(EPOLL_CTL_ADD, socket, id, EPOLLIN)) {
        // Out of file descriptors or memory: let the others be served before asking again.
        if (errno != EAGAIN && errno != EWOULDBLOCK) listen_not_before(deadline_in(std::chrono::milliseconds(100)));
        return;
      }
      const int on = 1;
      setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      keep_alive(socket, options_.silence);
      Client& client = clients_[id];
      client.id = id;
      client.peer = to_string(peer_of(socket));
      client.socket = std::move(socket);
      client.came = Clock::now();
      strangers_.insert(id);
      set_deadline(client, client.came + options_.stranger_patience);
    }
  }

  void set_deadline(Client& client, std::optional<Deadline> deadline) {
    if (client.deadline) deadlines_.erase({*client.deadline, client.id});
    client.deadline = deadline;
    if (deadline) deadlines_.insert({*deadline, client.id});
  }

  void end_what_is_late() {
    while (!deadlines_.empty() && deadlines_.begin()->first <= Clock::now()) {
      Client& client = clients_.at(deadlines_.begin()->second);
      set_deadline(client, std::nullopt);
      if (client.doomed) {
        end(client);  // it does not even read why
        continue;
      }
      if (client.waits) {
        stop_waiting(client);
        reply(client, answer_of(Status::timeout));
        take_frames(client);
      } else {
        refuse(client, "said nothing in time", Status::unheard);
      }
      keep_or_end(client, flush(client));
    }
  }

  void keep_or_end(Client& client, bool connected) {
    if (!connected || (client.doomed && client.out.empty())) end(client);
  }

  // The client is gone: what it asked to be said in that case.
  void end(Client& client) {
    stop_waiting(client);
    set_deadline(client, std::nullopt);
    strangers_.erase(client.id);
    if (client.admitted) --guests_;
    const auto wills = std::move(client.wills);
    clients_.erase(client.id);
    for (const auto& [key, value] : wills) table_.compare_set(key, "", value);
    grant_what_came();
  }

  // False: this client is over.
  bool serve(Client& client, std::uint32_t events) {
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && !client.doomed && !receive(client)) return false;
    if (client.doomed && (events & (EPOLLHUP | EPOLLERR)) != 0) return false;
    return flush(client);
  }

  bool receive(Client& client) {
    char bytes[65536];
    for (std::size_t taken = 0; taken < kMostReadAtOnce && !client.doomed;) {
      const ssize_t got = recv(client.socket.fd(), bytes, client.admitted ? sizeof bytes : wire::kLongestHello, 0);
      if (got == 0) return false;
      if (got < 0) {
        if (errno == EINTR) continue;
        return errno == EAGAIN || errno == EWOULDBLOCK;
      }
      taken += static_cast<std::size_t>(got);
      client.in.append(bytes, static_cast<std::size_t>(got));
      take_frames(client);
      if (client.in.size() > 4 + static_cast<std::size_t>(wire::kLongestFrame)) refuse(client, "does not wait for answers");
    }
    return true;
  }

  // Performs whatever has arrived in full. A client that waits for an answer is not listened to meanwhile.
  void take_frames(Client& client) {
    while (!client.waits && !client.doomed && client.in.size() >= 4) {
      std::uint32_t length;
      std::memcpy(&length, client.in.data(), 4);
      if (length > (client.admitted ? wire::kLongestFrame : wire::kLongestHello))
        return refuse(client, fmt::format("announced a frame of {} bytes", length));
      const std::size_t whole = 4 + static_cast<std::size_t>(length);
      if (client.in.size() < whole) return;
      const std::string frame = client.in.substr(4, length);
      client.in.erase(0, whole);
      count(client, {.requests = 1, .request_bytes = static_cast<std::int64_t>(whole)});
      if (client.admitted)
        perform(client, frame);
      else
        admit(client, frame);
    }
  }

  void admit(Client& client, const std::string& frame) {
    try {
      wire::Reader reader(frame);
      if (client.server_nonce.empty()) {
        const std::string greeting = reader.text();
        client.client_nonce = reader.text();
        reader.finish();
        if (greeting != wire::kGreeting) return refuse(client, "does not speak this store's language");
        client.server_nonce = random_token();
        return reply(client, ok().text(client.server_nonce));
      }
      const std::string proof = reader.text();
      reader.finish();
      if (!same_secret(proof, own_proof(wire::kClient, client))) return refuse(client, "does not know the job's token");
    } catch (const Error&) {
      return refuse(client, "sent no greeting");
    }
    client.admitted = true;
    count(client, client.traffic);
    ++guests_;
    strangers_.erase(client.id);
    set_deadline(client, std::nullopt);
    reply(client, ok().text(own_proof(wire::kServer, client)));
  }

  std::string own_proof(std::string_view who, const Client& client) const {
    return wire::proof(who, options_.token, client.client_nonce, client.server_nonce);
  }

  // What strangers say counts once they are none.
  void count(Client& client, const StoreTraffic& more) {
    if (!client.admitted) {
      client.traffic += more;
      return;
    }
    const std::lock_guard lock(traffic_mutex_);
    traffic_ += more;
  }

  void refuse(Client& client, const std::string& why, Status status = Status::refused) {
    const int before = refused_++;
    if (before < kMostRefusalsLogged)
      options_.log.warning("store at {}: refused {}, which {}", to_string(endpoint_), client.peer, why);
    stop_waiting(client);
    client.doomed = true;
    client.in.clear();
    set_deadline(client, deadline_in(options_.crowded_patience));
    reply(client, answer_of(status).text(why));
  }

  void perform(Client& client, const std::string& frame) {
    try {
      wire::Reader reader(frame);
      answer(client, reader);
    } catch (const Error& error) {
      reply(client, answer_of(Status::invalid).text(error.what()));
    }
    grant_what_came();
  }

  void answer(Client& client, wire::Reader& request) {
    switch (static_cast<Op>(request.byte())) {
      case Op::set: {
        const std::string key = request.text();
        std::string value = request.text();
        request.finish();
        table_.set(key, std::move(value));
        return reply(client, ok());
      }
      case Op::append: {
        const std::string key = request.text();
        const std::string value = request.text();
        request.finish();
        table_.append(key, value);
        return reply(client, ok());
      }
      case Op::multi_set: {
        const std::vector<std::string> keys = request.texts();
        std::vector<std::string> values = request.texts();
        request.finish();
        require(keys.size() == values.size(), "{} keys and {} values", keys.size(), values.size());
        for (std::size_t i = 0; i < keys.size(); ++i) table_.set(keys[i], std::move(values[i]));
        return reply(client, ok());
      }
      case Op::add: {
        const std::string key = request.text();
        const std::int64_t increment = request.number();
        request.finish();
        return reply(client, ok().number(table_.add(key, increment)));
      }
      case Op::compare_set: {
        const std::string key = request.text();
        const std::string expected = request.text();
        const std::string desired = request.text();
        request.finish();
        return reply(client, ok().text(table_.compare_set(key, expected, desired)));
      }
      case Op::remove: {
        const std::string key = request.text();
        request.finish();
        return reply(client, ok().number(table_.remove(key) ? 1 : 0));
      }
      case Op::check: {
        const std::vector<std::string> keys = request.texts();
        request.finish();
        return reply(client, ok().number(table_.has_all(keys) ? 1 : 0));
      }
      case Op::get:
      case Op::wait: break;
      case Op::count: {
        request.finish();
        return reply(client, ok().number(table_.count()));
      }
      case Op::list: {
        request.finish();
        return reply(client, ok().texts(table_.keys()));
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
    const bool wants_values = request.number() != 0;
    const std::int64_t milliseconds = std::clamp<std::int64_t>(request.number(), 0, std::int64_t{1} << 40);
    std::vector<std::string> keys = request.texts();
    request.finish();
    if (table_.has_all(keys)) return grant(client, wants_values, keys);
    client.waits = true;
    client.wants_values = wants_values;
    table_.wait(client.id, std::move(keys));
    set_deadline(client, deadline_in(std::chrono::milliseconds(milliseconds)));
  }

  void grant(Client& client, bool wants_values, const std::vector<std::string>& keys) {
    wire::Writer answer = ok();
    if (wants_values) answer.texts(table_.values(keys));
    reply(client, std::move(answer));
  }

  std::vector<std::string> stop_waiting(Client& client) {
    if (!client.waits) return {};
    client.waits = false;
    set_deadline(client, std::nullopt);
    return table_.stop_waiting(client.id);
  }

  // Answers all whose keys have come; then what they have asked for since then, which may bring other keys.
  void grant_what_came() {
    if (granting_) return;
    granting_ = true;
    for (auto ready = table_.take_ready(); !ready.empty(); ready = table_.take_ready()) {
      for (const ClientId id : ready) {
        Client& client = clients_.at(id);
        const std::vector<std::string> keys = stop_waiting(client);
        try {
          grant(client, client.wants_values, keys);
        } catch (const Error& error) {
          reply(client, answer_of(Status::invalid).text(error.what()));
        }
      }
      for (const ClientId id : ready) take_frames(clients_.at(id));
    }
    granting_ = false;
  }

  void reply(Client& client, wire::Writer answer) {
    const std::string frame = answer.finish();
    count(client, {.answers = 1, .answer_bytes = static_cast<std::int64_t>(frame.size())});
    client.out += frame;
    flush(client);
  }

  // False: the connection is lost.
  bool flush(Client& client) {
    bool connected = true, blocked = false;
    while (client.sent < client.out.size() && connected && !blocked) {
      const ssize_t sent =
          send(client.socket.fd(), client.out.data() + client.sent, client.out.size() - client.sent, MSG_NOSIGNAL);
      if (sent >= 0)
        client.sent += static_cast<std::size_t>(sent);
      else if (errno == EAGAIN || errno == EWOULDBLOCK)
        blocked = true;
      else
        connected = errno == EINTR;
    }
    if (client.sent == client.out.size()) {
      client.out.clear();
      client.sent = 0;
    }
    const std::uint32_t interest = (client.doomed ? 0u : EPOLLIN) | (blocked ? EPOLLOUT : 0u);
    if (std::exchange(client.interest, interest) != interest) control(EPOLL_CTL_MOD, client.socket, client.id, interest);
    return connected;
  }

  StoreServerOptions options_;
  Socket listener_;
  Socket wake_;
  Socket epoll_;
  Endpoint endpoint_;
  std::optional<Deadline> listen_again_;  // set: nobody listens meanwhile
  std::unordered_map<ClientId, Client> clients_;
  ClientId next_id_ = kFirstClient;
  std::set<ClientId> strangers_;  // have not proved that they know the token; the oldest first
  int guests_ = 0;                // have
  std::set<std::pair<Deadline, ClientId>> deadlines_;
  StoreTable table_;
  bool granting_ = false;
  std::atomic<bool> stopping_{false};
  std::atomic<int> refused_{0};
  mutable std::mutex traffic_mutex_;
  StoreTraffic traffic_;
  std::thread thread_;
};

StoreServer::StoreServer(StoreServerOptions options) : loop_(std::make_unique<Loop>(std::move(options))) {}
StoreServer::~StoreServer() = default;
const Endpoint& StoreServer::endpoint() const { return loop_->endpoint(); }
int StoreServer::refused() const { return loop_->refused(); }
StoreTraffic StoreServer::traffic() const { return loop_->traffic(); }

}  // namespace bonfire
