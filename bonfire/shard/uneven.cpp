#include <future>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/seam_driver.h"

// Ranks that run out of data before the others: what the others tell them, and how they take part.
namespace bonfire {

SeamDriver::Announcement SeamDriver::announce(double first, double second) const {
  auto values = at::tensor({first, second}, at::kDouble).to(flats_.pool().device());
  auto work = settings().groups.all.all_reduce(values);
  return {std::move(values), std::move(work)};
}

std::pair<double, double> SeamDriver::Announcement::heard() {
  work.wait();
  const auto on_host = values.cpu();
  return {on_host[0].item<double>(), on_host[1].item<double>()};
}

// Those that wait in Engine::finish have to gather with this rank before it gets to its backward.
void SeamDriver::announce_pass(bool differentiates) {
  if (settings().options.uneven_inputs && !joining_) announce(differentiates, !differentiates).heard();
}

void SeamDriver::announce_backward(bool last) {
  active_ = settings().groups.all.size();
  const bool communicates = last || settings().reduces_every_microbatch() || residency();
  if (settings().options.uneven_inputs && communicates) active_ = announce(1, last).heard().first;
}

void SeamDriver::scale_gradients() {
  const double factor = settings().groups.all.size() / active_;
  if (factor == 1) return;
  const at::NoGradGuard no_grad;
  for (auto& flat : flats_.flats())
    for (auto& share : flat->trained()) share.gradient.mul_(factor);
}

// One backward of the others. False: all ranks have run out of data.
bool SeamDriver::join_others() {
  if (residency()) {
    const auto [training, evaluating] = announce(0, 0).heard();
    if (training + evaluating == 0) return false;
    require(training == 0 || evaluating == 0, "{} ranks train while {} evaluate, and parameters are sharded among them",
            training, evaluating);
    if (evaluating > 0) {
      residency()->begin_pass(false);
      residency()->end_pass();
      return true;
    }
  }
  auto backward = announce(0, 0);
  // The others wait now for gathers, now for reductions: here neither may wait for the other.
  SideStream beside(flats_.pool().device());
  beside.run([] {});
  std::future<void> gathers;
  if (residency())
    gathers = std::async(std::launch::async, [&] {
      beside.run_apart([&] {
        residency()->begin_backward(false);
        residency()->end_pass();
      });
    });
  const auto [differentiating, ending] = backward.heard();
  active_ = differentiating;
  if (active_ > 0) {
    begin_backward(ending > 0);
    flats_.leave_gradients();
    if (flats_.backward().how().reduces) flats_.await_reductions();
  }
  if (gathers.valid()) gathers.get();
  beside.join();
  if (active_ > 0 && flats_.backward().how().last) flats_.end_step();
  return active_ > 0;
}

void SeamDriver::finish(const std::function<void()>& step) {
  joining_ = true;
  flats_.drop_gradients();
  while (join_others()) {
    if (flats_.gradients() != Gradients::whole) continue;
    scale_gradients();
    step();
    flats_.drop_gradients();
  }
  joining_ = false;
}

}  // namespace bonfire
