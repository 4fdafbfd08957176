// What the engine costs on a GPU: forward and backward of a Llama-shaped model in bf16 without an engine, with one, and as
// one of several ranks that hold shares of it; and the host's time in the engine for each Unit of a step.
//
//   bench_engine [--layers 16] [--dim 2048] [--sequence 4096] [--vocab 128256] [--batch 1] [--repeats 10] [--rounds 5]
//   bonfire launch -n 2 -- bench_engine --layers 4 …      (ranks may share a GPU; then only the host's time means something)
//   bench_engine --cpu 1 --layers 8 --dim 64 --sequence 32 --vocab 256   (the host's time, without a GPU)
//
// Without an engine gradients are autograd's own, in bf16; with one they are written to the flat fp32 buffer by the
// products.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/launch.h"
#include "bonfire/models/model.h"
#include "bonfire/shard/engine.h"

namespace {

using namespace bonfire;

struct Arguments {
  std::int64_t layers = 16, dim = 2048, sequence = 4096, batch = 1;
  std::int64_t vocab = 128256;
  int repeats = 10, rounds = 5, cpu = 0;
};

struct Spread {
  double least, median, most;
};

Spread spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {values.front(), values[values.size() / 2], values.back()};
}

plan::ModelSpec spec_of(const Arguments& arguments) {
  return {.type = plan::ModelType::llama,
          .dim = arguments.dim,
          .layers = arguments.layers,
          .heads = arguments.dim / 64,
          .kv_heads = std::max<std::int64_t>(1, arguments.dim / 256),
          .ffn = 4 * arguments.dim,
          .vocab = arguments.vocab,
          .positions = arguments.sequence};
}

class Bench {
 public:
  Bench(const World& world, const Arguments& arguments)
      : world_(world),
        arguments_(arguments),
        tokens_(at::arange(arguments.batch * arguments.sequence, at::TensorOptions(at::kLong).device(world.device()))
                    .mul(977)
                    .remainder(std::min<std::int64_t>(100000, arguments.vocab))
                    .view({arguments.batch, arguments.sequence})) {}

  void add_bare() {
    auto model = make();
    for (auto& parameter : model->parameters()) parameter.set_data(parameter.detach().to(at::kBFloat16));
    contenders_.push_back({.name = "no engine", .step = [this, model] {
                             model->loss(tokens_, tokens_).backward();
                             for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
                           }});
  }

  void add_engine(const char* name, const MeshShape& shape, Sharded what) {
    auto model = make();
    auto engine = std::make_shared<Engine>(shard(
        world_.mesh(shape), *model, {.what = what, .precision = {.parameters = at::kBFloat16}, .start = Start::broadcast}));
    contenders_.push_back({.name = name,
                           .step =
                               [this, model, engine] {
                                 engine->backward(model->loss(tokens_, tokens_));
                                 engine->spend_gradients();
                               },
                           .engine = engine,
                           .units = static_cast<double>(model->layers().size()) + 1});
  }

  // In turn, since clocks drift; of every turn the first three steps are left out.
  void run() {
    for (int round = 0; round < arguments_.rounds; ++round)
      for (auto& contender : contenders_) turn(contender);
    for (const auto& contender : contenders_) report(contender);
    if (contenders_.size() == 2 && world_.rank() == 0)
      std::printf("the second against the first: %+.2f%%\n",
                  100 * (spread(contenders_[1].seconds).median / spread(contenders_[0].seconds).median - 1));
  }

 private:
  struct Contender {
    std::string name;
    std::function<void()> step;
    std::shared_ptr<Engine> engine{};
    double units = 1;
    std::vector<double> seconds{}, host_seconds{};  // of steps; per Unit

    double host() const { return engine ? engine->host_seconds() / units : 0; }
  };

  std::shared_ptr<Model> make() const { return build_model(spec_of(arguments_), {.seed = 1, .device = world_.device()}); }

  void turn(Contender& contender) const {
    std::vector<double> mine;
    for (int repeat = 0; repeat < arguments_.repeats + 3; ++repeat) {
      synchronize(world_.device());
      const double host = contender.host();
      const auto start = now_ns();
      contender.step();
      synchronize(world_.device());
      if (repeat < 3) continue;
      mine.push_back(seconds_since(start));
      contender.host_seconds.push_back(contender.host() - host);
    }
    if (world_.rank() == 0) std::printf("  %-28s %.2f ms\n", contender.name.c_str(), spread(mine).median * 1e3);
    contender.seconds.insert(contender.seconds.end(), mine.begin(), mine.end());
  }

  void report(const Contender& contender) const {
    if (world_.rank() != 0) return;
    const auto [least, median, most] = spread(contender.seconds);
    std::printf("%-28s forward and backward %.2f ms [%.2f, %.2f]\n", contender.name.c_str(), median * 1e3, least * 1e3,
                most * 1e3);
    if (!contender.engine) return;
    const auto host = spread(contender.host_seconds);
    std::printf("%-28s host time in the engine per Unit: %.1f us [%.1f, %.1f]; pool %.2f GiB\n", "", host.median * 1e6,
                host.least * 1e6, host.most * 1e6, static_cast<double>(contender.engine->pool_bytes()) / (1 << 30));
  }

  const World& world_;
  const Arguments& arguments_;
  at::Tensor tokens_;
  std::vector<Contender> contenders_;
};

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  for (int at = 1; at + 1 < argc; at += 2) {
    const auto is = [&](const char* name) { return std::strcmp(argv[at], name) == 0; };
    const auto value = std::atoll(argv[at + 1]);
    if (is("--layers")) arguments.layers = value;
    if (is("--dim")) arguments.dim = value;
    if (is("--sequence")) arguments.sequence = value;
    if (is("--batch")) arguments.batch = value;
    if (is("--repeats")) arguments.repeats = static_cast<int>(value);
    if (is("--rounds")) arguments.rounds = static_cast<int>(value);
    if (is("--vocab")) arguments.vocab = value;
    if (is("--cpu")) arguments.cpu = static_cast<int>(value);
  }
  return launch(argc, argv,
                [&](World& world) {
                  Bench bench(world, arguments);
                  if (world.size() == 1) {
                    bench.add_bare();
                    bench.add_engine("engine, F = 1", {}, Sharded::parameters);
                  } else {
                    bench.add_engine("engine, replicas", {.replicate = world.size()}, Sharded::none);
                    bench.add_engine("engine, parameters sharded", {.shard = world.size()}, Sharded::parameters);
                  }
                  bench.run();
                },
                {.device = [&](const Environment& place) {
                  if (arguments.cpu) return c10::Device(c10::kCPU);
                  require(gpu_available(), "{}", gpu_unavailable_reason());
                  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(place.local_rank % gpu_count()));
                }});
}
