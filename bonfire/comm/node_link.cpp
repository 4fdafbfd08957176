#include "bonfire/comm/node_link.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <sstream>

#include "bonfire/base/clock.h"
#include "bonfire/comm/signal_events.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;

RankFailure lost_node(int node, const std::string& what) {
  RankFailure failure;
  failure.rank = -1;
  failure.node = node;
  failure.note = FailureNote{FailureNote::Kind::stall, what, now_ns()};
  return failure;
}

// "over", "stop SIGNAL NODE", or a failure.
NodeLink::News decode_news(const std::string& text) {
  NodeLink::News news;
  std::istringstream words(text);
  std::string first;
  words >> first;
  if (first == "over")
    news.over = true;
  else if (first != "stop" || !(words >> news.stop_signal >> news.stop_node))
    news.failure = decode_failure(text).value_or(lost_node(-1, "another node failed"));
  return news;
}

}  // namespace

NodeLink::NodeLink(StoreClient& client, Options options)
    : client_(client), options_(options), readable_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const RankFailure last =
      lost_node(options_.node, fmt::format("the launcher of node {} ({}) is gone", options_.node, host_name()));
  presence_.emplace(client_, key("news"), encode(last));
  const SignalsBlocked signals;  // in the new thread
  thread_ = std::thread([this] { listen(); });
}

NodeLink::~NodeLink() {
  stopping_ = true;
  thread_.join();
  try {
    presence_->leave();
  } catch (const Error&) {
    // The other side is gone: nobody is left to be told.
  }
}

std::string NodeLink::key(const char* what) const { return fmt::format("launchers/{}/{}", options_.attempt, what); }

void NodeLink::announce() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(readable_.fd(), &one, sizeof one);
}

void NodeLink::learn(News news) {
  {
    const std::lock_guard lock(mutex_);
    if (!news_) news_ = std::move(news);
  }
  announce();
}

void NodeLink::listen() {
  bool asked = false;  // by SIGUSR1
  while (!stopping_) {
    try {
      return learn(decode_news(client_.get({key("news")}, 1s).front()));
    } catch (const StoreTimeout&) {
    } catch (const Error& error) {
      return learn({.failure = lost_node(0, fmt::format("the launcher of node 0 is gone ({})", error.what()))});
    }
    try {
      if (asked || told_user_signal_ || !client_.check({key("user signal")})) continue;
      asked = true;
      user_signal_ = true;
      announce();
    } catch (const Error&) {
      // The next question will say what happened.
    }
  }
}

std::optional<NodeLink::News> NodeLink::news() const {
  const std::lock_guard lock(mutex_);
  return news_;
}

bool NodeLink::take_user_signal() {
  std::uint64_t ignored;
  [[maybe_unused]] const ssize_t got = read(readable_.fd(), &ignored, sizeof ignored);
  return user_signal_.exchange(false);
}

NodeLink::News NodeLink::tell(const RankFailure& failure) {
  try {
    return decode_news(client_.compare_set(key("news"), "", encode(failure)));
  } catch (const Error&) {
    return {.failure = failure};
  }
}

void NodeLink::tell_stop(int signal) {
  telling_ = std::async(std::launch::async, [this, signal] {
    try {
      client_.compare_set(key("news"), "", fmt::format("stop {} {}", signal, options_.node));
    } catch (const Error&) {
      // listen() will say what happened.
    }
  });
  // A store that does not answer keeps nobody from stopping.
  telling_.wait_for(2s);
}

void NodeLink::tell_user_signal() {
  told_user_signal_ = true;
  try {
    client_.set(key("user signal"), std::to_string(options_.node));
  } catch (const Error&) {
    // listen() will say what happened.
  }
}

void NodeLink::ended() {
  try {
    if (client_.add(key("ended"), 1) == options_.nodes) client_.compare_set(key("news"), "", "over");
  } catch (const Error&) {
    // listen() will say what happened.
  }
}

bool NodeLink::ready_again(std::chrono::milliseconds timeout) {
  try {
    if (client_.add(key("ready"), 1) == options_.nodes) client_.set(key("again"), "yes");
    client_.wait({key("again")}, timeout);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace bonfire
