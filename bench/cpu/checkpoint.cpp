// State of a given size, divided over the ranks, saved and loaded: how long that takes without training.
//
//   bonfire launch -n 2 -- bench_checkpoint --folder DIR --mode save|load [--bytes 2147483648]
// prints one JSON object: the seconds of the slowest rank, from before the call to after it. What is saved is parameters and
// two numbers of optimizer state for each, in tensors of 64 MiB. `load` compares what it reads with what was saved.
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/bonfire.h"

namespace {

using namespace bonfire;

constexpr std::int64_t tensor_elements = std::int64_t{16} << 20;

// This rank's part of each tensor.
class Divided final : public Sliced {
 public:
  Divided(const World& world, std::int64_t bytes) {
    const std::int64_t tensors = std::max<std::int64_t>(1, bytes / (4 * tensor_elements));
    const std::int64_t each = bytes / (4 * tensors);
    for (std::int64_t at = 0; at < tensors; ++at) {
      Slice slice;
      slice.name = fmt::format("blocks.{}.weight", at / 3);
      slice.kind = std::vector{"value", "exp_avg", "exp_avg_sq"}[static_cast<std::size_t>(at % 3)];
      slice.shape = {each};
      slice.box = whole_box(slice.shape);
      slice.begin = each * world.rank() / world.size();
      slice.length = each * (world.rank() + 1) / world.size() - slice.begin;
      slices_.push_back(std::move(slice));
    }
  }
  // Numbers that no disk can shorten much.
  void fill() {
    for (std::size_t at = 0; at < slices_.size(); ++at) keep(at, expected(at));
  }
  void clear() {
    for (std::size_t at = 0; at < slices_.size(); ++at) keep(at, at::zeros({slices_[at].length}));
  }
  void require_filled() const {
    for (std::size_t at = 0; at < slices_.size(); ++at)
      require(values_[at].equal(expected(at)), "what was loaded is not what was saved");
  }
  std::vector<Slice> slices() override { return slices_; }
  void slices_written() override {}

 private:
  at::Tensor expected(std::size_t at) const {
    const auto& slice = slices_[at];
    return at::arange(slice.begin, slice.begin + slice.length, at::kFloat)
        .mul_(0.6180339887)
        .add_(static_cast<double>(at))
        .sin_();
  }
  void keep(std::size_t at, at::Tensor values) {
    values_.resize(slices_.size());
    slices_[at].get = getter(values);
    slices_[at].set = setter(values);
    values_[at] = std::move(values);
  }

  std::vector<Slice> slices_;
  std::vector<at::Tensor> values_;
};

}  // namespace

int main(int argc, char** argv) {
  std::string folder, mode;
  std::int64_t bytes = std::int64_t{2} << 30;
  CLI::App arguments;
  arguments.add_option("--folder", folder)->required();
  arguments.add_option("--mode", mode)->required();
  arguments.add_option("--bytes", bytes);
  CLI11_PARSE(arguments, argc, argv);
  return launch(argc, argv, [&](World& world) {
    at::set_num_threads(1);
    Divided state(world, bytes);
    Checkpoints checkpoints(world, folder, {.keep = 1});
    const bool saves = mode == "save";
    saves ? state.fill() : state.clear();
    world.group().barrier().wait();
    const Nanoseconds begin = now_ns();
    if (saves)
      checkpoints.save_now(1, {.tensors = {&state}});
    else
      require(checkpoints.load_latest({.tensors = {&state}}) == 1, "'{}' has no checkpoint", folder);
    const double seconds = world.group().max(static_cast<double>(now_ns() - begin) * 1e-9);
    require(!saves || checkpoints.last_saved() == 1, "nothing was saved");
    if (!saves) state.require_filled();
    if (world.rank() == 0) fmt::print("{{\"seconds\": {}, \"bytes\": {}}}\n", seconds, bytes);
  });
}
