#include "bonfire/comm/recorder.h"

#include <atomic>
#include <mutex>
#include <utility>

namespace bonfire {

struct Recorder::State {
  std::atomic<bool> recording = false;
  std::mutex mutex;
  std::vector<Record> records;
  std::int64_t cleared = 0;  // tickets below this one were cleared away
  std::atomic<bool> capturing = false;
  std::vector<CapturedCollective> captured;
};

Recorder::Recorder() : state_(std::make_shared<State>()) {}
Recorder::~Recorder() = default;

void Recorder::start() { state_->recording = true; }
void Recorder::stop() { state_->recording = false; }
bool Recorder::recording() const { return state_->recording.load(std::memory_order_relaxed); }

void Recorder::clear() {
  const std::lock_guard lock(state_->mutex);
  state_->cleared += static_cast<std::int64_t>(state_->records.size());
  state_->records.clear();
}

std::vector<Record> Recorder::records() const {
  const std::lock_guard lock(state_->mutex);
  return state_->records;
}

std::vector<Collective> Recorder::collectives() const {
  std::vector<Collective> list;
  for (auto& record : records()) list.push_back(record.what);
  return list;
}

void Recorder::begin_capture() { state_->capturing = true; }
bool Recorder::capturing() const { return state_->capturing.load(std::memory_order_relaxed); }

std::vector<CapturedCollective> Recorder::end_capture() {
  state_->capturing = false;
  const std::lock_guard lock(state_->mutex);
  return std::exchange(state_->captured, {});
}

void Recorder::add_captured(CapturedCollective collective) {
  const std::lock_guard lock(state_->mutex);
  state_->captured.push_back(std::move(collective));
}

std::int64_t Recorder::begin(Record record) {
  const std::lock_guard lock(state_->mutex);
  state_->records.push_back(std::move(record));
  return state_->cleared + static_cast<std::int64_t>(state_->records.size()) - 1;
}

void Recorder::end(std::int64_t ticket, Nanoseconds start, Nanoseconds end) {
  const std::lock_guard lock(state_->mutex);
  const std::int64_t at = ticket - state_->cleared;
  if (at < 0) return;
  auto& record = state_->records.at(static_cast<std::size_t>(at));
  record.start = start;
  record.end = end;
}

}  // namespace bonfire
