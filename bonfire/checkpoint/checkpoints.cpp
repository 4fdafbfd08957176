#include "bonfire/checkpoint/checkpoints.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <random>
#include <thread>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/base/json.h"
#include "bonfire/base/look.h"
#include "bonfire/base/size.h"
#include "bonfire/checkpoint/check_files.h"
#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/pace.h"
#include "bonfire/checkpoint/rank_file.h"
#include "bonfire/comm/cores.h"
#include "bonfire/comm/hear.h"
#include "bonfire/comm/progress.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

// How often a rank that waits for others' files asks itself whether it still should: for so long it stays where it fails.
constexpr auto kRound = std::chrono::seconds(1);

// What rank 0 says of a save.
constexpr std::uint8_t taken = 1, skipped = 0;

constexpr const char* doing = "checkpoint";  // as ProgressBoard::Busy says it

// What an error says, in one line: torch adds where it was thrown.
std::string words_of(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  const std::string words = torch ? torch->what_without_backtrace() : error.what();
  return words.substr(0, words.find('\n'));
}

std::string new_mark() {
  std::random_device device;
  return fmt::format("{:08x}", device());
}

std::vector<Slice> slices_of(const std::vector<Sliced*>& tensors) {
  std::vector<Slice> slices;
  for (auto* const sliced : tensors)
    for (auto& slice : sliced->slices()) slices.push_back(std::move(slice));
  return slices;
}

// Where no core is free, what a writing thread uses is missing to training.
double share_beside_training(const World& world) {
  constexpr double least = 0.01;
  const int busy = world.device().is_cpu() ? at::get_num_threads() : 1;
  return usable_cores() > world.local_size() * busy ? 1 : least;
}

// Ranks of several nodes that have a folder each of the same name would each save a part that nobody can put together.
void require_shared_folder(const World& world, const fs::path& folder, const std::string& mark) {
  const fs::path probe = folder / fmt::format("{}{}.part", probe_prefix, mark);
  do_or_fail_together(world.group(), [&] {
    if (world.rank() != 0) return;
    std::error_code refused;
    fs::create_directories(folder, refused);
    if (refused) fail_config("'{}': the folder for checkpoints cannot be made: {}", folder.string(), refused.message());
    // What is on the disk is lost with a name that is not: this folder's, and that of the one around it, which may be new.
    flush_folder(folder);
    flush_folder(folder.parent_path());
    remove_unfinished_checkpoints(folder);
    write_file(probe, mark, Survives::process);
  });
  do_or_fail_together(world.group(), [&] {
    if (!is_there(probe))
      fail_config(
          "'{}': rank {} (node {}) does not see what rank 0 writes there; allowed: a folder on a file system that "
          "all nodes share",
          folder.string(), world.rank(), world.node());
  });
  std::error_code none;  // what stays, the next run removes
  if (world.rank() == 0) fs::remove(probe, none);
}

}  // namespace

struct Checkpoints::Save {
  std::int64_t step = 0;
  std::int64_t number = 0;      // of this run's saves
  bool may_be_skipped = false;  // rank 0 says whether it is
  std::vector<OwnPiece> pieces{};
  std::string problem{};  // why this rank's pieces are not there
  std::map<std::string, State> states{};
};

struct Checkpoints::Self {
  World world;
  fs::path folder;
  CheckpointOptions options;
  std::string mark;                         // of this run's unfinished checkpoints, and of its keys in the store
  c10::intrusive_ptr<c10d::Store> store{};  // the writing thread's own, which waits in it
  int exceptions = std::uncaught_exceptions();
  std::int64_t saves = 0;
  std::deque<Save> announced{};              // that this rank has not contributed to
  std::optional<std::int64_t> step_begun{};  // the last that it has, where a thread writes that

  Pace pace{options.share > 0 ? options.share : share_beside_training(world)};
  CopyMemory copy{.pinned = !world.device().is_cpu()};  // kept: to ask for it anew takes about as long as to fill it
  std::thread writer{};
  std::atomic<bool> written{true}, given_up{false};
  std::string problem{};                       // of the last save; the writer's until it has ended
  std::optional<std::int64_t> step_written{};  // the same
  std::optional<std::int64_t> last_saved{};

