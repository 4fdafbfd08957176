#include "bonfire/shard/schedule_driver.h"

#include <utility>

#include <torch/nn/module.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/engine_state.h"
#include "bonfire/shard/seam_hooks.h"

namespace bonfire {
namespace {

// A parameter outside of all Units is needed nobody knows when.
void require_units(const ParameterLayout& layout) {
  for (const auto& parameter : layout.parameters())
    if (!layout.groups()[parameter.group].unit)
      fail_config(
          "parameter '{}' of a stage is part of no Unit, and with reshard_after_forward = true Units are gathered one by "
          "one; allowed: declare the module of the stage, or the one that holds it, with BONFIRE_UNIT, or "
          "reshard_after_forward = false",
          parameter.name);
}

}  // namespace

Engine ScheduleDriver::engine(const DataGroups& groups, torch::nn::Module& module, ShardOptions options,
                              std::shared_ptr<EngineMemory> memory) {
  return Engine(std::make_shared<Engine::State>(ShardSettings(groups, std::move(options), DrivenBy::schedule), module,
                                                std::move(memory)));
}

ScheduleDriver& ScheduleDriver::of(Engine& engine) {
  auto* driver = dynamic_cast<ScheduleDriver*>(engine.state_->driver.get());
  require(driver, "this Engine is not driven by a schedule");
  return *driver;
}

ScheduleDriver::ScheduleDriver(FlatGroup& flats, torch::nn::Module& module) : flats_(flats) {
  const auto& settings = flats.settings();
  const auto& precision = settings.options.precision;
  if (precision.outputs) require_marked_root(module);
  if (settings.gathers_units()) require_units(flats.layout());
  // What goes from stage to stage is in the type that they compute in already.
  const bool casts = precision.outputs || precision.keep || settings.options.unit;
  if (casts || settings.gathers_units())
    hooks_ = std::make_unique<SeamHooks>(flats, module, SeamHooks::Options{.casts = casts, .ends_evaluations = false});
}

ScheduleDriver::~ScheduleDriver() = default;

bool ScheduleDriver::units_gather() const { return hooks_ && hooks_->residency(); }

void ScheduleDriver::laid_out() {
  if (hooks_) hooks_->laid_out();
}

void ScheduleDriver::training_changed() {
  if (units_gather()) hooks_->residency()->forget_courses();
}

bool ScheduleDriver::meet() { return units_gather() && hooks_->residency()->meet(); }

bool ScheduleDriver::ranks_differ() const { return units_gather() && hooks_->residency()->ranks_differ(); }

void ScheduleDriver::before_update() {
  if (units_gather()) hooks_->residency()->before_update();
}

void ScheduleDriver::abandon() {
  if (units_gather()) hooks_->residency()->abandon_pass();
}

void ScheduleDriver::begin_step() { flats_.follow_freezing(); }

void ScheduleDriver::unshard(int behind) {
  if (!units_gather()) flats_.unshard(behind);
}

// All that is trained is updated together.
const FlatParameter* ScheduleDriver::any_trained() const {
  for (const auto& flat : flats_.flats())
    if (!flat->trained().empty()) return flat.get();
  return nullptr;
}

std::int64_t ScheduleDriver::generation() const {
  const auto* const flat = any_trained();
  return flat ? flat->generation() : 0;
}

std::int64_t ScheduleDriver::present_generation() const {
  const auto* const flat = any_trained();
  return flat ? flat->present_generation() : 0;
}

void ScheduleDriver::await_parameters() {
  if (!units_gather()) flats_.await();
}

// Ranks may run the Units of a stage in different orders, or leave out some. Where one of them goes on to wait for a
// message, nobody may need its part of a gather any more.
void ScheduleDriver::end_computation() {
  if (units_gather()) hooks_->residency()->end_computation();
}

void ScheduleDriver::reshard() { units_gather() ? hooks_->residency()->abandon_pass() : flats_.reshard(); }

void ScheduleDriver::begin_gradients(const BackwardKind& how) {
  flats_.begin_gradients(how);
  if (!units_gather() || !how.reduces) return;
  // Units that no forward has used are ready: others may be waiting for them.
  for (std::size_t at = 0; at < flats_.flats().size(); ++at)
    if (!hooks_->residency()->expects_backward(*flats_.flats()[at])) flats_.expect_none(at);
  flats_.reduce_ready();
}

void ScheduleDriver::end_gradients() {
  if (units_gather()) hooks_->residency()->end_backward();
  // Before anything of this rank waits for reductions of others.
  end_computation();
  flats_.end_gradients();
}

// Also where no gradient came, because everything is frozen.
void ScheduleDriver::finish_gradients() {
  end_pass();
  if (flats_.gradients() == Gradients::whole) return;
  flats_.await_reductions();
  flats_.end_step();
}

void ScheduleDriver::abandon_gradients(const std::string& why) { flats_.abandon(why); }

void ScheduleDriver::end_evaluation() { end_pass(); }

void ScheduleDriver::end_pass() {
  if (units_gather() && hooks_->residency()->pass_under_way()) hooks_->residency()->end_pass();
}

}  // namespace bonfire
