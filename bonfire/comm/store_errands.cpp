#include "bonfire/comm/store_errands.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include "bonfire/base/system_error.h"
#include "bonfire/comm/signal_events.h"

namespace bonfire {

StoreErrands::StoreErrands(Options options)
    : options_(std::move(options)), given_up_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  require_system(given_up_.fd() >= 0, "cannot make an event");
  options_.store.given_up = given_up_.fd();
  const SignalsBlocked signals;  // in the new thread
  thread_ = std::thread([this] { work(); });
}

void StoreErrands::run(Errand errand) {
  const std::lock_guard lock(mutex_);
  errands_.push_back(std::move(errand));
  wake_.notify_all();
}

bool StoreErrands::done(std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, most, [this] { return errands_.empty(); });
}

void StoreErrands::end() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    wake_.notify_all();
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(given_up_.fd(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
}

void StoreErrands::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return ending_ || !errands_.empty(); });
    if (ending_) return;
    const Errand errand = errands_.front();
    lock.unlock();
    attempt(errand);
    lock.lock();
    errands_.pop_front();
    if (errands_.empty()) idle_.notify_all();
  }
}

void StoreErrands::attempt(const Errand& errand) {
  while (true) {
    try {
      if (!client_) client_ = std::make_unique<StoreClient>(options_.store);
      return errand(*client_);
    } catch (const Error& error) {
      std::unique_lock lock(mutex_);
      if (ending_) return;
      lock.unlock();
      if (!options_.failed(error)) return;
      lock.lock();
      if (wake_.wait_for(lock, options_.pause, [this] { return ending_; })) return;
    }
  }
}

}  // namespace bonfire
