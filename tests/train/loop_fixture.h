#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/train/loop.h"
#include "bonfire/train/run_folder.h"
#include "tests/support/ranks.h"
#include "tests/support/shell.h"

namespace bonfire::testing {

// Batch 48, so that 1 to 4 ranks divide it, each in one part or four.
inline constexpr const char* common = "[train]\nsteps = 4\nbatch = 48\n[optimizer]\nlr = 0.01\nwarmup = 1\n";

inline const std::map<std::string, std::string> models = {
    {"llama",
     "[model]\ntype = \"llama\"\ndim = 16\nlayers = 2\nheads = 4\nkv_heads = 2\nffn = 24\nvocab = 40\n[data]\nsequence = "
     "6\nbranching = 4\n"},
    {"gpt2",
     "[model]\ntype = \"gpt2\"\ndim = 16\nlayers = 2\nheads = 2\nvocab = 40\ntied = true\n[data]\nsequence = 6\nbranching = "
     "4\n"},
    {"mlp", "[model]\ntype = \"mlp\"\ndim = 16\nlayers = 2\ninputs = 12\nclasses = 5\n"},
    {"vgg",
     "[model]\ntype = \"vgg\"\nimage = 8\nchannels = 1\nconvolutions = [4, 0, 8, 0]\npool = 2\nffn = 16\nclasses = 5\n"}};

struct Outcome {
  std::vector<nlohmann::json> metrics;
  TrainReport report;
  std::string error;  // of rank 0
  std::filesystem::path folder;

  std::vector<double> losses() const {
    std::vector<double> values;
    for (const auto& line : metrics) values.push_back(line.at("loss").get<double>());
    return values;
  }
};

// A run of the real loop, every rank a thread of this process.
class Loop : public ::testing::Test {
 protected:
  Outcome run(const std::string& model, int ranks, const std::vector<std::string>& overrides = {}) {
    return run_text(models.at(model), ranks, overrides);
  }

  // Of a [model] and a [data] section.
  Outcome run_text(const std::string& sections, int ranks, std::vector<std::string> overrides) {
    overrides.push_back("run.folder=" + parent_.string());
    overrides.push_back("run.device=cpu");
    Config config = parse_config(sections + common, "a.toml", overrides);
    resolve(config, ranks);
    Outcome outcome;
    outcome.folder = make_run_folder(config);
    run_ranks(ranks, [&](World& world) {
      try {
        const auto report = train(world, config, {.folder = outcome.folder});
        if (world.rank() == 0) outcome.report = report;
      } catch (const Error& error) {
        if (world.rank() == 0) outcome.error = error.what();
      }
    });
    std::ifstream in(outcome.folder / "metrics.jsonl");
    for (std::string line; std::getline(in, line);) outcome.metrics.push_back(nlohmann::json::parse(line));
    return outcome;
  }

  // The curve of one rank, whoever trains. `both`: what one rank is told as well.
  void expect_like_one_rank(const std::string& model, int ranks, std::vector<std::string> layout,
                            std::vector<std::string> both = {}) {
    both.push_back("train.eval_every=2");
    layout.insert(layout.end(), both.begin(), both.end());
    const auto expected = run(model, 1, both), outcome = run(model, ranks, layout);
    EXPECT_EQ(outcome.error, "");
    ASSERT_EQ(outcome.metrics.size(), expected.metrics.size());
    for (std::size_t step = 0; step < expected.metrics.size(); ++step)
      for (const auto* key : {"loss", "grad_norm", "eval_loss"}) {
        if (!expected.metrics[step].contains(key)) continue;
        const auto value = expected.metrics[step].at(key).get<double>();
        EXPECT_NEAR(outcome.metrics[step].at(key).get<double>(), value, 1e-5 * std::abs(value))
            << key << ", step " << step + 1;
      }
  }

  const Folder scratch_;
  const std::filesystem::path parent_ = scratch_.path() / "runs";
};

}  // namespace bonfire::testing
