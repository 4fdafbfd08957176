// Steps that are captured and replayed are the steps that they stand for.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/comm/captured_work.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/models/model.h"
#include "bonfire/train/build.h"
#include "bonfire/train/loop.h"
#include "bonfire/train/step.h"
#include "bonfire/train/whole_model.h"
#include "tests/support/gpu_ranks.h"
#include "tests/support/shell.h"

namespace bonfire::graph_test {
namespace {

using testing::run_gpu_ranks;

const c10::Device gpu(c10::kCUDA, 0);

TEST(GpuCapturedWork, IsDoneAgainAndAgain) {
  BONFIRE_SKIP_WITHOUT_GPU();
  const ComputeStream stream(gpu);
  auto sum = at::zeros({1000}, at::TensorOptions(gpu)), addend = at::ones({1000}, at::TensorOptions(gpu));
  const auto work = make_captured_work(gpu);
  work->capture([&] { sum.add_((addend * 2).exp().log()); });
  EXPECT_EQ(sum.abs().max().item<float>(), 0);  // noted, not done
  for (int round = 0; round < 3; ++round) work->replay();
  EXPECT_NEAR(sum.min().item<float>(), 6, 1e-5);
  addend.fill_(1.5);
  work->replay();
  EXPECT_NEAR(sum.min().item<float>(), 9, 1e-5);
}

// What cannot be captured is an error in one line, and leaves everything as usable as it was.
TEST(GpuCapturedWork, AQuestionToTheDeviceIsAnError) {
  BONFIRE_SKIP_WITHOUT_GPU();
  const ComputeStream stream(gpu);
  auto x = at::ones({10}, at::TensorOptions(gpu));
  const auto work = make_captured_work(gpu);
  try {
    work->capture([&] { EXPECT_EQ((x + 1).sum().item<float>(), 20); });
    FAIL() << "no error";
  } catch (const Error& error) {
    const std::string words = error.what();
    EXPECT_NE(words.find("captur"), std::string::npos) << words;
    EXPECT_EQ(words.find('\n'), std::string::npos) << words;
  }
  EXPECT_THROW(work->replay(), Error);
  EXPECT_EQ((x + at::ones({10}, at::TensorOptions(gpu))).sum().item<float>(), 20);
  work->capture([&] { x.add_(1); });
  work->replay();
  EXPECT_EQ(x.sum().item<float>(), 20);
}

TEST(GpuCapturedWork, ThrowsWhatTheWorkThrows) {
  BONFIRE_SKIP_WITHOUT_GPU();
  const ComputeStream stream(gpu);
  const auto work = make_captured_work(gpu);
  EXPECT_THROW(work->capture([] { fail("a reason"); }), Error);
  EXPECT_EQ(at::ones({10}, at::TensorOptions(gpu)).sum().item<float>(), 10);
}

const std::map<std::string, std::string> models = {
    {"llama",
     "[model]\ntype = \"llama\"\ndim = 64\nlayers = 3\nheads = 4\nkv_heads = 2\nffn = 96\nvocab = 80\n[data]\nsequence = "
     "16\nbranching = 4\n"},
    {"gpt2",
     "[model]\ntype = \"gpt2\"\ndim = 64\nlayers = 3\nheads = 4\nvocab = 80\ntied = true\ndropout = 0.0\n[data]\nsequence "
     "= 16\nbranching = 4\n"},
    {"mlp", "[model]\ntype = \"mlp\"\ndim = 32\nlayers = 3\ninputs = 12\nclasses = 5\n"}};

Config config_of(const std::string& model, int ranks, std::vector<std::string> overrides) {
  Config config = parse_config(models.at(model) + "[train]\nsteps = 12\nbatch = 24\n[optimizer]\nlr = 0.01\nwarmup = 6\n",
                               "a.toml", overrides);
  resolve(config, ranks);
  return config;
}

struct Outcome {
  std::vector<double> losses, norms;
  std::vector<bool> skipped;
  int replayed = 0;
  std::vector<Collective> collectives;
  at::Tensor weights;
};

using Change = std::function<void(std::int64_t step, StepBatches& batches)>;

// Makes the host take all steps part by part, as it takes those that are traced.
const std::vector<std::string> in_parts{"train.trace_from=1", "train.trace_steps=12"};

// The loop's steps, each read when the next is under way.
Outcome train_steps(World& world, const Config& config, const Change& change = {}) {
  bonfire::Run run(world, config);
  Tracer tracer(world, config, "");
  Outcome outcome;
  const auto conclude = [&](StepTaken& step) {
    read(run, step);
    outcome.losses.push_back(step.loss.mean);
    outcome.norms.push_back(step.update.gradient_norm);
    outcome.skipped.push_back(step.update.skipped);
  };
  world.recorder().clear();
  world.recorder().start();
  std::optional<StepTaken> running;
  for (std::int64_t step = 1; step <= config.train.steps; ++step) {
    auto batches = *run.loader.next();
    if (change) change(step, batches);
    tracer.begin_step(step);
    auto taken = take_step(run, batches, step, tracer);
    EXPECT_EQ(taken.reading != nullptr, step > 1 && !tracer.tracing());
    outcome.replayed += taken.reading && taken.reading->replayed();
    if (running) conclude(*running);
    running = std::move(taken);
  }
  conclude(*running);
  world.recorder().stop();
  outcome.collectives = world.recorder().collectives();
  const auto whole = run.whole().engine.full_parameters();
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : run.whole().model->parameters())
    parameters.push_back(parameter.detach().cpu().to(at::kDouble).view(-1));
  outcome.weights = at::cat(parameters);
  return outcome;
}

void expect_equal(const Outcome& one, const Outcome& other) {
  ASSERT_EQ(one.losses.size(), other.losses.size());
  for (std::size_t at = 0; at < one.losses.size(); ++at) {
    EXPECT_EQ(one.skipped[at], other.skipped[at]) << "step " << at + 1;
    if (one.skipped[at]) continue;
    EXPECT_EQ(one.losses[at], other.losses[at]) << "step " << at + 1;
    EXPECT_EQ(one.norms[at], other.norms[at]) << "step " << at + 1;
  }
  EXPECT_TRUE(at::equal(one.weights, other.weights)) << (one.weights - other.weights).abs().max().item<double>();
}

using Case = std::tuple<int, std::string>;
class GpuGraphs : public ::testing::TestWithParam<Case> {};

std::vector<std::vector<std::string>> layouts(int ranks) {
  if (ranks == 1) return {{}};
  return {{},
          {fmt::format("layout.shard={}", ranks), "layout.sharded=optimizer"},
          {fmt::format("layout.shard={}", ranks), "layout.sharded=parameters"}};
}

std::vector<std::string> with(std::vector<std::string> overrides, const std::vector<std::string>& others) {
  overrides.insert(overrides.end(), others.begin(), others.end());
  return overrides;
}

// Law: losses, norms, weights and the list of collectives of steps that are issued at once, or replayed, are those of steps
// that the host takes part by part.
TEST_P(GpuGraphs, ReplayedStepsAreTheSameSteps) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  const auto [ranks, model] = GetParam();
  run_gpu_ranks(ranks, [&](World& world) {
    for (const auto& layout : layouts(world.size()))
      for (const int accumulation : {1, 3}) {
        SCOPED_TRACE(fmt::format("{}, {} microbatches", layout.empty() ? "" : layout.back(), accumulation));
        auto overrides = layout;
        overrides.push_back(fmt::format("train.microbatch={}", 24 / world.size() / accumulation));
        const auto plain = train_steps(world, config_of(model, world.size(), with(overrides, in_parts)));
        overrides.push_back("train.graphs=off");
        const auto issued = train_steps(world, config_of(model, world.size(), overrides));
        overrides.back() = "train.graphs=on";
        const auto replayed = train_steps(world, config_of(model, world.size(), overrides));
        EXPECT_EQ(plain.replayed + issued.replayed, 0);
        EXPECT_EQ(replayed.replayed, 9);
        expect_equal(issued, plain);
        expect_equal(replayed, plain);
        EXPECT_EQ(issued.collectives, plain.collectives);
        EXPECT_EQ(replayed.collectives, plain.collectives);
        // The learning rate really moves what replays do.
        if (accumulation > 1 || !layout.empty()) continue;
        overrides.push_back("optimizer.warmup=1");
        EXPECT_FALSE(at::equal(train_steps(world, config_of(model, world.size(), overrides)).weights, replayed.weights));
      }
  });
}

