#include "bonfire/base/error.h"
#include "bonfire/shard/engine_state.h"

// An engine whose module is run by a schedule: the same state, taken through a step from outside.
namespace bonfire {

void Engine::begin_step() { state_->follow_freezing(); }

void Engine::unshard() {
  for (std::size_t at = 0; at < state_->flats.size(); ++at) {
    state_->flats[at]->require_intact();
    state_->flats[at]->bring_in(
        state_->pool, {.group = state_->mesh.gathers(), .place = state_->first_place + static_cast<std::int64_t>(at)});
  }
}

void Engine::await_parameters() {
  for (auto& flat : state_->flats) flat->await();
}

void Engine::reshard() {
  for (auto& flat : state_->flats) flat->let_go();
}

void Engine::begin_gradients(const GradientPass& pass) {
  require(state_->options.driven, "Engine::begin_gradients is for a module that a schedule runs (driven)");
  state_->begin_backward(pass);
}

void Engine::end_gradients() {
  auto& state = *state_;
  state.running = false;
  if (!state.reducing) return;
  // Nothing comes any more, also for parameters that were not used.
  state.missing.assign(state.flats.size(), 0);
  state.launch_ready();
}

void Engine::finish_gradients() {
  auto& state = *state_;
  if (state.gradients == State::Gradients::whole) return;
  if (state.residency) state.residency->end_pass();
  state.reducer->end();
  // Also where no gradient came, because everything is frozen.
  state.last = true;
  state.end_step();
}

void Engine::abandon_gradients(const std::string& why) { state_->abandon_backward(why); }

}  // namespace bonfire
