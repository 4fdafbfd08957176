#include "bonfire/schedule/generate.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/schedule/lowering.h"

namespace bonfire::schedule {
namespace {

// Microbatches times stages: far more than anyone runs, and few enough for memory.
constexpr std::int64_t kMostCells = std::int64_t{1} << 26;

Schedule empty_table(std::string_view name, Shape shape) {
  const auto positive = [&](const char* what, int value) {
    if (value < 1) fail_config("schedule {}: {} {}; allowed: 1 or more", name, value, what);
  };
  positive("ranks", shape.ranks);
  positive("microbatches", shape.microbatches);
  positive("chunks", shape.chunks);
  if (std::int64_t{shape.ranks} * shape.microbatches > kMostCells / shape.chunks)
    fail_config("schedule {}: {} ranks x {} chunks x {} microbatches; allowed: at most {} in all", name, shape.ranks,
                shape.chunks, shape.microbatches, kMostCells);
  return {shape.ranks * shape.chunks, shape.microbatches,
          std::vector<std::vector<Action>>(static_cast<std::size_t>(shape.ranks))};
}

void require_chunks(std::string_view name, Shape shape, int chunks) {
  if (shape.chunks != chunks)
    fail_config("schedule {}: {} chunks; allowed: {} (stages per rank){}", name, shape.chunks, chunks,
                chunks == 1 ? "; interleaved takes more" : "");
}

// 1F1B with split backward. `ahead` forwards come before the first backward; weight gradients are `late` microbatches behind
// their input gradients, which keeps the ranks below supplied while forwards run out.
struct Split {
  int ahead;
  int late;
};

std::vector<Action> split_row(int stage, int microbatches, Split split) {
  std::vector<Action> row;
  row.reserve(3 * static_cast<std::size_t>(microbatches) + 1);
  const int ahead = std::min(split.ahead, microbatches);
  for (int i = 0; i < ahead; ++i) row.push_back({stage, Kind::forward, i});
  for (int i = 0; i < microbatches; ++i) {
    row.push_back({stage, Kind::input_gradient, i});
    if (i >= split.late) row.push_back({stage, Kind::weight_gradient, i - split.late});
    if (ahead + i < microbatches) row.push_back({stage, Kind::forward, ahead + i});
  }
  for (int i = std::max(0, microbatches - split.late); i < microbatches; ++i)
    row.push_back({stage, Kind::weight_gradient, i});
  return row;
}

// Writes a row of two chunks, counting the microbatches of each; what is out of range or not yet possible is left out.
class TwoChunks {
 public:
  TwoChunks(std::array<std::int32_t, 2> stages, int microbatches) : stages_(stages), microbatches_(microbatches) {}

  void forward(int chunk) { put(Kind::forward, chunk, forwards_, microbatches_); }
  void input_gradient(int chunk) { put(Kind::input_gradient, chunk, input_gradients_, forwards_[at(chunk)]); }
  void weight_gradient(int chunk) { put(Kind::weight_gradient, chunk, weight_gradients_, input_gradients_[at(chunk)]); }

  bool forwards_left() const { return forwards_[0] < microbatches_ || forwards_[1] < microbatches_; }
  bool input_gradients_left() const { return input_gradients_[0] < microbatches_ || input_gradients_[1] < microbatches_; }
  bool weight_gradients_left(int chunk) const { return weight_gradients_[at(chunk)] < microbatches_; }
  std::vector<Action> row() && { return std::move(row_); }

 private:
  static std::size_t at(int chunk) { return static_cast<std::size_t>(chunk); }
  void put(Kind kind, int chunk, std::array<int, 2>& done, int limit) {
    if (done[at(chunk)] < limit) row_.push_back({stages_[at(chunk)], kind, done[at(chunk)]++});
  }
  std::array<std::int32_t, 2> stages_;
  int microbatches_;
  std::array<int, 2> forwards_{}, input_gradients_{}, weight_gradients_{};
  std::vector<Action> row_;
};

}  // namespace

Schedule naive(Shape shape) {
  Schedule schedule = empty_table("naive", shape);
  const auto row_of = [&](int stage) -> auto& { return schedule.rows[static_cast<std::size_t>(stage % shape.ranks)]; };
  for (int i = 0; i < shape.microbatches; ++i) {
    for (int stage = 0; stage < schedule.stages; ++stage) row_of(stage).push_back({stage, Kind::forward, i});
    for (int stage = schedule.stages - 1; stage >= 0; --stage) row_of(stage).push_back({stage, Kind::backward, i});
  }
  return add_updates(std::move(schedule));
}

Schedule gpipe(Shape shape) {
  Schedule schedule = empty_table("gpipe", shape);
  const auto row_of = [&](int stage) -> auto& { return schedule.rows[static_cast<std::size_t>(stage % shape.ranks)]; };
  for (int stage = 0; stage < schedule.stages; ++stage) {
    for (int i = 0; i < shape.microbatches; ++i) row_of(stage).push_back({stage, Kind::forward, i});
  }
  for (int stage = schedule.stages - 1; stage >= 0; --stage) {
    for (int i = 0; i < shape.microbatches; ++i) row_of(stage).push_back({stage, Kind::backward, i});
  }
  return add_updates(std::move(schedule));
}

Schedule one_f_one_b(Shape shape) {
  Schedule schedule = empty_table("1f1b", shape);
  require_chunks("1f1b", shape, 1);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    auto& row = schedule.rows[static_cast<std::size_t>(rank)];
    const int ahead = std::min(shape.ranks - rank, shape.microbatches);
    for (int i = 0; i < ahead; ++i) row.push_back({rank, Kind::forward, i});
    for (int i = 0; i < shape.microbatches; ++i) {
      row.push_back({rank, Kind::backward, i});
      if (ahead + i < shape.microbatches) row.push_back({rank, Kind::forward, ahead + i});
    }
  }
  return add_updates(std::move(schedule));
}

