#include "bonfire/comm/store_table.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "bonfire/base/error.h"

namespace bonfire {

void StoreTable::set(const std::string& key, std::string value) {
  const auto [at, made] = values_.insert_or_assign(key, std::move(value));
  if (made) appeared(key);
}

void StoreTable::append(const std::string& key, const std::string& value) {
  const auto [at, made] = values_.try_emplace(key);
  at->second += value;
  if (made) appeared(key);
}

std::int64_t StoreTable::add(const std::string& key, std::int64_t increment) {
  std::int64_t number = 0;
  if (const auto found = values_.find(key); found != values_.end()) {
    const std::string& text = found->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    require(error == std::errc() && end == text.data() + text.size(), "key '{}' does not hold a number", key);
  }
  std::int64_t sum = 0;
  require(!__builtin_add_overflow(number, increment, &sum), "key '{}': {} + {} is too large", key, number, increment);
  set(key, std::to_string(sum));
  return sum;
}

std::string StoreTable::compare_set(const std::string& key, const std::string& expected, const std::string& desired) {
  const auto found = values_.find(key);
  if (found == values_.end() ? !expected.empty() : found->second != expected)
    return found == values_.end() ? expected : found->second;
  set(key, desired);
  return desired;
}

bool StoreTable::remove(const std::string& key) { return values_.erase(key) != 0; }

bool StoreTable::has_all(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(), [&](const std::string& key) { return values_.contains(key); });
}

std::vector<std::string> StoreTable::values(const std::vector<std::string>& keys) const {
  std::vector<std::string> found;
  found.reserve(keys.size());
  for (const std::string& key : keys) found.push_back(values_.at(key));
  return found;
}

std::vector<std::string> StoreTable::keys() const {
  std::vector<std::string> all;
  for (const auto& [key, value] : values_) all.push_back(key);
  std::sort(all.begin(), all.end());
  return all;
}

void StoreTable::wait(Waiter waiter, std::vector<std::string> keys) {
  Wait& wait = waits_[waiter];
  wait.keys = std::move(keys);
  note_missing(waiter, wait);
}

void StoreTable::note_missing(Waiter waiter, Wait& wait) {
  wait.missing = 0;
  for (const std::string& key : wait.keys)
    if (!values_.contains(key) && waiting_[key].insert(waiter).second) ++wait.missing;
}

std::vector<std::string> StoreTable::stop_waiting(Waiter waiter) {
  const auto found = waits_.find(waiter);
  if (found == waits_.end()) return {};
  std::vector<std::string> keys = std::move(found->second.keys);
  waits_.erase(found);
  for (const std::string& key : keys)
    if (const auto at = waiting_.find(key); at != waiting_.end() && at->second.erase(waiter) != 0 && at->second.empty())
      waiting_.erase(at);
  return keys;
}

void StoreTable::appeared(const std::string& key) {
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) return;
  const std::unordered_set<Waiter> waiters = std::move(found->second);
  waiting_.erase(found);
  for (const Waiter waiter : waiters) {
    Wait& wait = waits_.at(waiter);
    if (--wait.missing != 0) continue;
    // A key that was there may have been removed meanwhile: then it is waited for again.
    note_missing(waiter, wait);
    if (wait.missing == 0) ready_.push_back(waiter);
  }
}

std::vector<StoreTable::Waiter> StoreTable::take_ready() {
  std::vector<Waiter> ready = std::exchange(ready_, {});
  std::sort(ready.begin(), ready.end());
  return ready;
}

}  // namespace bonfire
