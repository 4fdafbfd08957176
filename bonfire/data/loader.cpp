#include "bonfire/data/loader.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ops/empty.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

at::Tensor empty_of(const SampleField& field, std::uint64_t samples, bool pinned) {
  std::vector<std::int64_t> sizes{static_cast<std::int64_t>(samples)};
  sizes.insert(sizes.end(), field.sizes.begin(), field.sizes.end());
  return at::empty(sizes, at::TensorOptions().dtype(field.dtype).pinned_memory(pinned));
}

// Of all epochs together.
std::uint64_t positions_of(std::uint64_t samples, std::uint64_t epochs) {
  constexpr auto endless = std::numeric_limits<std::uint64_t>::max();
  if (epochs == 0 || samples > endless / epochs) return endless;
  return samples * epochs;
}

}  // namespace

Loader::Loader(std::shared_ptr<const Source> source, const LoaderOptions& options)
    : source_(std::move(source)),
      options_(options),
      order_({.seed = options.seed, .samples = source_->size(), .shuffle = options.shuffle}),
      input_(source_->input()),
      target_(source_->target()) {
  if (options.batch < 1) fail_config("batch is {}, must be at least 1", options.batch);
  if (options.microbatch < 0) fail_config("microbatch is {}, must not be negative", options.microbatch);
  if (options.prefetch < 0) fail_config("prefetch is {}, must not be negative", options.prefetch);
  require(options.ranks >= 1 && options.rank >= 0 && options.rank < options.ranks, "rank {} of {} cannot be", options.rank,
          options.ranks);
  const auto positions = positions_of(source_->size(), options.epochs);
  if (options.drop_last && positions < static_cast<std::uint64_t>(options.batch))
    fail_config("the data holds {} samples in {} epochs, fewer than one batch of {}", source_->size(), options.epochs,
                options.batch);
}

Loader::~Loader() = default;

std::int64_t Loader::step_size(std::uint64_t position) const {
  const auto positions = positions_of(source_->size(), options_.epochs);
  const auto left = positions - std::min(position, positions);
  const auto batch = static_cast<std::uint64_t>(options_.batch);
  if (left >= batch) return options_.batch;
  return options_.drop_last ? 0 : static_cast<std::int64_t>(left);
}

std::optional<StepBatches> Loader::read_step(std::uint64_t position) const {
  const TraceScope scope(options_.trace, "read", "data", "loader");
  StepBatches step{.samples = step_size(position), .microbatches = {}};
  if (step.samples == 0) return std::nullopt;
  const auto part = [&](std::int64_t rank) {
    return position + static_cast<std::uint64_t>(step.samples * rank / options_.ranks);
  };
  const auto last = part(options_.rank + 1);
  const auto longest = options_.microbatch ? static_cast<std::uint64_t>(options_.microbatch) : unbounded;
  for (auto first = part(options_.rank); first < last;) {
    const auto count = std::min(longest, last - first);
    step.microbatches.push_back(read_batch(first, first + count));
    first += count;
  }
  return step;
}

Batch Loader::read_batch(std::uint64_t first, std::uint64_t last) const {
  Batch batch{empty_of(input_, last - first, options_.pin_memory), empty_of(target_, last - first, options_.pin_memory), {}};
  if (source_->separates_documents())
    batch.documents = at::empty({static_cast<std::int64_t>(last - first), input_.elements()}, at::kLong);
  auto* input = static_cast<char*>(batch.input.data_ptr());
  auto* target = static_cast<char*>(batch.target.data_ptr());
  const auto input_bytes = input_.elements() * static_cast<std::int64_t>(c10::elementSize(input_.dtype));
  const auto target_bytes = target_.elements() * static_cast<std::int64_t>(c10::elementSize(target_.dtype));
  for (auto position = first; position < last; ++position, input += input_bytes, target += target_bytes) {
    batch.samples.push_back(order_(position));
    source_->read(batch.samples.back(), input, target);
    if (!batch.documents.defined()) continue;
    auto* const starts =
        batch.documents.data_ptr<std::int64_t>() + static_cast<std::int64_t>(position - first) * input_.elements();
    source_->document_starts(batch.samples.back(), {starts, static_cast<std::size_t>(input_.elements())});
  }
  return batch;
}

Loader::Ready Loader::try_read(std::uint64_t position) const {
  try {
    return {read_step(position), nullptr};
  } catch (...) {
    return {std::nullopt, std::current_exception()};
  }
}

void Loader::read_ahead(std::stop_token stop, std::uint64_t position) {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      const auto room = [&] { return ready_.size() < static_cast<std::size_t>(options_.prefetch); };
      if (!changed_.wait(lock, stop, room)) return;
    }
    auto ready = try_read(position);
    const bool last = !ready.step;
    if (!last) position += static_cast<std::uint64_t>(ready.step->samples);
    {
      const std::lock_guard lock(mutex_);
      ready_.push_back(std::move(ready));
    }
    changed_.notify_all();
    if (last) return;
  }
}

Loader::Ready Loader::take_ready() {
  if (options_.prefetch == 0) return try_read(taken_);
  if (!reader_.joinable())
    reader_ = std::jthread([this, position = taken_](std::stop_token stop) { read_ahead(std::move(stop), position); });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !ready_.empty(); });
  // The end and an error stay: the reader has stopped, and whoever asks again gets the same answer.
  if (!ready_.front().step) return ready_.front();
  auto ready = std::move(ready_.front());
  ready_.pop_front();
  lock.unlock();
  changed_.notify_all();
  return ready;
}

std::optional<StepBatches> Loader::next() {
  auto ready = take_ready();
  if (ready.error) std::rethrow_exception(ready.error);
  if (ready.step) taken_ += static_cast<std::uint64_t>(ready.step->samples);
  return std::move(ready.step);
}

void Loader::seek(std::uint64_t samples_taken) {
  reader_ = {};  // stops and joins
  ready_.clear();
  taken_ = samples_taken;
}

State Loader::save() const { return {{"samples", static_cast<std::int64_t>(taken_)}}; }

void Loader::load(const State& state) {
  const auto samples = state_value<std::int64_t>(state, "samples");
  require(samples >= 0, "saved value 'samples' is {}, must not be negative", samples);
  seek(static_cast<std::uint64_t>(samples));
}

Loader::Iterator Loader::begin() {
  require(options_.microbatch == 0, "a loader with microbatches of {} is read with next(), not in a for loop",
          options_.microbatch);
  return Iterator(*this);
}

Loader::Iterator& Loader::Iterator::operator++() {
  batch_.reset();
  if (auto step = loader_->next()) {
    batch_ = step->microbatches.empty() ? loader_->read_batch(0, 0) : std::move(step->microbatches.front());
  }
  return *this;
}

}  // namespace bonfire
