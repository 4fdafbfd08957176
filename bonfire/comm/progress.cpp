#include "bonfire/comm/progress.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string_view>

#include <nlohmann/json.hpp>

namespace bonfire {
namespace {

using nlohmann::json;

bool is_message(CollectiveKind kind) { return kind == CollectiveKind::send || kind == CollectiveKind::receive; }

// Plain values one after the other, in this machine's order of bytes.
template <class Value>
void put(std::string& text, Value value) {
  text.append(reinterpret_cast<const char*>(&value), sizeof value);
}

class Numbers {
 public:
  explicit Numbers(std::string_view text) : rest_(text) {}

  template <class Value>
  Value take() {
    Value value{};
    const std::string_view bytes = take_bytes(sizeof value);
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  std::string_view take_bytes(std::size_t count) {
    if (count > rest_.size()) whole_ = false;
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  bool whole() const { return whole_; }
  bool over() const { return whole_ && rest_.empty(); }

 private:
  std::string_view rest_;
  bool whole_ = true;
};

void put_place(std::string& text, const Progress::Lane::Place& place) {
  put(text, place.begun);
  put(text, place.ended);
  put(text, static_cast<std::uint8_t>(place.kind));
  put(text, static_cast<float>(place.age));
}

bool take_place(Numbers& numbers, Progress::Lane::Place& place) {
  place.begun = numbers.take<std::int64_t>();
  place.ended = numbers.take<std::int64_t>();
  const int kind = numbers.take<std::uint8_t>();
  place.kind = static_cast<CollectiveKind>(kind);
  place.age = numbers.take<float>();
  return kind <= static_cast<int>(CollectiveKind::barrier);
}

// Something that cannot be asked any more has not ended: whoever broke it says so.
bool says_yes(const std::function<bool()>& question) {
  try {
    return question();
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

ProgressBoard::Lane::Place& ProgressBoard::Lane::place(CollectiveKind kind) {
  return is_message(kind) ? message_ : collective_;
}

void ProgressBoard::Lane::begin(std::int64_t sequence, CollectiveKind kind) {
  Place& here = place(kind);
  here.begun_at.store(now_ns(), std::memory_order_relaxed);
  here.begun.store(static_cast<std::uint64_t>(sequence) << 8 | static_cast<std::uint64_t>(kind), std::memory_order_release);
}

void ProgressBoard::Lane::end(std::int64_t sequence, CollectiveKind kind) { place(kind).end(sequence); }

void ProgressBoard::Lane::watch(std::int64_t sequence, CollectiveKind kind, std::function<bool()> ended) {
  constexpr std::size_t kEvery = 64;
  Place& here = place(kind);
  const std::lock_guard lock(here.mutex);
  here.watched.push_back({sequence, std::move(ended)});
  if (here.watched.size() < here.trim_at) return;
  // One question for many collectives: whether the older half is over.
  const auto middle = here.watched.begin() + static_cast<std::ptrdiff_t>(here.watched.size() / 2);
  if (says_yes(middle->ended)) {
    here.end(middle->sequence);
    here.watched.erase(here.watched.begin(), middle + 1);
  }
  here.trim_at = here.watched.size() + kEvery;
}

void ProgressBoard::Lane::Place::end(std::int64_t sequence) {
  std::int64_t before = ended.load(std::memory_order_relaxed);
  while (before < sequence && !ended.compare_exchange_weak(before, sequence, std::memory_order_relaxed)) {
  }
}

// Asks outside the lock, so that the rank never waits for a question that takes long.
void ProgressBoard::Lane::Place::settle() {
  std::deque<Watched> asked;
  {
    const std::lock_guard lock(mutex);
    asked.swap(watched);
  }
  const auto first_running =
      std::partition_point(asked.begin(), asked.end(), [](const Watched& one) { return says_yes(one.ended); });
  if (first_running != asked.begin()) end(std::prev(first_running)->sequence);
  asked.erase(asked.begin(), first_running);
  const std::lock_guard lock(mutex);
  watched.insert(watched.begin(), std::make_move_iterator(asked.begin()), std::make_move_iterator(asked.end()));
}

Progress::Lane::Place ProgressBoard::Lane::read(const Place& place, Nanoseconds now) {
  Progress::Lane::Place seen;
  const std::uint64_t begun = place.begun.load(std::memory_order_acquire);
  seen.begun = static_cast<std::int64_t>(begun >> 8);
  seen.kind = static_cast<CollectiveKind>(begun & 0xff);
  seen.ended = place.ended.load(std::memory_order_relaxed);
  if (seen.begun > 0) seen.age = static_cast<double>(now - place.begun_at.load(std::memory_order_relaxed)) * 1e-9;
  return seen;
}

ProgressBoard::Lane& ProgressBoard::lane(std::string group, std::vector<int> world_ranks) {
  const std::lock_guard lock(mutex_);
  return lanes_.emplace_back(std::move(group), std::move(world_ranks));
}

void ProgressBoard::finish_step(std::int64_t step) {
  const Nanoseconds now = now_ns();
  const std::int64_t waited = waited_.load(std::memory_order_relaxed);
  const Nanoseconds took = now - step_start_;
  step_ns_.store(took, std::memory_order_relaxed);
  own_ns_.store(std::max<std::int64_t>(0, took - (waited - waited_before_)), std::memory_order_relaxed);
  step_.store(step, std::memory_order_release);
  step_start_ = now;
  waited_before_ = waited;
}

void ProgressBoard::finish() { finished_.store(true, std::memory_order_relaxed); }

void ProgressBoard::look() {
  std::vector<Lane*> lanes;  // they stay where they are
  {
    const std::lock_guard lock(mutex_);
    for (Lane& lane : lanes_) lanes.push_back(&lane);
  }
  for (Lane* lane : lanes) {
    lane->collective_.settle();
    lane->message_.settle();
  }
}

Progress ProgressBoard::snapshot() const {
  Progress progress;
  const Nanoseconds now = now_ns();
  {
    const std::lock_guard lock(mutex_);
    for (const Lane& lane : lanes_)
      progress.lanes.push_back(
          {lane.group_, lane.ranks_, Lane::read(lane.collective_, now), Lane::read(lane.message_, now)});
  }
  if (const char* busy = busy_.load(std::memory_order_relaxed)) progress.busy = busy;
  progress.step = step_.load(std::memory_order_acquire);
  progress.step_seconds = static_cast<double>(step_ns_.load(std::memory_order_relaxed)) * 1e-9;
  progress.own_seconds = static_cast<double>(own_ns_.load(std::memory_order_relaxed)) * 1e-9;
  progress.finished = finished_.load(std::memory_order_relaxed);
  return progress;
}

std::string encode_lanes(const Progress& progress) {
  json lanes = json::array();
  for (const Progress::Lane& lane : progress.lanes) lanes.push_back({lane.group, lane.ranks.text()});
  return lanes.dump();
}

std::optional<std::vector<Progress::Lane>> decode_lanes(const std::string& text) {
  try {
    std::vector<Progress::Lane> lanes;
    for (const json& lane : json::parse(text)) {
      const auto ranks = Members::parse(lane.at(1).get<std::string>());
      if (!ranks) return std::nullopt;
      lanes.push_back({.group = lane.at(0).get<std::string>(), .ranks = *ranks});
    }
    return lanes;
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

std::string encode_numbers(const Progress& progress) {
  std::string text;
  put(text, static_cast<std::uint32_t>(progress.lanes.size()));
  put(text, progress.step);
  put(text, progress.step_seconds);
  put(text, progress.own_seconds);
  put(text, static_cast<std::uint8_t>(progress.finished));
  put(text, static_cast<std::uint32_t>(progress.busy.size()));
  text += progress.busy;
  for (const Progress::Lane& lane : progress.lanes) {
    put_place(text, lane.collective);
    put_place(text, lane.message);
  }
  return text;
}

std::optional<std::size_t> lanes_of(const std::string& numbers) {
  Numbers reader(numbers);
  const auto count = reader.take<std::uint32_t>();
  if (!reader.whole()) return std::nullopt;
  return count;
}

std::optional<Progress> decode_progress(const std::string& numbers, const std::vector<Progress::Lane>& lanes) {
  Numbers reader(numbers);
  Progress progress;
  const auto count = reader.take<std::uint32_t>();
  progress.step = reader.take<std::int64_t>();
  progress.step_seconds = reader.take<double>();
  progress.own_seconds = reader.take<double>();
  progress.finished = reader.take<std::uint8_t>() != 0;
  progress.busy = reader.take_bytes(reader.take<std::uint32_t>());
  if (!reader.whole() || count > lanes.size()) return std::nullopt;
  progress.lanes.assign(lanes.begin(), lanes.begin() + count);
  for (Progress::Lane& lane : progress.lanes)
    if (!take_place(reader, lane.collective) || !take_place(reader, lane.message)) return std::nullopt;
  if (!reader.over()) return std::nullopt;
  return progress;
}

}  // namespace bonfire
