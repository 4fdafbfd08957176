#include "bonfire/comm/alarm.h"

#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/comm/store_bytes.h"
#include "bonfire/comm/work.h"

namespace bonfire {
namespace {

const std::string alike = "alike", apart = "apart";

}  // namespace

Alarm::Alarm(c10::intrusive_ptr<c10d::Store> store, int rank, Part part)
    : store_(std::move(store)), rank_(rank), part_(std::move(part)) {}

// Below it: `first` (place and words of the rank that was first), `count` of those that failed, `same` of those that failed
// where the first did, and `verdict`, which is given once.
std::string Alarm::key() const { return fmt::format("{}/{}/", part_.name, epoch_); }

std::string Alarm::words_of_first() const {
  const auto first = text_of(store_->get(key() + "first"));
  return first.substr(first.find('\n') + 1);
}

bool Alarm::raise(const std::string& words, std::int64_t place, std::chrono::milliseconds patience) {
  if (part_.size == 1) return true;
  const std::lock_guard lock(mutex_);
  if (known()) return false;
  speak(words, place);
  const auto first = text_of(store_->get(key() + "first"));
  if (std::stoll(first) != place)
    verdict(apart);
  else if (store_->add(key() + "same", 1) == part_.size)
    verdict(alike);
  try {
    store_->wait({key() + "verdict"}, patience);
  } catch (const std::exception&) {
    // Somebody has not come: whatever was said meanwhile counts.
  }
  if (verdict(apart) == alike) {
    ++epoch_;
    return true;
  }
  give_up();
  if (part_.of) part_.of->sound(words, place);
  return false;
}

void Alarm::sound(const std::string& words, std::int64_t place) {
  const std::lock_guard lock(mutex_);
  if (known()) return;
  speak(words, place);
  verdict(apart);
  give_up();
}

void Alarm::speak(const std::string& words, std::int64_t place) {
  const auto mine = fmt::format("{}\nrank {} failed: {}", place, rank_, words.substr(0, words.find('\n')));
  if (store_->add(key() + "count", 1) == 1) store_->set(key() + "first", bytes_of(mine));
}

std::string Alarm::verdict(const std::string& said) {
  return text_of(store_->compareSet(key() + "verdict", bytes_of(""), bytes_of(said)));
}

void Alarm::give_up() {
  words_ = words_of_first();
  broken_.store(true, std::memory_order_release);
}

void Alarm::ask() {
  if (part_.size == 1 && !part_.of) return;
  constexpr auto patience = std::chrono::seconds(3);
  if (!known()) {
    const std::lock_guard lock(asking_);
    if (!question_.valid())
      question_ = std::async(std::launch::async, [this] {
        hear();
        if (part_.of) part_.of->hear();
      });
    if (question_.wait_for(patience) == std::future_status::ready) std::exchange(question_, {}).wait();
  }
  check();
}

void Alarm::hear() {
  const std::lock_guard lock(mutex_);
  try {
    if (known() || !store_->check({key() + "first"})) return;
    verdict(apart);
    give_up();
  } catch (const std::exception&) {
    // The store is gone.
  }
}

void Alarm::check() const {
  if (broken_.load(std::memory_order_acquire)) throw PeerLost(words_);
  if (part_.of) part_.of->check();
}

}  // namespace bonfire