// A batch of another shape is issued between replays, and one whose loss is not finite changes nothing.
TEST_P(GpuGraphs, OddStepsBetweenReplays) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  const auto [ranks, model] = GetParam();
  run_gpu_ranks(ranks, [&](World& world) {
    const Change change = [](std::int64_t step, StepBatches& batches) {
      auto& batch = batches.microbatches.front();
      if (step == 7) {
        batch.input = batch.input.narrow(0, 0, 4).contiguous();
        batch.target = batch.target.narrow(0, 0, 4).contiguous();
      }
      if ((step == 9 || step == 10) && batch.input.is_floating_point()) batch.input[0][0] = NAN;
    };
    for (const auto& layout : layouts(world.size()))
      for (const char* optimizer : {"adamw", "sgd"}) {
        auto overrides = layout;
        overrides.push_back(std::string("optimizer.type=") + optimizer);
        const auto plain = train_steps(world, config_of(model, world.size(), with(overrides, in_parts)), change);
        EXPECT_EQ(plain.skipped[8], model == "mlp");
        overrides.push_back("train.graphs=off");
        expect_equal(train_steps(world, config_of(model, world.size(), overrides), change), plain);
        overrides.back() = "train.graphs=on";
        const auto replayed = train_steps(world, config_of(model, world.size(), overrides), change);
        EXPECT_EQ(replayed.replayed, 8);
        expect_equal(replayed, plain);
      }
  });
}