// A rank goes through its chunks in turns of `ranks` microbatches, so that a microbatch that leaves the last rank finds the
// first one ready for its next chunk. Turns must be whole.
Schedule interleaved(Shape shape) {
  Schedule schedule = empty_table("interleaved", shape);
  const int ranks = shape.ranks, microbatches = shape.microbatches, chunks = shape.chunks;
  if (microbatches % ranks != 0) {
    const int below = microbatches / ranks * ranks;
    fail_config("schedule interleaved: {} microbatches on {} ranks; allowed: a multiple of the ranks, such as {}{}",
                microbatches, ranks, below > 0 ? fmt::format("{} or ", below) : "", below + ranks);
  }
  if (chunks == 1) return one_f_one_b(shape);
  const int total = microbatches * chunks;
  for (int rank = 0; rank < ranks; ++rank) {
    auto& row = schedule.rows[static_cast<std::size_t>(rank)];
    row.reserve(2 * static_cast<std::size_t>(total) + static_cast<std::size_t>(chunks));
    const auto put = [&, turn = ranks * chunks](Kind kind, int number) {
      int chunk = number % turn / ranks;
      if (kind == Kind::backward) chunk = chunks - 1 - chunk;
      row.push_back({chunk * ranks + rank, kind, number / turn * ranks + number % ranks});
    };
    const int ahead = std::min(total, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks);
    for (int i = 0; i < ahead; ++i) put(Kind::forward, i);
    for (int i = 0; i < total; ++i) {
      if (ahead + i < total) put(Kind::forward, ahead + i);
      put(Kind::backward, i);
    }
  }
  return add_updates(std::move(schedule));
}

Schedule zb_h1(Shape shape) {
  Schedule schedule = empty_table("zb-h1", shape);
  require_chunks("zb-h1", shape, 1);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    schedule.rows[static_cast<std::size_t>(rank)] =
        split_row(rank, shape.microbatches, {.ahead = shape.ranks - rank, .late = rank});
  }
  return add_updates(std::move(schedule));
}

Schedule zb_h2(Shape shape) {
  Schedule schedule = empty_table("zb-h2", shape);
  require_chunks("zb-h2", shape, 1);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    schedule.rows[static_cast<std::size_t>(rank)] =
        split_row(rank, shape.microbatches, {.ahead = 2 * (shape.ranks - rank) - 1, .late = 2 * rank});
  }
  return add_updates(std::move(schedule));
}

// Rank r holds stage r on the way down and stage 2p - 1 - r on the way up, so the first rank has both ends of the model and
// gradients start on the rank where the input came in. From 2p - 1 microbatches on, with forwards, input and weight
// gradients that cost the same, a rank waits only for its first input.
Schedule zb_v(Shape shape) {
  Schedule schedule = empty_table("zb-v", shape);
  require_chunks("zb-v", shape, 2);
  const int ranks = shape.ranks;
  for (int rank = 0; rank < ranks; ++rank) {
    TwoChunks row({rank, 2 * ranks - 1 - rank}, shape.microbatches);
    const int below = ranks - rank;  // ranks from here to the turn
    for (int i = 0; i < 2 * below - 1; ++i) row.forward(0);
    for (int i = 0; i < rank; ++i) {
      row.forward(1);
      row.forward(0);
    }
    for (int i = 0; i < below; ++i) {
      row.forward(1);
      row.input_gradient(1);
      row.weight_gradient(1);
    }
    while (row.forwards_left()) {
      for (const int chunk : {0, 1}) {
        row.forward(chunk);
        row.input_gradient(chunk);
        row.weight_gradient(chunk);
      }
    }
    // No forwards are left: input gradients first, for others wait for them.
    for (int i = 0; i < rank; ++i) {
      row.input_gradient(0);
      row.input_gradient(1);
    }
    for (int i = 0; i < below; ++i) {
      row.input_gradient(0);
      row.weight_gradient(0);
    }
    while (row.input_gradients_left()) {
      row.input_gradient(1);
      row.input_gradient(0);
    }
    for (const int chunk : {1, 0}) {
      while (row.weight_gradients_left(chunk)) row.weight_gradient(chunk);
    }
    schedule.rows[static_cast<std::size_t>(rank)] = std::move(row).row();
  }
  return add_updates(std::move(schedule));
}

namespace {

struct Named {
  std::string name;
  Schedule (*make)(Shape);
  int natural_chunks;
};

const std::vector<Named>& all() {
  static const std::vector<Named> table = {
      {"naive", naive, 1}, {"gpipe", gpipe, 1}, {"1f1b", one_f_one_b, 1}, {"interleaved", interleaved, 2},
      {"zb-h1", zb_h1, 1}, {"zb-h2", zb_h2, 1}, {"zb-v", zb_v, 2},
  };
  return table;
}

const Named& named(std::string_view name) {
  const auto found = std::find_if(all().begin(), all().end(), [&](const Named& entry) { return entry.name == name; });
  if (found == all().end()) fail_config("schedule '{}'; allowed: {}", name, fmt::join(schedule_names(), ", "));
  return *found;
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const auto& entry : all()) result.push_back(entry.name);
    return result;
  }();
  return names;
}

Schedule generate(std::string_view name, Shape shape) { return named(name).make(shape); }

int natural_chunks(std::string_view name) { return named(name).natural_chunks; }

}  // namespace bonfire::schedule