  std::string key(const Save& save, const char* what) const {
    return fmt::format("checkpoint/{}/{}/{}", mark, save.number, what);
  }
  void set(const std::string& name, const std::string& text) {
    store->set(name, std::vector<std::uint8_t>(text.begin(), text.end()));
  }
  // Waits for as long as somebody may still set it.
  std::string get(const std::string& name) {
    while (true) try {
        store->wait({name}, kRound);
        const auto bytes = store->get(name);
        return {bytes.begin(), bytes.end()};
      } catch (const std::exception&) {
        if (given_up) throw;
        if (!store->check({name})) continue;
        throw;
      }
  }
};

Checkpoints::Checkpoints(const World& world, fs::path folder, CheckpointOptions options) {
  if (!(options.share >= 0 && options.share <= 1)) fail_config("share is {}; allowed: 0 to 1, of a core", options.share);
  if (options.keep < 0) fail_config("keep is {}; allowed: 1 and more, or 0 for all checkpoints", options.keep);
  const auto mark = hear(world.group(), new_mark(), 0, world.device());
  require_shared_folder(world, folder, mark);
  self_.reset(new Self{.world = world, .folder = std::move(folder), .options = std::move(options), .mark = mark});
  self_->store = world.store().clone();
}

Checkpoints::~Checkpoints() {
  // Where this rank fails, the others may never say that they have written.
  if (std::uncaught_exceptions() > self_->exceptions) self_->given_up = true;
  self_->pace.hurry();
  if (self_->writer.joinable()) self_->writer.join();
}

std::optional<std::int64_t> Checkpoints::last_saved() const { return self_->last_saved; }

// Every rank writes its own part; rank 0 makes a checkpoint of them. Returns what went wrong, the same on all ranks.
std::string Checkpoints::write_together(const Save& save) {
  auto& own = *self_;
  const int rank = own.world.rank(), ranks = own.world.size();
  const Nanoseconds begin = now_ns();
  const fs::path unfinished = unfinished_checkpoint(own.folder, save.step, own.mark);
  try {
    if (!save.problem.empty()) fail("{}", save.problem);
    fs::create_directories(unfinished);
    write_rank_file(unfinished, rank, save.pieces, [&] { own.pace.keep(); });
  } catch (const std::exception& error) {
    own.set(own.key(save, "problem"), fmt::format("rank {}: {}", rank, words_of(error)));
  }
  if (own.store->add(own.key(save, "written"), 1) == ranks) own.set(own.key(save, "all"), "written");
  if (rank != 0) return own.get(own.key(save, "outcome"));

  std::string problem;
  try {
    own.get(own.key(save, "all"));
    if (own.store->check({own.key(save, "problem")}))
      problem = own.get(own.key(save, "problem"));
    else
      finish_together(save, unfinished, begin);
  } catch (const std::exception& error) {
    problem = words_of(error);
  }
  if (!problem.empty()) {
    std::error_code none;
    fs::remove_all(unfinished, none);
  }
  own.set(own.key(save, "outcome"), problem);
  return problem;
}

// Rank 0, when all have written.
void Checkpoints::finish_together(const Save& save, const fs::path& unfinished, Nanoseconds begin) {
  auto& own = *self_;
  std::vector<std::vector<ManifestTensor>> of_ranks;
  for (int rank = 0; rank < own.world.size(); ++rank) {
    const fs::path pieces = unfinished / rank_pieces_name(rank);
    of_ranks.push_back(parse_pieces(InputFile(pieces.string()).text(most_json_bytes), pieces.string()));
    fs::remove(pieces);
  }
  const Manifest manifest{.step = save.step,
                          .configuration = own.options.configuration,
                          .states = save.states,
                          .tensors = merge_pieces(of_ranks)};
  write_file(unfinished / manifest_name, to_json(manifest));
  const auto [finished, replaced] = finish_checkpoint(unfinished, save.step);
  // It is complete: nothing may fail from here on that would call it lost.
  std::int64_t bytes = 0;
  for (const auto& tensor : manifest.tensors)
    for (const auto& piece : tensor.pieces) bytes += piece.piece.count * bytes_of(tensor.type);
  own.world.log().info("step {}: saved in {} ({} in {})", save.step, finished.string(), format_bytes(bytes),
                       format_seconds(static_cast<double>(now_ns() - begin) * 1e-9));
  try {
    if (!replaced.empty()) fs::remove_all(replaced);
    remove_old_checkpoints(own.folder, own.options.keep, finished);
  } catch (const std::exception& error) {
    own.world.log().warning("old checkpoints stay: {}", error.what());
  }
}

