#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/shard/slices.h"

namespace bonfire::testing {

// What all ranks of a run hold, put together by name and kind. Ranks are threads.
class SavedSlices {
 public:
  // Takes a rank's: each element once, in pieces. Copies are compared with it by check().
  void add(const std::vector<Slice>& slices);
  // Every element is there, once, and `slices` has the same values, in whatever copy.
  void check(const std::vector<Slice>& slices) const;
  // Writes what is saved into the slices of another run, in pieces. Hints may be missing.
  void load(const std::vector<Slice>& slices) const;

  at::Tensor at(const std::string& name, const std::string& kind) const;
  std::vector<std::string> names(const std::string& kind) const;

 private:
  struct Entry {
    at::Tensor values, count;  // flat; how often each element was added
    std::vector<std::int64_t> shape;
  };
  const Entry& entry(const Slice& slice) const;

  mutable std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, Entry> entries_;
};

}  // namespace bonfire::testing
