#include "bonfire/comm/store_client.h"

#include <algorithm>

#include "bonfire/comm/store_wire.h"

namespace bonfire {
namespace {

using wire::Op;
using wire::Status;

// The connection was lost, or dropped for others: another one may be heard.
class Unheard : public Error {
 public:
  using Error::Error;
};

wire::Writer request_of(Op op) { return wire::Writer(static_cast<std::uint8_t>(op)); }

}  // namespace

StoreClient::StoreClient(StoreClientOptions options) : options_(std::move(options)) {
  idle_.push_back(connect(options_.connect_timeout));
}

Socket StoreClient::connect(Milliseconds most) const {
  const Patience patience(deadline_in(most), options_.given_up);
  auto pause = std::chrono::milliseconds(10);
  while (true) {
    try {
      return greet(patience);
    } catch (const Unheard& error) {
      if (deadline_in(pause) >= patience.until)
        fail("{}; it did not hear this process within {:.0f} s", error.what(), std::chrono::duration<double>(most).count());
    }
    rest({deadline_in(pause), options_.given_up});
    pause = std::min(pause * 2, std::chrono::milliseconds(500));
  }
}

Socket StoreClient::greet(const Patience& patience) const {
  Socket connection = connect_to(options_.server, patience);
  const std::string nonce = random_token();
  const auto said = [&](wire::Writer frame) {
    return wire::Reader(exchange(connection, frame.finish(), patience, wire::kLongestHello)).text();
  };
  const std::string theirs = said(wire::Writer().text(wire::kGreeting).text(nonce));
  const std::string proof = said(wire::Writer().text(wire::proof(wire::kClient, options_.token, nonce, theirs)));
  if (!same_secret(proof, wire::proof(wire::kServer, options_.token, nonce, theirs)))
    fail("whoever listens at {} does not know the job's token, so it is not the job's store; nothing was told to it",
         to_string(options_.server));
  return connection;
}

std::string StoreClient::secret() const { return hmac_sha256(options_.token, "bonfire pairs"); }

Patience StoreClient::answer_within(Milliseconds more) const {
  return {deadline_in(more + options_.answer_timeout), options_.given_up};
}

std::string StoreClient::exchange(const Socket& connection, const std::string& request, const Patience& patience,
                                  std::uint32_t longest) const {
  std::string answer;
  try {
    send_all(connection, request, patience);
    std::uint32_t length = 0;
    receive_all(connection, std::span(reinterpret_cast<char*>(&length), sizeof length), patience);
    require(length >= 1 && length <= longest, "a frame of {} bytes", length);
    answer.resize(length);
    receive_all(connection, answer, patience);
  } catch (const Error& error) {
    throw Unheard(fmt::format("store at {}: {}", to_string(options_.server), error.what()));
  }
  const auto status = static_cast<Status>(answer[0]);
  answer.erase(0, 1);
  if (status == Status::ok) return answer;
  if (status == Status::timeout) throw StoreTimeout(fmt::format("store at {}: timeout", to_string(options_.server)));
  const std::string why = wire::Reader(answer).text();
  if (status == Status::unheard)
    throw Unheard(fmt::format("store at {} dropped a connection that {}", to_string(options_.server), why));
  if (status == Status::refused)
    fail("store at {} refused this process, which {}: all of a job must share one BONFIRE_TOKEN and one version of Bonfire",
         to_string(options_.server), why);
  fail("store at {}: {}", to_string(options_.server), why);
}

std::string StoreClient::ask(wire::Writer request, Milliseconds patience) {
  Socket connection;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      connection = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!connection) connection = connect(options_.answer_timeout);
  const auto put_back = [&] {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(connection));
  };
  try {
    std::string answer = exchange(connection, request.finish(), answer_within(patience), wire::kLongestFrame);
    put_back();
    return answer;
  } catch (const StoreTimeout&) {
    put_back();
    throw;
  }
}

void StoreClient::set(const std::string& key, const std::string& value) { ask(request_of(Op::set).text(key).text(value)); }

std::vector<std::string> StoreClient::get(const std::vector<std::string>& keys, Milliseconds timeout) {
  const std::string answer = ask(request_of(Op::get).number(1).number(timeout.count()).texts(keys), timeout);
  return wire::Reader(answer).texts();
}

void StoreClient::wait(const std::vector<std::string>& keys, Milliseconds timeout) {
  ask(request_of(Op::wait).number(0).number(timeout.count()).texts(keys), timeout);
}

std::int64_t StoreClient::add(const std::string& key, std::int64_t increment) {
  const std::string answer = ask(request_of(Op::add).text(key).number(increment));
  return wire::Reader(answer).number();
}

std::string StoreClient::compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
  const std::string answer = ask(request_of(Op::compare_set).text(key).text(expected).text(desired));
  return wire::Reader(answer).text();
}

bool StoreClient::remove(const std::string& key) {
  const std::string answer = ask(request_of(Op::remove).text(key));
  return wire::Reader(answer).number() != 0;
}

bool StoreClient::check(const std::vector<std::string>& keys) {
  const std::string answer = ask(request_of(Op::check).texts(keys));
  return wire::Reader(answer).number() != 0;
}

std::int64_t StoreClient::count() {
  const std::string answer = ask(request_of(Op::count));
  return wire::Reader(answer).number();
}

void StoreClient::append(const std::string& key, const std::string& value) {
  ask(request_of(Op::append).text(key).text(value));
}

void StoreClient::multi_set(const std::vector<std::string>& keys, const std::vector<std::string>& values) {
  ask(request_of(Op::multi_set).texts(keys).texts(values));
}

std::vector<std::string> StoreClient::list() {
  const std::string answer = ask(request_of(Op::list));
  return wire::Reader(answer).texts();
}

StoreClient::Presence::Presence(const StoreClient& client, const std::string& key, const std::string& last_words)
    : client_(client), key_(key), connection_(client.connect(client.options_.answer_timeout)) {
  client_.exchange(connection_, request_of(Op::will).text(key).text(last_words).finish(), client_.answer_within(),
                   wire::kLongestFrame);
}

void StoreClient::Presence::leave() {
  client_.exchange(connection_, request_of(Op::will).text(key_).text("").finish(), client_.answer_within(),
                   wire::kLongestFrame);
}

}  // namespace bonfire
