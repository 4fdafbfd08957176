#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "bonfire/base/clock.h"
#include "bonfire/checkpoint/base_weights.h"
#include "bonfire/checkpoint/checkpoints.h"
#include "bonfire/train/build.h"
#include "bonfire/train/loop.h"
#include "bonfire/train/report.h"

namespace bonfire {

// Saves a run as [checkpoint] says, and loads it.
class Saving {
 public:
  // Collective.
  Saving(Run& run, const TrainOptions& options);

  // What the options say about going on. Returns the last step that was taken; 0: none. Where the run may go back
  // (train.nan_policy = rollback), there is a checkpoint to go back to from then on. Collective.
  std::int64_t resume();
  // Whether it is saved after this step, and whether all ranks must have come there then.
  bool due(std::int64_t step) const;
  bool drains(std::int64_t step) const { return due(step) && !overlaps(step); }
  // A step begins, with its samples.
  void begin_step(std::int64_t step);
  // A step that is due has ended. Collective.
  void save(std::int64_t step);
  // The same, unless that has been done, and it is on the disk when this returns: nothing comes after it. Collective.
  void save_last(std::int64_t step);
  // The newest checkpoint again, because step `from` was not finite. Returns its step. Throws Error where nothing has been
  // saved, and where the run has gone back before and come no further than that. Collective.
  std::int64_t go_back(std::int64_t from);
  // The folder of the last checkpoint that is complete; empty: none. Collective.
  std::string finish();
  // Those of a run that goes on: not the last one.
  const TrainReport::Saves& saves() const { return saves_; }

 private:
  // Whether each rank saves after this step when it comes there, while others are elsewhere (checkpoint.drain = false).
  bool overlaps(std::int64_t step) const;
  void contribute(std::int64_t step);
  void count(bool saved, Nanoseconds begin);
  CheckpointContents contents();
  std::int64_t begin();
  void begin_with_base();

  Run& run_;
  const TrainOptions& options_;
  std::filesystem::path folder_;
  class Position;
  std::unique_ptr<Stateful> position_;
  // With adapters: what is saved of the trainee's state, and what they are over. Empty and null otherwise.
  std::vector<std::unique_ptr<Sliced>> selected_;
  std::unique_ptr<BaseWeights> base_;
  std::int64_t went_back_from_ = 0;  // 0: it never has
  TrainReport::Saves saves_;
  std::unique_ptr<Checkpoints> checkpoints_;  // null: nothing is saved, and nothing was to be loaded
};

}  // namespace bonfire
