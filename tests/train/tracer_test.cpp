#include "bonfire/train/tracer.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include <ATen/ops/ones.h>
#include <nlohmann/json.hpp>

#include "bonfire/train/report.h"
#include "bonfire/train/run_data.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"

namespace bonfire {
namespace {
namespace fs = std::filesystem;

TEST(Tracer, JoinsComputeAndCommunicationOfAllRanksWithRealTimes) {
  const bonfire::testing::Folder folder;
  const fs::path file = folder.path() / "trace.json";
  const Config config = parse_config("[train]\nsteps = 9\ntrace_from = 2\ntrace_steps = 2\n", "a.toml");
  const auto before = now_ns();
  bonfire::testing::run_ranks(2, [&](World& world) {
    Tracer tracer(world, config, file);
    for (int step = 1; step <= 4; ++step) {
      tracer.begin_step(step);
      {
        const auto phase = tracer.phase("backward");
        world.group().all_reduce(at::ones({1000})).wait();
      }
      tracer.end_step(step);
    }
  });
  const auto after = now_ns();

  const auto trace = nlohmann::json::parse(std::ifstream(file));
  std::map<int, int> phases, reductions;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    const int rank = event.at("pid");
    const double start = event.at("ts"), end = start + event.at("dur").get<double>();
    EXPECT_GE(start, static_cast<double>(before) * 1e-3);
    EXPECT_LE(end, static_cast<double>(after) * 1e-3);
    if (event.at("name") == "backward") ++phases[rank];
    if (event.at("name") == "all_reduce" && event.at("args").at("bytes") == 4000) ++reductions[rank];
  }
  EXPECT_EQ(phases, (std::map<int, int>{{0, 2}, {1, 2}}));
  EXPECT_EQ(reductions, (std::map<int, int>{{0, 2}, {1, 2}}));
}

TEST(GatherText, KeepsEveryRanksTextWhateverItsLength) {
  bonfire::testing::run_ranks(3, [](World& world) {
    const std::string mine(static_cast<std::size_t>(world.rank() * 1000), static_cast<char>('a' + world.rank()));
    const auto all = gather_text(world.group(), mine, world.device());
    if (world.rank() != 0) {
      EXPECT_TRUE(all.empty());
      return;
    }
    ASSERT_EQ(all.size(), 3u);
    EXPECT_EQ(all[0], "");
    EXPECT_EQ(all[1], std::string(1000, 'b'));
    EXPECT_EQ(all[2], std::string(2000, 'c'));
  });
}

TEST(RunData, EachModelGetsWhatItReads) {
  const auto open = [](const std::string& text) {
    Config config = parse_config(text, "a.toml");
    resolve(config, 1);
    return open_data(config);
  };
  const auto tokens = open("[model]\nvocab = 64\n[data]\nsequence = 16\nbranching = 4\n");
  EXPECT_EQ(tokens.train->input().sizes, (std::vector<std::int64_t>{16}));
  EXPECT_EQ(tokens.tokens_per_sample, 16);
  ASSERT_TRUE(tokens.entropy.has_value());
  EXPECT_GT(*tokens.entropy, 0);
  EXPECT_LE(*tokens.entropy, std::log(4.0));

  const auto images = open("[model]\ntype = \"vgg\"\nimage = 32\nchannels = 1\nwidth = 4\npool = 1\n");
  EXPECT_EQ(images.train->input().sizes, (std::vector<std::int64_t>{1, 32, 32}));
  EXPECT_FALSE(images.entropy.has_value());
  const auto vectors = open("[model]\ntype = \"mlp\"\ninputs = 20\n");
  EXPECT_EQ(vectors.train->input().sizes, (std::vector<std::int64_t>{20}));
}

TEST(Report, ALossThatIsNoNumberIsStillJson) {
  TrainReport report;
  report.loss_last = std::nan("");
  report.entropy_floor = 2.0;
  const auto json = nlohmann::json::parse(to_json(report));
  EXPECT_TRUE(json.at("loss_last").is_null());
  EXPECT_EQ(json.at("entropy_floor"), 2.0);
  EXPECT_FALSE(json.contains("mfu"));
}

}  // namespace
}  // namespace bonfire
