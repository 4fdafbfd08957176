#include "bonfire/comm/node_link.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <sstream>

#include "bonfire/base/clock.h"

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

// A launcher that is stopped goes on when somebody says so, and is asked again after so long. One that is killed closes its
// connections.
constexpr auto kAsLongAsItTakes = std::chrono::hours(24 * 10);

// What is told in order to all launchers: "SIGUSR1 NODE", "stopped NODE" or "runs NODE"; behind it stands which one it is
// of that node, so that no two are the same.
struct Event {
  std::string what;
  int node = -1;
};

Event decode_event(const std::string& text) {
  Event event;
  std::istringstream words(text);
  words >> event.what >> event.node;
  return event;
}

// How long the launcher that has the store stays for nodes that are still on their way to it: they could not hear otherwise
// how the attempt ended, and would wait for a store that is gone.
constexpr auto kLatecomers = 5s;
// How long taking leave may take.
constexpr auto kLeave = 2s;

// How long to wait for something new before it is asked whether the store is still there.
std::chrono::milliseconds round_of(const StoreClientOptions& store) { return store.answer_timeout / 3; }

}  // namespace

NodeLink::NodeLink(Options options)
    : options_(std::move(options)),
      readable_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      errands_({.store = options_.store, .failed = [this](const Error& error) {
                  // What could not be told while node 0's launcher is stopped is told when it goes on.
                  if (paused_by() && !news()) return true;
                  learn_that_the_store_is_gone(error);
                  return false;
                }}) {
  errands_.run([this](StoreClient& client) { join(client); });
}

NodeLink::~NodeLink() {
  errands_.run([this](StoreClient& client) {
    if (gone_) gone_->leave();
    if (presence_) presence_->leave();
    if (options_.node == 0) wait_for_latecomers(client);
  });
  errands_.done(options_.node == 0 ? kLeave + kLatecomers : kLeave);
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  errands_.end();
  for (std::thread* thread : {&listener_, &events_, &all_})
    if (thread->joinable()) thread->join();
}

void NodeLink::join(StoreClient& client) {
  const RankFailure last =
      lost_node(options_.node, fmt::format("the launcher of node {} ({}) is gone", options_.node, host_name()));
  presence_.emplace(client, key("news"), encode(last));
  gone_.emplace(client, key_of("gone", options_.node), "yes");
  client.set(key_of("here", options_.node), "yes");
  listener_ = std::thread([this, &client] { listen(client); });
  events_ = std::thread([this, &client] { listen_for_events(client); });
}

std::string NodeLink::key(const std::string& what) const { return fmt::format("launchers/{}/{}", options_.attempt, what); }

std::string NodeLink::key_of(const std::string& what, int node) const { return key(fmt::format("{}/{}", what, node)); }

std::vector<std::string> NodeLink::keys_of_all(const std::string& what) const {
  std::vector<std::string> keys;
  for (int node = 0; node < options_.nodes; ++node) keys.push_back(key_of(what, node));
  return keys;
}

void NodeLink::wait_for_latecomers(StoreClient& client) {
  try {
    client.wait(keys_of_all("here"), kLatecomers);
  } catch (const StoreTimeout&) {
    // Whoever comes now finds nobody.
  }
}

void NodeLink::announce() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(readable_.fd(), &one, sizeof one);
}

void NodeLink::learn(News news) {
  {
    const std::lock_guard lock(mutex_);
    if (!news_) news_ = std::move(news);
    changed_.notify_all();
  }
  announce();
}

void NodeLink::learn_that_the_store_is_gone(const Error& error) {
  learn({.failure = lost_node(0, fmt::format("the launcher of node 0 is gone ({})", error.what()))});
}

// A call failed that had begun when so many pauses had: is that because a launcher was stopped meanwhile, this one or that
// of the store? Then this waits until all run again, and the call is to be made once more.
bool NodeLink::excused(int pauses_before) {
  std::unique_lock lock(mutex_);
  if (paused_.empty() && pauses_ == pauses_before) return false;
  changed_.wait(lock, [this] { return paused_.empty() || news_ || ending_; });
  return !ending_;
}

void NodeLink::listen(StoreClient& client) {
  while (true) {
    const int pauses = pauses_;
    try {
      return learn(decode_news(client.get({key("news")}, round_of(options_.store)).front()));
    } catch (const StoreTimeout&) {
      // Nothing new, but the store lives.
    } catch (const Error& error) {
      if (!excused(pauses)) return learn_that_the_store_is_gone(error);
      if (news()) return;
    }
  }
}

void NodeLink::listen_for_events(StoreClient& client) {
  for (std::int64_t number = 1;;) {
    const int pauses = pauses_;
    const bool store_stopped = paused(0);
    try {
      const auto most = store_stopped ? kAsLongAsItTakes : round_of(options_.store);
      take(client, number, client.get({key(fmt::format("event/{}", number))}, most).front());
      ++number;
    } catch (const StoreTimeout&) {
      forget_the_lost(client);
    } catch (const Error& error) {
      // It was to answer when its launcher goes on, however long that takes: it never will.
      if (store_stopped) learn_that_the_store_is_gone(error);
      if (!store_stopped && pauses_ != pauses && !news()) continue;
      // listen() says what happened.
      const std::lock_guard lock(mutex_);
      paused_.clear();
      return changed_.notify_all();
    }
  }
}

