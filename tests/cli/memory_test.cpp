#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tests/cli/command.h"
#include "tests/cli/random_run.h"

// What a rank needs is known before it starts: the predicted and the measured peak of runs that nobody chose.
//
// BONFIRE_MEMORY_RUNS says how many (docs/memory.md says how to run 100), BONFIRE_MEMORY_SEED which.
namespace bonfire::memory_test {
namespace {

std::int64_t from_environment(const char* name, std::int64_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoll(text) : otherwise;
}

// 5% of the peak. Of a run that needs less than 16 MiB, 5% of that: libraries have a few hundred kilobytes of their own.
constexpr double part_allowed = 0.05;
constexpr double small_run = 16 << 20;
// Large products and convolutions in bf16 take many minutes on a CPU that has no instructions for them.
constexpr int most_seconds = 1800;

TEST(RandomRuns, NeedWhatWasPredicted) {
  const testing::Scratch scratch;
  scratch.write("a.toml", "[run]\ndevice = \"cpu\"\n");
  std::string lines;
  for (std::size_t line = 0; line < 2000; ++line)
    lines += fmt::format("{{\"text\": \"{}\"}}\n", std::string(line * 37 % 300 + 1, static_cast<char>('a' + line % 7)));
  scratch.write("lines.jsonl", lines);
  ASSERT_EQ(scratch.bonfire(fmt::format("tokens lines.jsonl -o {} --format megatron", testing::RandomRun::documents)).code,
            0);
  const auto runs = from_environment("BONFIRE_MEMORY_RUNS", 2);
  const auto first = from_environment("BONFIRE_MEMORY_SEED", 111);
  int within = 0;
  for (auto seed = first; seed < first + runs; ++seed) {
    const testing::RandomRun run(static_cast<std::uint64_t>(seed));
    const auto ended = scratch.bonfire("bench step a.toml --steps 2 --json" + run.arguments(), "", most_seconds);
    EXPECT_EQ(ended.code, 0) << "seed " << seed << ": " << run.line() << "\n" << ended.err;
    if (ended.code != 0) continue;
    const auto report = nlohmann::json::parse(ended.out);
    const double measured = report.at("peak_memory_bytes"), predicted = report.at("predicted_memory_bytes");
    const double off = std::abs(predicted - measured);
    const bool good = off <= part_allowed * std::max(measured, small_run);
    EXPECT_TRUE(good) << "seed " << seed << ": " << predicted << " predicted, " << measured << " measured ("
                      << predicted / measured << ")\n"
                      << run.line();
    within += good;
    if (runs > 20)
      fmt::print("{:>5} {:>11} {:>11} {:>7.4f} {} {}\n", seed, predicted, measured, predicted / measured, good ? "  " : "!!",
                 run.line());
  }
  EXPECT_EQ(within, runs);
}

// Runs whose peak was once predicted 10 to 70% off, each for a reason of its own.
struct Run {
  const char* name;
  const char* model;
  const char* arguments;
};
constexpr const char* gpt2 =
    "type = \"gpt2\"\ndim = 128\nlayers = 6\nheads = 4\nvocab = 512\n[data]\nsequence = 32\n[train]\nbatch = 16\n"
    "microbatch = 2\n";
constexpr const char* llama =
    "type = \"llama\"\ndim = 128\nlayers = 6\nheads = 4\nkv_heads = 2\nvocab = 512\n[data]\nsequence = 32\n[train]\nbatch = "
    "16\nmicrobatch = 8\n";
constexpr const char* vgg =
    "type = \"vgg\"\nimage = 24\nconvolutions = [32, 32, 0, 64, 64, 0]\npool = 2\nffn = 128\nclasses = 10\n[train]\n"
    "batch = 2\nmicrobatch = 1\n";

class NamedRuns : public ::testing::TestWithParam<Run> {};

TEST_P(NamedRuns, NeedWhatWasPredicted) {
  const auto& [name, model, arguments] = GetParam();
  const testing::Scratch scratch;
  scratch.write("a.toml", std::string("[run]\ndevice = \"cpu\"\n[model]\n") + model);
  const auto ended = scratch.bonfire(std::string("bench step a.toml --steps 2 --json ") + arguments);
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto report = nlohmann::json::parse(ended.out);
  const double measured = report.at("peak_memory_bytes");
  EXPECT_NEAR(report.at("predicted_memory_bytes").get<double>(), measured, part_allowed * measured);
}

INSTANTIATE_TEST_SUITE_P(
    Runs, NamedRuns,
    ::testing::Values(
        Run{"negotiated_order", gpt2, "--set layout.shard=2 --set layout.negotiate_order=true"},
        Run{"offloaded_stages", gpt2, "--set layout.pipeline=2 --set layout.offload=parameters"},
        Run{"offloaded_stages_in_shares", gpt2,
            "--set layout.pipeline=2 --set layout.shard=2 --set layout.offload=parameters"},
        Run{"offloaded_chunks", gpt2,
            "--set layout.pipeline=2 --set layout.schedule=interleaved --set layout.offload=parameters"},
        Run{"units_of_stages", gpt2, "--set layout.pipeline=2 --set layout.shard=2 --set layout.reshard_after_forward=true"},
        Run{"split_backward", gpt2, "--set layout.pipeline=2 --set layout.schedule=zb-h1"},
        Run{"split_backward_with_warm_up", gpt2, "--set layout.pipeline=2 --set layout.schedule=zb-h2"},
        Run{"split_backward_in_a_v", gpt2, "--set layout.pipeline=2 --set layout.schedule=zb-v"},
        Run{"recomputed", gpt2, "--set layout.recompute=full --set layout.shard=2"},
        Run{"recomputed_in_a_split_backward", gpt2,
            "--set layout.recompute=full --set layout.pipeline=2 --set layout.schedule=zb-h1"},
        Run{"recomputed_in_part", gpt2, "--set layout.recompute=selective --set layout.pipeline=2"},
        Run{"recomputed_convolutions", vgg, "--set layout.recompute=full"}, Run{"small_convolutions", vgg, ""},
        Run{"small_convolutions_of_stages", vgg, "--set layout.pipeline=2 --set train.batch=4"},
        Run{"frozen_blocks", gpt2, "--set train.microbatch=1 --set data.sequence=8 --set 'train.freeze=[\"blocks.*\"]'"},
        Run{"frozen_blocks_of_replicas", gpt2,
            "--set layout.replicate=2 --set train.microbatch=1 --set data.sequence=8 --set 'train.freeze=[\"blocks.*\"]'"},
        Run{"adapters", llama, "--set adapter.rank=8"},
        Run{"adapters_in_two_bytes", gpt2, "--set adapter.rank=8 --set train.precision=bf16 --set train.microbatch=16"},
        Run{"adapters_of_some_layers", llama,
            "--set adapter.rank=8 --set 'adapter.match=[\"v_proj\", \"layers.3.mlp.up_proj\", \"lm_head\"]'"},
        Run{"adapters_in_shares", llama, "--set adapter.rank=8 --set layout.shard=2"},
        Run{"adapters_with_split_backward", llama,
            "--set adapter.rank=8 --set layout.pipeline=2 --set layout.schedule=zb-h1 --set train.microbatch=2"},
        Run{"reversible", llama, "--set model.reversible=true"},
        Run{"reversible_in_two_bytes", gpt2, "--set model.reversible=true --set train.precision=bf16"},
        Run{"reversible_in_shares", llama, "--set model.reversible=true --set layout.shard=2"},
        Run{"reversible_stages", gpt2, "--set model.reversible=true --set layout.pipeline=2"},
        Run{"reversible_with_split_backward", llama,
            "--set model.reversible=true --set layout.pipeline=2 --set layout.schedule=zb-h1 --set train.microbatch=2"},
        Run{"reversible_adapters", llama, "--set model.reversible=true --set adapter.rank=8"},
        Run{"recomputed_split_layers", gpt2,
            "--set layout.tensor=2 --set layout.recompute=full --set train.microbatch=16 --set data.sequence=64"},
        Run{"recomputed_split_layers_of_four", llama,
            "--set layout.tensor=4 --set layout.recompute=full --set train.microbatch=16 --set data.sequence=64"},
        Run{"recomputed_layers_without_the_sequence", llama,
            "--set layout.tensor=2 --set layout.recompute=full --set layout.sequence_parallel=false"},
        Run{"split_layers_recomputed_in_part_of_four", gpt2,
            "--set layout.tensor=4 --set layout.recompute=selective --set train.microbatch=16 --set data.sequence=64"},
        Run{"split_layers_keep_all", gpt2,
            "--set layout.tensor=2 --set train.keep_for_backward=all --set train.microbatch=16 --set data.sequence=64"},
        Run{"stages_of_split_layers", gpt2,
            "--set layout.pipeline=2 --set layout.tensor=2 --set train.microbatch=4 --set data.sequence=64"},
        Run{"recomputed_stages_of_split_layers", llama,
            "--set layout.pipeline=2 --set layout.tensor=2 --set layout.recompute=full --set train.microbatch=4 --set "
            "data.sequence=64"},
        Run{"split_backward_of_split_layers", llama,
            "--set layout.pipeline=2 --set layout.tensor=2 --set layout.schedule=zb-h1 --set train.microbatch=4 --set "
            "data.sequence=64"},
        Run{"split_backward_of_split_layers_without_the_sequence", gpt2,
            "--set layout.pipeline=2 --set layout.tensor=2 --set layout.schedule=zb-h1 --set train.microbatch=4 --set "
            "data.sequence=64 --set layout.sequence_parallel=false"},
        Run{"split_backward_of_many_layers", gpt2,
            "--set layout.pipeline=2 --set layout.schedule=zb-h1 --set train.microbatch=4 --set data.sequence=64 --set "
            "model.layers=12"},
        Run{"recomputed_adapters_of_shared_samples", gpt2,
            "--set layout.context=2 --set adapter.rank=8 --set layout.recompute=full --set train.microbatch=16 --set "
            "data.sequence=128 --set model.layers=3 --set model.heads=8"},
        Run{"stages_of_shared_samples", llama,
            "--set layout.pipeline=2 --set layout.context=2 --set train.microbatch=4 --set data.sequence=64"},
        Run{"split_backward_of_shared_samples", gpt2,
            "--set layout.pipeline=2 --set layout.context=2 --set layout.schedule=zb-h1 --set train.microbatch=4 --set "
            "data.sequence=64"},
        Run{"without_momentum", gpt2,
            "--set train.microbatch=1 --set data.sequence=8 --set optimizer.type=sgd --set optimizer.momentum=0"}),
    [](const auto& info) { return std::string(info.param.name); });

// Runs that save while they train, from a copy of what each rank saves.
class SavedRuns : public ::testing::TestWithParam<Run> {};

TEST_P(SavedRuns, NeedWhatWasPredicted) {
  const auto& [name, model, arguments] = GetParam();
  const testing::Scratch scratch;
  scratch.write("a.toml", std::string("[run]\nname = \"a\"\ndevice = \"cpu\"\n[model]\n") + model);
  const auto measured = [&](int every) {
    const auto ended = scratch.bonfire(
        fmt::format("train a.toml --ranks 2 --json --set train.steps=4 --set checkpoint.every={} {}", every, arguments));
    EXPECT_EQ(ended.code, 0) << ended.err;
    const auto report = nlohmann::json::parse(ended.out);
    const double peak = report.at("peak_memory_bytes");
    EXPECT_NEAR(report.at("predicted_memory_bytes").get<double>(), peak, part_allowed * peak) << "every " << every;
    return peak;
  };
  // The copy is there, and it is what the prediction adds.
  EXPECT_GT(measured(2), 1.1 * measured(4));
}

INSTANTIATE_TEST_SUITE_P(Runs, SavedRuns,
                         ::testing::Values(Run{"replicas", gpt2, ""},
                                           Run{"shares", gpt2, "--set layout.shard=2 --set layout.sharded=parameters"}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace bonfire::memory_test