// What is dropped is drawn by the host, so that nothing is captured; the host waits for nothing all the same.
TEST(GpuGraphDropout, IssuedStepsAreTheSameSteps) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(1, [](World& world) {
    const std::vector<std::string> overrides{"model.dropout=0.25", "train.microbatch=8"};
    const auto plain = train_steps(world, config_of("gpt2", 1, with(overrides, in_parts)));
    const auto issued = train_steps(world, config_of("gpt2", 1, overrides));
    EXPECT_EQ(issued.replayed, 0);
    expect_equal(issued, plain);
  });
}

// So is what adapters drop.
TEST(GpuGraphDropout, AdaptersDropOthersInEachStep) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(1, [](World& world) {
    const std::vector<std::string> overrides{"adapter.rank=4", "adapter.dropout=0.25", "checkpoint.every=0"};
    const auto plain = train_steps(world, config_of("gpt2", 1, with(overrides, in_parts)));
    const auto issued = train_steps(world, config_of("gpt2", 1, overrides));
    EXPECT_EQ(issued.replayed, 0);
    expect_equal(issued, plain);
  });
}

// What a backward runs again, and the backwards that run inside of it, are captured with it.
TEST_P(GpuGraphs, BackwardsThatRunForwardsAreReplayed) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  const auto [ranks, model] = GetParam();
  run_gpu_ranks(ranks, [&](World& world) {
    for (const auto& layout : layouts(world.size()))
      for (const char* how : {"model.reversible=true", "layout.recompute=full", "layout.recompute=selective"}) {
        if (model == "mlp" && how == std::string("model.reversible=true")) continue;
        SCOPED_TRACE(fmt::format("{} {}", layout.empty() ? "" : layout.back(), how));
        const auto overrides = with(layout, {how, fmt::format("train.microbatch={}", 12 / world.size())});
        const auto plain = train_steps(world, config_of(model, world.size(), with(overrides, in_parts)));
        const auto replayed = train_steps(world, config_of(model, world.size(), with(overrides, {"train.graphs=on"})));
        EXPECT_EQ(replayed.replayed, 9);
        expect_equal(replayed, plain);
        EXPECT_EQ(replayed.collectives, plain.collectives);
      }
  });
}

