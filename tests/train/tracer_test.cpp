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

namespace bonfire::tracer_test {
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

TEST(GatherText, KeepsEveryRanksTextAtTheFirstOfItsNeighbours) {
  for (const int together : {1, 2, 3, 8})
    bonfire::testing::run_ranks(5, [&](World& world) {
      const auto text_of = [](int rank) {
        return std::string(static_cast<std::size_t>(rank * 1000), static_cast<char>('a' + rank));
      };
      std::vector<std::string> want;
      if (world.rank() % together == 0)
        for (int rank = world.rank(); rank < std::min(5, world.rank() + together); ++rank) want.push_back(text_of(rank));
      EXPECT_EQ(gather_text(world.group(), text_of(world.rank()), together), want);
    });
}

// No rank writes, or has to hold, what all of them have noted.
TEST(Tracer, ManyRanksWriteSeveralFiles) {
  const bonfire::testing::Folder folder;
  const Config config = parse_config("[train]\nsteps = 1\ntrace_from = 1\ntrace_steps = 1\n", "a.toml");
  constexpr int kRanks = ranks_in_a_trace + 2;
  bonfire::testing::run_ranks(kRanks, [&](World& world) {
    Tracer tracer(world, config, folder.path() / "trace.json");
    tracer.begin_step(1);
    { const auto phase = tracer.phase("forward"); }
    tracer.end_step(1);
  });
  const auto ranks_in = [&](const std::string& file) {
    std::set<int> ranks;
    const auto trace = nlohmann::json::parse(std::ifstream(folder.path() / file));
    for (const auto& event : trace.at("traceEvents")) ranks.insert(event.at("pid").get<int>());
    return ranks;
  };
  EXPECT_EQ(ranks_in("trace.json"), (std::set<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(ranks_in("trace-8.json"), (std::set<int>{8, 9}));
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
}  // namespace bonfire::tracer_test
