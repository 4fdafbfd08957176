#include <future>
#include <utility>

#include <ATen/ops/tensor.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/engine_state.h"

// Ranks that run out of data before the others: what the others tell them, and how they take part.
namespace bonfire {

Engine::State::Announcement Engine::State::announce(double first, double second) const {
  auto values = at::tensor({first, second}, at::kDouble).to(pool.device());
  auto work = mesh.group(Axis::data).all_reduce(values);
  return {std::move(values), std::move(work)};
}

std::pair<double, double> Engine::State::Announcement::heard() {
  work.wait();
  const auto on_host = values.cpu();
  return {on_host[0].item<double>(), on_host[1].item<double>()};
}

// Those that wait in Engine::finish have to gather with this rank before it gets to its backward.
void Engine::State::announce_pass(bool differentiates) {
  if (options.uneven_inputs && settings.comes_and_goes() && !joining) announce(differentiates, !differentiates).heard();
}

void Engine::State::announce_backward(bool is_last) {
  active = mesh.group(Axis::data).size();
  const bool communicates = is_last || settings.reduces_every_microbatch() || settings.comes_and_goes();
  if (options.uneven_inputs && communicates) active = announce(1, is_last).heard().first;
}

// One backward of the others. False: all ranks have run out of data.
bool Engine::State::join_others() {
  if (settings.comes_and_goes()) {
    const auto [training, evaluating] = announce(0, 0).heard();
    if (training + evaluating == 0) return false;
    require(training == 0 || evaluating == 0, "{} ranks train while {} evaluate, and parameters are sharded among them",
            training, evaluating);
    if (evaluating > 0) {
      residency->begin_pass(false);
      residency->end_pass();
      return true;
    }
  }
  auto backward = announce(0, 0);
  // The others wait now for gathers, now for reductions: here neither may wait for the other.
  SideStream beside(pool.device());
  beside.run([] {});
  std::future<void> gathers;
  if (settings.comes_and_goes())
    gathers = std::async(std::launch::async, [&] {
      beside.run_apart([&] {
        residency->begin_backward(false);
        residency->end_pass();
      });
    });
  const auto [differentiating, ending] = backward.heard();
  active = differentiating;
  if (active > 0) {
    begin_backward(ending > 0);
    running = false;
    if (reducing) reducer->end();
  }
  if (gathers.valid()) gathers.get();
  beside.join();
  if (active > 0) end_step();
  return active > 0;
}

void Engine::finish(const std::function<void()>& step) {
  auto& state = *state_;
  require(state.options.uneven_inputs, "Engine::finish needs the option uneven_inputs, so that the other ranks expect it");
  state.joining = true;
  state.gradients = State::Gradients::spent;
  while (state.join_others()) {
    if (state.gradients != State::Gradients::whole) continue;
    state.scale_gradients();
    step();
    state.gradients = State::Gradients::spent;
  }
  state.joining = false;
}

}  // namespace bonfire