// The loop itself, with evaluations between replays: what it writes down is the same.
TEST_P(GpuGraphs, TheLoopWritesTheSame) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  const auto [ranks, model] = GetParam();
  run_gpu_ranks(ranks, [&, model = model](World& world) {
    const auto scratch = testing::folder_of_gpu_ranks();
    int runs = 0;
    for (const auto& layout : layouts(world.size())) {
      std::vector<std::string> written;
      for (const char* graphs : {"off", "on"}) {
        auto overrides = layout;
        overrides.push_back(std::string("train.graphs=") + graphs);
        overrides.push_back("train.eval_every=5");
        overrides.push_back("train.trace_from=8");
        overrides.push_back("train.trace_steps=1");
        const auto config = config_of(model, world.size(), overrides);
        const auto folder = scratch / std::to_string(runs++);
        std::filesystem::create_directories(folder);
        train(world, config, {.folder = folder});
        if (world.rank() == 0) {
          std::string& lines = written.emplace_back();
          std::ifstream in(folder / "metrics.jsonl");
          for (std::string line; std::getline(in, line);) {
            auto object = nlohmann::json::parse(line);
            object.erase("tokens_per_second");
            object.erase("memory_bytes");
            lines += object.dump() + "\n";
          }
        }
      }
      if (world.rank() == 0) {
        EXPECT_EQ(written[0], written[1]);
      }
    }
  });
}

// What the loop writes of each step, on rank 0; no steps on others.
std::vector<std::string> written_by_loop(World& world, const std::string& model, const TrainOptions& options,
                                         std::vector<std::string> overrides, int steps) {
  overrides.insert(overrides.end(), {fmt::format("train.steps={}", steps), "optimizer.decay=constant", "train.graphs=on"});
  const auto config = config_of(model, world.size(), overrides);
  if (world.rank() == 0) std::filesystem::create_directories(options.folder);
  world.group().barrier().wait();
  train(world, config, options);
  std::vector<std::string> lines;
  if (world.rank() != 0) return lines;
  std::ifstream in(options.folder / "metrics.jsonl");
  for (std::string line; std::getline(in, line);) {
    auto object = nlohmann::json::parse(line);
    object.erase("tokens_per_second");
    object.erase("memory_bytes");
    lines.push_back(object.dump());
  }
  return lines;
}

