#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/stateful.h"
#include "bonfire/base/trace.h"
#include "bonfire/data/order.h"
#include "bonfire/data/source.h"

namespace bonfire {

// Samples that go through the model together: [samples, ...] each.
struct Batch {
  at::Tensor input;
  at::Tensor target;
  std::vector<std::uint64_t> samples;  // which of the source's, in order
  // [samples, positions], int64: where the document of each position begins. Undefined where each sample is one.
  at::Tensor documents{};
};

// One rank's part of one optimizer step.
struct StepBatches {
  std::int64_t samples = 0;         // over all ranks: less than the batch only at the very end of the data
  std::vector<Batch> microbatches;  // empty where this rank has run out of data
};

struct LoaderOptions {
  std::int64_t batch = 1;       // samples in one step, over all ranks
  std::int64_t microbatch = 0;  // samples in one Batch; 0: all that a rank has of a step
  int rank = 0;                 // among the data-parallel ranks
  int ranks = 1;
  std::uint64_t seed = 0;
  bool shuffle = true;
  std::uint64_t epochs = 0;  // 0: never ends
  bool drop_last = true;     // whether the last samples, fewer than a batch, are left out
  int prefetch = 2;          // steps read ahead on a thread; 0: none, and no thread
  bool pin_memory = false;
  Trace* trace = nullptr;  // where the time of reading is noted
};

// Reads a source in SampleOrder. Step s takes the positions [s * batch, (s + 1) * batch) of the order, and rank r of n the
// r-th of n contiguous parts of them, so neither the number of ranks nor the microbatch changes what a step sees.
//
// The state is the number of samples that all ranks have taken. It does not depend on ranks or batch: a run may go on with
// others. All methods are for one thread.
class BONFIRE_API Loader : public Stateful {
 public:
  Loader(std::shared_ptr<const Source> source, const LoaderOptions& options);
  ~Loader() override;

  // Nothing at the end of the data. Throws what the source threw while reading this step.
  std::optional<StepBatches> next();

  std::uint64_t samples_taken() const { return taken_; }
  // Goes on from there.
  void seek(std::uint64_t samples_taken);

  State save() const override;
  void load(const State& state) override;

  // `for (auto& batch : loader)`, one Batch a step; it is empty where this rank has run out of data before the others.
  // REQUIRES: options.microbatch is 0.
  class Iterator;
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

 private:
  struct Ready {
    std::optional<StepBatches> step;
    std::exception_ptr error;
  };

  std::int64_t step_size(std::uint64_t position) const;
  std::optional<StepBatches> read_step(std::uint64_t position) const;
  Batch read_batch(std::uint64_t first, std::uint64_t last) const;
  Ready try_read(std::uint64_t position) const;
  void read_ahead(std::stop_token stop, std::uint64_t position);
  Ready take_ready();

  std::shared_ptr<const Source> source_;
  LoaderOptions options_;
  SampleOrder order_;
  SampleField input_;
  SampleField target_;
  std::uint64_t taken_ = 0;

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Ready> ready_;
  std::jthread reader_;  // last: it uses all of the above
};

class BONFIRE_API Loader::Iterator {
 public:
  explicit Iterator(Loader& loader) : loader_(&loader) { ++*this; }
  Batch& operator*() { return *batch_; }
  Batch* operator->() { return &*batch_; }
  Iterator& operator++();
  bool operator==(std::default_sentinel_t) const { return !batch_; }

 private:
  Loader* loader_;
  std::optional<Batch> batch_;
};

}  // namespace bonfire
