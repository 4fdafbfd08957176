#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace bonfire {

// The keys and values of a store, and who waits for which of them. What a change costs does not depend on how many others
// wait for something else.
class StoreTable {
 public:
  using Waiter = std::uint64_t;

  void set(const std::string& key, std::string value);
  void append(const std::string& key, const std::string& value);
  // Throws Error where the key does not hold a number.
  std::int64_t add(const std::string& key, std::int64_t increment);
  // Sets where the value is `expected` (empty: or not there) and returns what is there afterwards; `expected` where a key
  // with a value was expected and is not there.
  std::string compare_set(const std::string& key, const std::string& expected, const std::string& desired);
  bool remove(const std::string& key);

  bool has_all(const std::vector<std::string>& keys) const;
  // REQUIRES: all are there.
  std::vector<std::string> values(const std::vector<std::string>& keys) const;
  std::int64_t count() const { return static_cast<std::int64_t>(values_.size()); }
  std::vector<std::string> keys() const;

  // `waiter` wants all of these, which are not all there yet. REQUIRES: it waits for nothing else.
  void wait(Waiter waiter, std::vector<std::string> keys);
  // Ends its wait; gives back what it waited for.
  std::vector<std::string> stop_waiting(Waiter waiter);
  // Those whose keys have all come since this was last asked, oldest first. They wait until they are told to stop.
  std::vector<Waiter> take_ready();

 private:
  struct Wait {
    std::vector<std::string> keys;
    std::size_t missing = 0;  // of them, as far as is known
  };

  void appeared(const std::string& key);
  // Notes the waiter at each of its keys that is not there.
  void note_missing(Waiter waiter, Wait& wait);

  std::unordered_map<std::string, std::string> values_;
  std::unordered_map<Waiter, Wait> waits_;
  std::unordered_map<std::string, std::unordered_set<Waiter>> waiting_;  // by the key that is missing
  std::vector<Waiter> ready_;
};

}  // namespace bonfire