void Checkpoints::write(const Save& save) {
  auto& own = *self_;
  try {
    own.problem = write_together(save);
  } catch (const std::exception& error) {
    own.problem = error.what();  // the store is gone
  }
  if (own.problem.empty())
    own.step_written = save.step;
  else if (own.world.rank() == 0)
    own.world.log().warning("step {} could not be saved; {}: {}", save.step,
                            own.step_written ? fmt::format("the last checkpoint is of step {}", *own.step_written)
                                             : std::string("no step of this run has been saved yet"),
                            own.problem);
  own.written = true;
}

// The last save has ended.
void Checkpoints::conclude() {
  auto& own = *self_;
  own.pace.hurry();
  if (own.writer.joinable()) own.writer.join();
  own.last_saved = own.step_written;
  if (const auto problem = std::exchange(own.problem, {}); !problem.empty() && own.options.failed == WhenFailed::stop)
    fail("a checkpoint could not be saved: {}", problem);
}

// Ranks may come here at different times: whether the save is skipped is what rank 0 sees when it does.
void Checkpoints::announce(std::int64_t step, const std::map<std::string, Stateful*>& states, WhenBusy when_busy) {
  auto& own = *self_;
  Save save{.step = step, .number = ++own.saves, .may_be_skipped = when_busy == WhenBusy::skip};
  if (save.may_be_skipped && own.world.rank() == 0) {
    const bool busy = !own.written || !own.announced.empty();
    if (busy) own.world.log().warning("step {} is not saved: the checkpoint before is still being written", step);
    own.world.store().set(own.key(save, "taken"), std::vector<std::uint8_t>{busy ? skipped : taken});
  }
  for (const auto& [name, state] : states) save.states.emplace(name, state->save());
  own.announced.push_back(std::move(save));
}

void Checkpoints::announce(std::int64_t step, const std::map<std::string, Stateful*>& states) {
  announce(step, states, self_->options.busy);
}

bool Checkpoints::contribute(std::int64_t step, const std::vector<Sliced*>& tensors) {
  const auto& announced = self_->announced;
  require(!announced.empty() && announced.front().step == step, "a contribution to a save of step {}, and {}", step,
          announced.empty() ? std::string("no save was announced")
                            : fmt::format("the next that was announced is of step {}", announced.front().step));
  const bool begun = contribute(tensors, From::copy);
  // A rank that comes to the next save waits for the writing threads of others, which do not hear of it.
  self_->pace.hurry();
  return begun;
}

bool Checkpoints::contribute(const std::vector<Sliced*>& tensors, From from) {
  auto& own = *self_;
  // It may take as long as it takes: no watchdog calls this rank late.
  const ProgressBoard::Busy busy(own.world.progress().get(), doing);
  Save save = std::move(own.announced.front());
  own.announced.pop_front();
  // Not through the writer's store, in which it may be waiting.
  if (save.may_be_skipped && own.world.store().get(own.key(save, "taken")).at(0) == skipped) return false;
  conclude();
  save.pieces = own_pieces(slices_of(tensors));
  if (from == From::tensors) {
    write(save);
    conclude();
    return true;
  }
  try {
    save.pieces = copied(save.pieces, own.copy);
  } catch (const std::exception& error) {
    // No memory for the copy: a save that fails, and the others are told.
    save.problem = words_of(error);
    save.pieces.clear();
  }
  own.step_begun = save.step;
  own.written = false;
  own.pace.begin();
  // With the priority of the others: whoever waits for it could not give it back, and on a busy machine would wait long.
  own.writer = std::thread([this, save = std::move(save)] { write(save); });
  return true;
}

// If this rank has contributed to a later one, this one had ended.
void Checkpoints::join(std::int64_t step) {
  if (self_->options.asynchronous || self_->step_begun != step) return;
  const ProgressBoard::Busy busy(self_->world.progress().get(), doing);
  conclude();
}

void Checkpoints::require_none_announced() const {
  if (const auto& announced = self_->announced; !announced.empty())
    fail("a save of step {} was announced, and this rank has not contributed to it", announced.front().step);
}

