#include "bonfire/train/tracer.h"

#include <algorithm>
#include <cstring>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "bonfire/comm/recorder.h"

namespace bonfire {

// On a GPU a phase is a pair of events on the compute stream, read once the step is over; the first event is made when the
// stream is idle, so its time is known to the host as well.
struct Tracer::Clock {
  struct Pair {
    std::string name;
    c10::Event start, end;
  };

  explicit Clock(c10::Device device)
      : device(device), guard(device.type()), zero(device.type(), c10::EventFlag::BACKEND_DEFAULT) {
    const auto stream = guard.getStream(device);
    guard.synchronizeStream(stream);
    zero_ns = now_ns();
    zero.record(stream);
  }

  c10::Event mark() {
    c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    event.record(guard.getStream(device));
    return event;
  }

  c10::Device device;
  c10::impl::VirtualGuardImpl guard;
  c10::Event zero;
  Nanoseconds zero_ns = 0;
  std::vector<Pair> pairs;
};

Tracer::Tracer(const World& world, const Config& config, std::filesystem::path file)
    : world_(world),
      first_(config.train.trace_from),
      last_(config.train.trace_from + config.train.trace_steps - 1),
      steps_(config.train.steps),
      disk_(config, world.log()),
      file_(std::move(file)),
      trace_(world.rank()) {}

Tracer::~Tracer() = default;

void Tracer::begin_step(std::int64_t step) {
  tracing_ = traces(step);
  if (!tracing_) return;
  if (!world_.device().is_cpu()) clock_ = std::make_unique<Clock>(world_.device());
  if (step == first_) {
    world_.recorder().clear();
    world_.recorder().start();
  }
}

void Tracer::end_step(std::int64_t step) {
  if (!tracing_) return;
  if (clock_) {
    clock_->guard.synchronizeStream(clock_->guard.getStream(clock_->device));
    for (auto& [name, start, end] : clock_->pairs) {
      const auto at = [&](c10::Event& event) {
        return clock_->zero_ns + static_cast<Nanoseconds>(clock_->zero.elapsedTime(event) * 1e6);
      };
      add(name, at(start), at(end));
    }
    clock_.reset();
  }
  tracing_ = false;
  if (step < last_) return;

  world_.recorder().stop();
  for (const auto& record : world_.recorder().records()) {
    trace_.add({.name = name_of(record.what.kind),
                .category = "communication",
                .track = record.stream + " " + record.group,
                .start = record.start,
                .end = std::max(record.start, record.end),
                .bytes = record.what.bytes});
  }
  const auto events = gather_text(world_.group(), trace_.events(), world_.device());
  if (world_.rank() != 0) return;
  if (step >= steps_) disk_.finish();
  disk_.attempt(file_, [&] { write_file(file_, Trace::file(events)); });
}

void Tracer::add(const std::string& name, Nanoseconds start, Nanoseconds end) {
  trace_.add({.name = name, .category = "compute", .track = "compute", .start = start, .end = end, .bytes = 0});
}

Tracer::Phase Tracer::phase(std::string name) { return {this, std::move(name)}; }

Tracer::Phase::Phase(Tracer* tracer, std::string name)
    : tracer_(tracer && tracer->tracing_ ? tracer : nullptr), name_(std::move(name)) {
  if (!tracer_) return;
  if (auto* clock = tracer_->clock_.get()) {
    start_ = static_cast<std::int64_t>(clock->pairs.size());
    clock->pairs.push_back({name_, clock->mark(), c10::Event(clock->device.type(), c10::EventFlag::BACKEND_DEFAULT)});
  } else {
    start_ = now_ns();
  }
}

Tracer::Phase::~Phase() {
  if (!tracer_) return;
  if (auto* clock = tracer_->clock_.get()) {
    clock->pairs[static_cast<std::size_t>(start_)].end.record(clock->guard.getStream(clock->device));
  } else {
    tracer_->add(name_, start_, now_ns());
  }
}

std::vector<std::string> gather_text(const Group& group, const std::string& text, c10::Device device) {
  const auto longest = static_cast<std::int64_t>(group.max(static_cast<double>(text.size())));
  // The length in front, then the text, padded to the longest.
  constexpr std::int64_t head = sizeof(std::int64_t);
  auto mine = at::zeros({head + longest}, at::kByte);
  const auto length = static_cast<std::int64_t>(text.size());
  auto* bytes = static_cast<char*>(mine.data_ptr());
  std::memcpy(bytes, &length, head);
  std::memcpy(bytes + head, text.data(), text.size());

  const bool root = group.rank() == 0;
  mine = mine.to(device);
  auto all = at::empty({root ? group.size() * (head + longest) : 0}, at::TensorOptions(at::kByte).device(device));
  group.gather(all, mine, 0).wait();
  std::vector<std::string> texts;
  if (!root) return texts;
  all = all.cpu();
  for (int rank = 0; rank < group.size(); ++rank) {
    const char* part = static_cast<const char*>(all.data_ptr()) + rank * (head + longest);
    std::int64_t size = 0;
    std::memcpy(&size, part, head);
    texts.emplace_back(part + head, static_cast<std::size_t>(size));
  }
  return texts;
}

}  // namespace bonfire
