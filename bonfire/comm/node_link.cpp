#include "bonfire/comm/node_link.h"

#include <sys/eventfd.h>
#include <unistd.h>

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

}  // namespace

NodeLink::NodeLink(StoreClient& client, Options options)
    : client_(client), options_(options), news_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const RankFailure last =
      lost_node(options_.node, fmt::format("the launcher of node {} ({}) is gone", options_.node, host_name()));
  presence_.emplace(client_, key("news"), encode(last));
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
  [[maybe_unused]] const ssize_t written = write(news_.fd(), &one, sizeof one);
}

void NodeLink::listen() {
  while (!stopping_) {
    try {
      const std::string text = client_.get({key("news")}, 200ms).front();
      if (text == "over") {
        over_ = true;
      } else {
        const std::lock_guard lock(mutex_);
        failure_ = decode_failure(text).value_or(lost_node(-1, "another node failed"));
      }
      return announce();
    } catch (const StoreTimeout&) {
      continue;
    } catch (const Error& error) {
      const std::lock_guard lock(mutex_);
      failure_ = lost_node(0, fmt::format("the launcher of node 0 is gone ({})", error.what()));
      return announce();
    }
  }
}

std::optional<RankFailure> NodeLink::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

RankFailure NodeLink::tell(const RankFailure& failure) {
  try {
    return decode_failure(client_.compare_set(key("news"), "", encode(failure))).value_or(failure);
  } catch (const Error&) {
    return failure;
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