// A run that is saved between replays, and one that goes on from there.
TEST_P(GpuGraphs, ARunThatIsResumedWritesTheSame) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  const auto [ranks, model] = GetParam();
  run_gpu_ranks(ranks, [&, model = model](World& world) {
    const auto scratch = testing::folder_of_gpu_ranks();
    int runs = 0;
    for (auto layout : layouts(world.size())) {
      layout.push_back("checkpoint.every=5");  // while the loop runs a step ahead, too
      const auto folder = scratch / std::to_string(runs++);
      const auto whole = written_by_loop(world, model, {.folder = folder / "whole"}, layout, 12);
      written_by_loop(world, model, {.folder = folder / "part"}, layout, 7);
      EXPECT_EQ(written_by_loop(world, model, {.folder = folder / "part", .resume = true}, layout, 12), whole);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuGraphs,
                         ::testing::Combine(::testing::Values(1, 2), ::testing::Values("mlp", "gpt2", "llama")),
                         [](const auto& info) {
                           return fmt::format("ranks{}_{}", std::get<0>(info.param), std::get<1>(info.param));
                         });

// What is rounded to fp8 by the magnitudes of past calls: replays are calls too. In bf16 attention's gradient varies from
// run to run, so that curves are compared where there is none.
TEST(GpuGraphFp8, ReplaysAreCalls) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(1, [](World& world) {
    if (const auto info = gpu_info(world.device().index()); 10 * info.major + info.minor < 89) return;
    const std::vector<std::string> shape{"model.dim=64", "train.steps=40", "train.batch=32", "train.precision=fp8"};
    for (const char* scaling : {"delayed", "current"})
      for (const int microbatch : {16, 32}) {
        auto overrides = shape;
        overrides.push_back(std::string("train.fp8_scaling=") + scaling);
        overrides.push_back(fmt::format("train.microbatch={}", microbatch));
        overrides.push_back("train.graphs=off");
        const auto plain = train_steps(world, config_of("mlp", 1, overrides));
        overrides.back() = "train.graphs=on";
        const auto replayed = train_steps(world, config_of("mlp", 1, overrides));
        EXPECT_EQ(replayed.replayed, 37);
        expect_equal(replayed, plain);
      }
  });
}

// A peak of memory is what it is without graphs, but for the inputs and a few numbers.
TEST(GpuGraphFp8, ARunThatIsResumedWritesTheSame) {
  BONFIRE_SKIP_WITHOUT_GPU();
  make_deterministic();
  run_gpu_ranks(1, [&](World& world) {
    const auto scratch = testing::folder_of_gpu_ranks();
    if (const auto info = gpu_info(world.device().index()); 10 * info.major + info.minor < 89) return;
    for (const char* precision : {"fp8", "bf16"}) {
      const std::vector<std::string> shape{"model.dim=64", "train.batch=32", "checkpoint.every=5",
                                           std::string("train.precision=") + precision};
      const auto folder = scratch / precision;
      const auto whole = written_by_loop(world, "mlp", {.folder = folder / "whole"}, shape, 24);
      written_by_loop(world, "mlp", {.folder = folder / "part"}, shape, 13);
      EXPECT_EQ(written_by_loop(world, "mlp", {.folder = folder / "part", .resume = true}, shape, 24), whole) << precision;
    }
  });
}

TEST(GpuGraphMemory, NothingIsHeldTwice) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(1, [](World& world) {
    const auto measure = [&](const char* graphs) {
      bonfire::Run run(world, config_of("llama", 1,
                                        {std::string("train.graphs=") + graphs, "model.dim=512", "model.ffn=1024",
                                         "model.layers=6", "data.sequence=256", "train.batch=16", "train.precision=bf16"}));
      Tracer tracer(world, run.config, "");
      for (std::int64_t step = 1; step <= 6; ++step) {
        auto taken = take_step(run, *run.loader.next(), step, tracer);
        EXPECT_EQ(taken.reading && taken.reading->replayed(), std::string(graphs) == "on" && step > 3);
        read(run, taken);
      }
      return run.memory.peak();
    };
    const auto plain = measure("off"), captured = measure("on");
    EXPECT_NEAR(static_cast<double>(captured), static_cast<double>(plain), 1 << 20);
  });
}

// A step that asks the device something cannot be captured: an error where that was asked for, otherwise steps go on.
class GpuGraphFailure : public ::testing::TestWithParam<int> {};

TEST_P(GpuGraphFailure, AStepThatCannotBeCaptured) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(GetParam(), [](World& world) {
    for (const char* graphs : {"auto", "on", "off"}) {
      bonfire::Run run(world,
                       config_of("mlp", world.size(),
                                 {std::string("train.graphs=") + graphs, fmt::format("layout.shard={}", world.size())}));
      Tracer tracer(world, run.config, "");
      auto& model = *run.whole().model;
      int asked = 0;
      for (auto& parameter : model.parameters())
        parameter.register_hook([&asked, device = world.device()](at::Tensor gradient) {
          ++asked;
          EXPECT_EQ(at::ones({1}, at::TensorOptions(device)).item<float>(), 1);
          return gradient;
        });
      std::vector<double> losses;
      std::string error;
      try {
        for (std::int64_t step = 1; step <= 8; ++step) {
          auto taken = take_step(run, *run.loader.next(), step, tracer);
          EXPECT_FALSE(taken.reading && taken.reading->replayed());
          read(run, taken);
          losses.push_back(taken.loss.mean);
        }
      } catch (const Error& failure) {
        error = failure.what();
      }
      EXPECT_GT(asked, 0);
      if (std::string(graphs) == "on") {
        EXPECT_EQ(losses.size(), 3u);
        EXPECT_EQ(
            error.find(
                "step 4 cannot be captured (train.graphs = \"on\"; allowed: auto | off): in its forward and backward: "),
            0u)
            << error;
      } else {
        ASSERT_EQ(losses.size(), 8u) << error;
        EXPECT_LT(losses[7], losses[0]);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuGraphFailure, ::testing::Values(1, 2),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

}  // namespace
}  // namespace bonfire::graph_test
