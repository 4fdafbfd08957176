#include "bonfire/train/tracer.h"

#include <algorithm>
#include <cstring>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
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
  const auto events = gather_text(world_.group(), trace_.events(), ranks_in_a_trace);
  if (events.empty()) return;
  const int first = world_.rank();
  const auto file = first == 0 ? file_ : file_.parent_path() / fmt::format("trace-{}.json", first);
  if (step >= steps_) disk_.finish();
  disk_.attempt(file, [&] {
    // On another machine than rank 0's the run folder may not be there yet.
    std::error_code exists;
    std::filesystem::create_directories(file.parent_path(), exists);
    write_file(file, Trace::file(events), Survives::process);
  });
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

std::vector<std::string> gather_text(const Group& group, const std::string& text, int together) {
  const int first = group.rank() / together * together;
  const int end = std::min(first + together, group.size());
  // From each of the others to the first, all at once.
  const auto collect = [&](const at::Tensor& mine, const std::vector<at::Tensor>& theirs) {
    std::vector<Message> messages;
    if (group.rank() != first) messages.push_back({Message::Way::send, mine, first});
    for (std::size_t at = 0; at < theirs.size(); ++at)
      messages.push_back({Message::Way::receive, theirs[at], first + 1 + static_cast<int>(at)});
    if (!messages.empty()) group.batch(messages).wait();
  };
  const bool collects = group.rank() == first;
  const auto others = static_cast<std::size_t>(collects ? end - first - 1 : 0);
  const auto on_device = [&](at::ScalarType type) { return at::TensorOptions(type).device(group.device()); };

  // The lengths, then the texts; one byte more, so that none is empty.
  std::vector<at::Tensor> lengths, texts;
  for (std::size_t at = 0; at < others; ++at) lengths.push_back(at::zeros({1}, on_device(at::kLong)));
  auto length = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong).to(group.device());
  collect(length, lengths);
  for (const at::Tensor& theirs : lengths)
    texts.push_back(at::empty({theirs.item<std::int64_t>() + 1}, on_device(at::kByte)));
  auto bytes = at::zeros({static_cast<std::int64_t>(text.size()) + 1}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  collect(bytes.to(group.device()), texts);

  std::vector<std::string> all;
  if (!collects) return all;
  all.push_back(text);
  for (const at::Tensor& theirs : texts) {
    const auto host = theirs.cpu();
    all.emplace_back(static_cast<const char*>(host.const_data_ptr()), static_cast<std::size_t>(host.numel() - 1));
  }
  return all;
}

}  // namespace bonfire