bool Checkpoints::begin(std::int64_t step, const CheckpointContents& contents, From from) {
  require_none_announced();
  announce(step, contents.states, from == From::copy ? self_->options.busy : WhenBusy::wait);
  return contribute(contents.tensors, from);
}

bool Checkpoints::save(std::int64_t step, const CheckpointContents& contents) {
  return begin(step, contents, self_->options.asynchronous ? From::copy : From::tensors);
}

void Checkpoints::save_now(std::int64_t step, const CheckpointContents& contents) { begin(step, contents, From::tensors); }

void Checkpoints::finish() {
  require_none_announced();
  const ProgressBoard::Busy busy(self_->world.progress().get(), doing);
  conclude();
}

namespace {

// What the first rank says that found something broken; nothing where none did. Another error is thrown on all. Collective.
std::optional<std::string> broken(const World& world, const std::function<void()>& look) {
  std::string said;
  do_or_fail_together(world.group(), [&] {
    try {
      look();
    } catch (const BrokenCheckpoint& error) {
      said = error.what();
    }
  });
  const int ranks = world.size();
  const int before_end = static_cast<int>(world.group().max(said.empty() ? 0 : ranks - world.rank()));
  if (before_end == 0) return std::nullopt;
  return hear(world.group(), said, ranks - before_end, world.device());
}

struct Loaded {
  std::int64_t step = 0;
  std::optional<std::string> problem{};
};

Loaded load(const World& world, const fs::path& checkpoint, const CheckpointContents& contents,
            const LoadSelection& selection) {
  const ProgressBoard::Busy busy(world.progress().get(), doing);
  Loaded loaded;
  Manifest manifest;
  loaded.problem = broken(world, [&] { manifest = read_manifest(checkpoint); });
  if (loaded.problem) return loaded;
  loaded.step = manifest.step;
  const auto slices = slices_of(contents.tensors);
  require_same_tensors(manifest, slices, selection, world.group());
  do_or_fail_together(world.group(), [&] {
    for (const auto& [name, state] : contents.states)
      if (!manifest.states.contains(name))
        fail_config("'{}': has no state '{}'", (checkpoint / manifest_name).string(), name);
  });
  // Each file is looked at by one rank, before anybody's values change.
  loaded.problem = broken(world, [&] { check_files(checkpoint, manifest, {.first = world.rank(), .every = world.size()}); });
  if (loaded.problem) return loaded;
  loaded.problem = broken(world, [&] { load_slices(checkpoint, manifest, slices, selection); });
  for (auto* const sliced : contents.tensors) sliced->slices_written();
  if (loaded.problem) return loaded;
  do_or_fail_together(world.group(), [&] {
    for (const auto& [name, state] : contents.states) state->load(manifest.states.at(name));
  });
  return loaded;
}

}  // namespace

std::optional<std::int64_t> Checkpoints::load_latest(const CheckpointContents& contents) {
  auto& own = *self_;
  finish();
  // Rank 0's list is everybody's.
  std::string names;
  do_or_fail_together(own.world.group(), [&] {
    if (own.world.rank() != 0) return;
    for (const auto& path : complete_checkpoints(own.folder)) names += path.filename().string() + "\n";
  });
  names = hear(own.world.group(), names, 0, own.world.device());
  std::string problems;
  for (std::size_t at = 0; at < names.size();) {
    const auto end = names.find('\n', at);
    const fs::path checkpoint = own.folder / names.substr(at, end - at);
    at = end + 1;
    const auto loaded = load(own.world, checkpoint, contents, {});
    if (!loaded.problem) {
      own.last_saved = own.step_written = loaded.step;
      return loaded.step;
    }
    if (own.world.rank() == 0)
      own.world.log().warning("{} is broken, and the one before it is tried: {}", checkpoint.string(), *loaded.problem);
    problems += fmt::format("{}{}", problems.empty() ? "" : "; ", *loaded.problem);
  }
  if (!problems.empty()) fail_config("'{}': none of its checkpoints can be loaded: {}", own.folder.string(), problems);
  return std::nullopt;
}

std::int64_t load_checkpoint(const World& world, const fs::path& checkpoint, const CheckpointContents& contents,
                             const LoadSelection& selection) {
  const auto loaded = load(world, checkpoint, contents, selection);
  if (loaded.problem) fail_config("{}", *loaded.problem);
  return loaded.step;
}

}  // namespace bonfire
