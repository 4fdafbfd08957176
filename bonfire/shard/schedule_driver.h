#pragma once

#include <memory>
#include <optional>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/shard/backward.h"
#include "bonfire/shard/driver.h"
#include "bonfire/shard/engine.h"

namespace bonfire {

struct EngineMemory;
class FlatGroup;
class SeamHooks;

// Drives a module that a pipeline's schedule runs: the schedule says when its parameters are gathered and freed, and when
// gradients are reduced. With reshard_after_forward the Units of the module gather themselves, and the schedule says only
// when a step begins and ends: from the second step on its gathers run ahead of it.
class BONFIRE_API ScheduleDriver final : public Driver {
 public:
  // An engine with such a driver. `memory`: buffers of this rank that the engines of all modules share which one schedule
  // runs. Collective.
  static Engine engine(const DataGroups& groups, torch::nn::Module& module, ShardOptions options,
                       std::shared_ptr<EngineMemory> memory);
  // That of an engine made by the above, which lives as long as its state does.
  static ScheduleDriver& of(Engine& engine);

  ScheduleDriver(FlatGroup& flats, torch::nn::Module& module);
  ~ScheduleDriver() override;

  // A step begins: what was frozen or thawed since the last one moves. Collective where something was.
  void begin_step();
  // Begins to gather all parameters; nothing where they are always in, or Units gather themselves. `behind`: how many
  // updates ago they were what they are to be, where versions are kept. Collective.
  void unshard(int behind = 0);
  // Whether an update changes anything. Where nothing is trained there is one value, which has no number.
  bool trains() const { return any_trained() != nullptr; }
  // The number of the newest values, and of those that forward and backward read now. See FlatParameter: each update makes
  // the next. 0 where nothing is trained. REQUIRES for the latter: they are there.
  std::int64_t generation() const;
  std::int64_t present_generation() const;
  // Stream: the current one waits until they are there.
  void await_parameters();
  // A forward has ended whose backward is to come. Collective.
  void end_computation();
  void reshard();
  // Between the two, gradients that autograd accumulates are added to those of the step. With `reduces`, all that is to be
  // reduced is on its way at the end. Collective then.
  void begin_gradients(const BackwardKind& how);
  void end_gradients();
  // Waits for the reductions of the step. Collective.
  void finish_gradients();
  // Something threw inside of a step, and said why: its gradients are lost.
  void abandon_gradients(const std::string& why);
  // A forward that nobody differentiates has ended. Collective.
  void end_evaluation();

  void laid_out() override;
  void training_changed() override;
  bool meet() override;
  bool ranks_differ() const override;
  void before_update() override;
  void abandon() override;

 private:
  bool units_gather() const;
  const FlatParameter* any_trained() const;
  void end_pass();

  FlatGroup& flats_;
  std::unique_ptr<SeamHooks> hooks_;  // null: none
};

}  // namespace bonfire
