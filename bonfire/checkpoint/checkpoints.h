#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"
#include "bonfire/base/stateful.h"
#include "bonfire/checkpoint/load.h"
#include "bonfire/comm/world.h"
#include "bonfire/shard/slices.h"

namespace bonfire {

// What a checkpoint holds of a program: engines, pipelines and optimizers, and by name whatever else has a state, which is
// the same on all ranks.
struct CheckpointContents {
  std::vector<Sliced*> tensors{};
  std::map<std::string, Stateful*> states{};
};

enum class WhenBusy { wait, skip };
enum class WhenFailed { warn, stop };

struct CheckpointOptions {
  int keep = 2;                    // checkpoints that are kept; 0: all
  bool asynchronous = true;        // save() copies to host memory and returns; a thread writes
  WhenBusy busy = WhenBusy::wait;  // where a save comes while another is being written
  // How much of a core each rank's writing thread uses until it is waited for; 0: a hundredth where training keeps all cores
  // of this machine busy, all of one elsewhere.
  double share = 0;
  WhenFailed failed = WhenFailed::warn;  // where a save could not be written: the run goes on, or save() and finish() throw
  std::string configuration{};           // kept with them, for those who read them
};

// The checkpoints of a run, in a folder that all ranks see: each rank writes and reads its own part. What one layout has
// saved any other can load.
//
//   bonfire::Checkpoints checkpoints(world, "checkpoints");
//   const bonfire::CheckpointContents contents{.tensors = {&engine, &optimizer}, .states = {{"loader", &loader}}};
//   for (auto step = checkpoints.load_latest(contents).value_or(0) + 1; step <= steps; ++step) {
//     ...
//     if (step % 100 == 0) checkpoints.save(step, contents);
//   }
class BONFIRE_API Checkpoints {
 public:
  // Makes the folder. Throws ConfigError where some ranks have another folder of this name. Collective.
  Checkpoints(const World& world, std::filesystem::path folder, CheckpointOptions options = {});
  ~Checkpoints();  // waits for what is being written, as finish() does, and says what went wrong
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  // Saves what is there now, after `step` steps. False where it was skipped. Collective.
  bool save(std::int64_t step, const CheckpointContents& contents);
  // The same in three parts, where ranks come to the same step at different times. All ranks go through the same steps, in
  // the same order, and the checkpoint is complete when the last has contributed and all have written.
  // What it has besides tensors is as it is now. Waits for nobody.
  void announce(std::int64_t step, const std::map<std::string, Stateful*>& states);
  // This rank's tensors are as they are now: they are copied, and written by a thread. Waits only where the save before is
  // still being written (WhenBusy::wait). False where it was skipped.
  bool contribute(std::int64_t step, const std::vector<Sliced*>& tensors);
  // Where saves are not asynchronous, waits until that of this step is complete. REQUIRES: all ranks have contributed, or
  // will without waiting for this one.
  void join(std::int64_t step);
  // The same, and it is complete when this returns, without a copy in memory. Collective.
  void save_now(std::int64_t step, const CheckpointContents& contents);
  // Waits for what is being written. Collective.
  void finish();
  // The step of the last save that is known to be complete; nothing before one is.
  std::optional<std::int64_t> last_saved() const;

  // Loads the newest checkpoint, or, where that is broken, the newest that is not, and says so. Returns its step; nothing
  // where there is none at all. Throws ConfigError where all are broken, or not of these contents. Collective.
  std::optional<std::int64_t> load_latest(const CheckpointContents& contents);

 private:
  struct Save;
  enum class From { copy, tensors };
  bool begin(std::int64_t step, const CheckpointContents& contents, From from);
  void announce(std::int64_t step, const std::map<std::string, Stateful*>& states, WhenBusy when_busy);
  bool contribute(const std::vector<Sliced*>& tensors, From from);
  void require_none_announced() const;
  void write(const Save& save);
  std::string write_together(const Save& save);
  void finish_together(const Save& save, const std::filesystem::path& unfinished, Nanoseconds begin);
  void conclude();

  struct Self;
  std::unique_ptr<Self> self_;
};

// Loads a checkpoint's folder. Returns its step. Collective.
BONFIRE_API std::int64_t load_checkpoint(const World& world, const std::filesystem::path& checkpoint,
                                         const CheckpointContents& contents, const LoadSelection& selection = {});

}  // namespace bonfire