bool NodeLink::paused(int node) const {
  const std::lock_guard lock(mutex_);
  return paused_.contains(node);
}

// Launchers that were stopped and then killed do not go on.
void NodeLink::forget_the_lost(StoreClient& client) {
  while (const std::optional<int> node = paused_by()) {
    try {
      client.get({key_of("gone", *node)}, 0ms);
    } catch (const StoreTimeout&) {
      return;  // it may
    }
    const std::lock_guard lock(mutex_);
    paused_.erase(*node);
    changed_.notify_all();
  }
}

void NodeLink::take(StoreClient& client, std::int64_t number, const std::string& text) {
  const Event event = decode_event(text);
  if (event.node == options_.node) return;
  if (event.what == "SIGUSR1") {
    user_signal_ = true;
  } else {
    const std::lock_guard lock(mutex_);
    if (event.what == "stopped") {
      ++pauses_;
      paused_.insert(event.node);
    } else {
      paused_.erase(event.node);
    }
    changed_.notify_all();
  }
  announce();
  // It waits for this, and then for nobody.
  if (event.what == "stopped" && client.add(key(fmt::format("know/{}", number)), 1) == options_.nodes - 1)
    client.set(key(fmt::format("all know/{}", number)), "yes");
}

// Behind those that are there. It may have been posted before, by a call whose answer was lost.
void NodeLink::post(StoreClient& client, const std::string& event) {
  while (client.compare_set(key(fmt::format("event/{}", last_event_ + 1)), "", event) != event) ++last_event_;
}

std::optional<NodeLink::News> NodeLink::news() const {
  const std::lock_guard lock(mutex_);
  return news_;
}

std::optional<int> NodeLink::paused_by() const {
  const std::lock_guard lock(mutex_);
  return paused_.empty() ? std::nullopt : std::optional(*paused_.begin());
}

bool NodeLink::take_user_signal() {
  std::uint64_t ignored;
  [[maybe_unused]] const ssize_t got = read(readable_.fd(), &ignored, sizeof ignored);
  return user_signal_.exchange(false);
}

void NodeLink::tell(const RankFailure& failure) {
  errands_.run(
      [this, failure](StoreClient& client) { learn(decode_news(client.compare_set(key("news"), "", encode(failure)))); });
}

void NodeLink::tell_stop(int signal) {
  errands_.run([this, signal](StoreClient& client) {
    client.compare_set(key("news"), "", fmt::format("stop {} {}", signal, options_.node));
  });
}

void NodeLink::tell_event(const std::string& what) {
  const std::string event = fmt::format("{} {} {}", what, options_.node, ++events_told_);
  errands_.run([this, event](StoreClient& client) { post(client, event); });
}

void NodeLink::tell_user_signal() { tell_event("SIGUSR1"); }

void NodeLink::pause(std::chrono::milliseconds most) {
  ++pauses_;
  tell_event("stopped");
  errands_.run([this, most](StoreClient& client) {
    try {
      client.wait({key(fmt::format("all know/{}", last_event_ + 1))}, most);
    } catch (const Error&) {
      // Somebody does not hear it.
    }
  });
  told(most);
}

void NodeLink::resume() { tell_event("runs"); }

void NodeLink::ended() {
  errands_.run([this](StoreClient& client) {
    if (client.add(key("ended"), 1) == options_.nodes) client.compare_set(key("news"), "", "over");
  });
}

void NodeLink::ready(std::chrono::milliseconds timeout) {
  errands_.run([this, timeout](StoreClient& client) {
    all_ = std::thread([this, &client, timeout] { listen_for_all(client, timeout); });
  });
}

void NodeLink::listen_for_all(StoreClient& client, std::chrono::milliseconds timeout) {
  bool all = false;
  while (true) {
    const int pauses = pauses_;
    try {
      client.set(key_of("ready", options_.node), "yes");
      if (options_.node == 0) {
        client.wait(keys_of_all("ready"), timeout);
        client.compare_set(key("again"), "", "yes");  // unless one of them has said no
      }
      all = client.get({key("again")}, timeout).front() == "yes";
      break;
    } catch (const Error&) {
      // Somebody is missing, or was stopped and is not any more.
      if (!excused(pauses)) break;
    }
  }
  {
    const std::lock_guard lock(mutex_);
    all_ready_ = all;
  }
  announce();
}

std::optional<bool> NodeLink::all_ready() const {
  const std::lock_guard lock(mutex_);
  return all_ready_;
}

void NodeLink::not_again() {
  errands_.run([this](StoreClient& client) {
    client.compare_set(key("again"), "", "no");
    client.set(key_of("ready", options_.node), "no");
  });
}

}  // namespace bonfire
