#include "bonfire/shard/engine.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "bonfire/base/error.h"
#include "bonfire/shard/engine_state.h"
#include "bonfire/shard/equality.h"
#include "bonfire/shard/guards.h"
#include "bonfire/shard/schedule_driver.h"

namespace bonfire {
namespace {

std::unique_ptr<Driver> make_driver(FlatGroup& flats, torch::nn::Module& module) {
  if (flats.settings().driver == DrivenBy::schedule) return std::make_unique<ScheduleDriver>(flats, module);
  return std::make_unique<SeamDriver>(flats, module);
}

}  // namespace

Engine::State::State(ShardSettings asked, torch::nn::Module& module, std::shared_ptr<EngineMemory> memory)
    : settings(std::move(asked)),
      flats(settings, module,
            {.memory = std::move(memory),
             // Engines of other stages share the ranks.
             .reduces_too = settings.driver == DrivenBy::schedule}),
      driver(make_driver(flats, module)) {
  flats.begin(*driver);
}

Engine::State::~State() {
  const auto& parameters = flats.layout().parameters();
  const bool any = std::any_of(parameters.begin(), parameters.end(), [](const auto& one) { return one.trained; });
  const bool whole = flats.gradients() == Gradients::whole, partial = flats.gradients() == Gradients::partial;
  if (!any || !(partial || (whole && !settings.gradients_readable()))) return;
  if (std::uncaught_exceptions() > 0 || settings.groups.all.rank() > 0) return;
  if (settings.gradients_readable())
    settings.options.log.warning(
        "the gradients of the last Engine::accumulate were not used: call Engine::backward for the last microbatch of a "
        "step");
  else
    settings.options.log.warning("the gradients of the last Engine::{} were not used: with {} sharded, {}{}",
                                 whole ? "backward" : "accumulate", plan::name_of(settings.options.what),
                                 whole ? "" : "call Engine::backward for the last microbatch of a step, and ",
                                 use_our_optimizers);
}

SeamDriver& Engine::State::seams() {
  auto* seams = dynamic_cast<SeamDriver*>(driver.get());
  require(seams, "Engine::backward of a pipeline's stage: its schedule runs forward and backward; call Pipeline::step");
  return *seams;
}

Engine::Engine(const DataGroups& groups, torch::nn::Module& module, ShardOptions options)
    : Engine(std::make_shared<State>(ShardSettings(groups, std::move(options)), module)) {}
Engine::~Engine() = default;
Engine::Engine(Engine&& other) noexcept = default;
Engine& Engine::operator=(Engine&& other) noexcept = default;

void Engine::accumulate(const at::Tensor& loss, const BackwardOptions& how) { run_backward({this}, loss, false, how); }
void Engine::backward(const at::Tensor& loss, const BackwardOptions& how) { run_backward({this}, loss, true, how); }

void Engine::run_backward(const std::vector<Engine*>& engines, const at::Tensor& loss, bool last,
                          const BackwardOptions& how) {
  require(!engines.empty(), "backward() got no engines; pass every engine whose module ran");
  std::vector<SeamDriver*> drivers;
  for (auto engine = engines.rbegin(); engine != engines.rend(); ++engine) {
    require(std::count(engines.begin(), engines.end(), *engine) == 1,
            "a backward of several engines names one of them twice");
    require(engines.size() == 1 || !(*engine)->options().uneven_inputs,
            "a backward of several engines, one of them with uneven_inputs: a rank that has run out of data takes part in "
            "the backwards of one engine; allowed: one of the two");
    drivers.push_back(&(*engine)->state_->seams());
  }
  SeamDriver::backward(drivers, loss, last, how);
}

void backward(const std::vector<Engine*>& engines, const at::Tensor& loss, const BackwardOptions& how) {
  Engine::run_backward(engines, loss, true, how);
}
void accumulate(const std::vector<Engine*>& engines, const at::Tensor& loss, const BackwardOptions& how) {
  Engine::run_backward(engines, loss, false, how);
}

void Engine::finish(const std::function<void()>& step) {
  require(state_->settings.options.uneven_inputs,
          "Engine::finish needs the option uneven_inputs, so that the other ranks expect it");
  state_->seams().finish(step);
}

void Engine::require_gradients() const { state_->flats.require_gradients(); }
void Engine::spend_gradients(const GradientUse& use) { state_->flats.spend_gradients(use); }
void Engine::updated(std::size_t flat) { state_->flats.updated(flat); }
void Engine::finish_update() { state_->flats.finish_update(); }

void Engine::forget_uses() {
  state_->flats.pool().forget_uses();
  state_->flats.reducer().pool().forget_uses();
}

void Engine::abandon_step() {
  state_->flats.forget();
  forget_uses();
}

void Engine::release() {
  state_->driver->meet();
  for (const auto& flat : flats()) {
    flat->require_intact();
    require(!flat->pinned(), "Engine::release inside of Engine::full_parameters: end that scope first");
  }
  state_->flats.layout().release(state_->flats.gradients() == Gradients::whole);
  state_.reset();
  end();
}

void Engine::check_equal() const {
  state_->driver->meet();
  std::vector<NamedTensor> held;
  for (const auto& flat : flats())
    for (const auto& segment : flat->layout().segments) {
      const auto& region = flat->layout().regions[segment.region];
      const Share kept = share_of(region, factors().parameters, groups().shards.rank());
      const auto begin = std::max(segment.offset, kept.begin);
      const auto end = std::min(segment.offset + segment.elements, kept.begin + kept.length);
      if (begin < end) held.push_back({segment.name, flat->held(segment.region).narrow(0, begin - kept.begin, end - begin)});
    }
  require_same_values(state_->settings.copies(), held);
}

const DataGroups& Engine::groups() const { return state_->settings.groups; }
const ShardOptions& Engine::options() const { return state_->settings.options; }
const plan::Factors& Engine::factors() const { return state_->settings.factors; }
std::vector<std::unique_ptr<FlatParameter>>& Engine::flats() { return state_->flats.flats(); }
const std::vector<std::unique_ptr<FlatParameter>>& Engine::flats() const { return state_->flats.flats(); }
std::int64_t Engine::layout_version() const { return state_->flats.layout().version(); }
double Engine::host_seconds() const { return static_cast<double>(state_->flats.host().total()) * 1e-9; }
std::int64_t Engine::pool_bytes() const { return state_->flats.pool().bytes() + state_->flats.reducer().pool().bytes(); }

Engine shard(const DataGroups& groups, torch::nn::Module& module, ShardOptions options) {
  return Engine(groups, module, std::move(options));
}

}  // namespace bonfire
