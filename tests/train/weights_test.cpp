// Runs that begin with the weights of another one.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "bonfire/checkpoint/compare.h"
#include "bonfire/train/weights.h"
#include "tests/support/thrown.h"
#include "tests/train/loop_fixture.h"

namespace bonfire::weights_test {
namespace {

using testing::common;
using testing::expect_part;
using testing::Loop;
using testing::models;
using testing::thrown;
using Overrides = std::vector<std::string>;

class Weights : public Loop {
 protected:
  // The checkpoint of a run that learns nothing: what it has begun with.
  std::string begun_with(const char* model, int ranks, Overrides more) {
    more.insert(more.end(), {"optimizer.lr=0", "train.steps=1"});
    const auto outcome = run(model, ranks, more);
    EXPECT_EQ(outcome.error, "");
    return outcome.report.checkpoint;
  }
  static std::set<std::string> different(const std::string& first, const std::string& second) {
    std::set<std::string> names;
    for (const auto& one : compare_checkpoints(first, second))
      if (one.kind == "value") names.insert(one.name);
    return names;
  }
  std::string refusal(const char* model, Overrides more) const {
    return thrown<ConfigError>([&] {
      Config config = parse_config(models.at(model) + common, "a.toml", more);
      resolve(config, 2);
      check_weights(config, LookAt::files);
    });
  }
};

TEST_F(Weights, AllOfThemOnAnyLayout) {
  const auto trained = run("gpt2", 2, {"layout.shard=2"}).report.checkpoint;
  EXPECT_FALSE(different(trained, begun_with("gpt2", 1, {})).empty());
  for (const auto& layout :
       {Overrides{}, Overrides{"layout.shard=2"}, Overrides{"layout.pipeline=2", "train.microbatch=24"}}) {
    auto more = layout;
    more.push_back("checkpoint.weights=" + trained);
    const auto own = begun_with("gpt2", 2, more);
    EXPECT_EQ(different(trained, own), std::set<std::string>()) << (layout.empty() ? "" : layout.front());
    // Nothing else came along.
    EXPECT_EQ(std::get<std::int64_t>(read_manifest(own).states.at("run").at("samples")), 48);
  }
}

// What is compared before anything starts is what ranks save, tied weights and those of the root included.
TEST_F(Weights, EveryModelIsTheSameAsItsCheckpoint) {
  for (const auto& [model, sections] : models) {
    Config config = parse_config(sections + common, "a.toml", {"run.device=cpu"});
    resolve(config, 1);
    const auto manifest = read_manifest(begun_with(model.c_str(), 2, {}));
    EXPECT_EQ(differences_of_parameters(config, manifest, [](const std::string&) { return true; }), "") << model;
  }
}

TEST_F(Weights, PartOfThemByName) {
  const auto trained = run("mlp", 1, {}).report.checkpoint, fresh = begun_with("mlp", 1, {});
  const auto own = begun_with("mlp", 2, {"checkpoint.weights=" + trained, "checkpoint.weights_of=[\"blocks.*.feed\"]"});
  const auto learned = different(trained, fresh), taken = different(own, fresh), left = different(own, trained);
  EXPECT_FALSE(taken.empty());
  EXPECT_FALSE(left.empty());
  for (const auto& name : learned) EXPECT_EQ(taken.contains(name), name.find(".feed.") != std::string::npos) << name;
  for (const auto& name : learned) EXPECT_EQ(left.contains(name), name.find(".feed.") == std::string::npos) << name;
}

TEST_F(Weights, OfAnotherModelAreRefusedBeforeAnythingStarts) {
  const auto trained = run("mlp", 1, {}).report.checkpoint;
  const std::string from = "checkpoint.weights=" + trained;
  EXPECT_EQ(refusal("mlp", {from}), "");
  const auto wider = refusal("mlp", {from, "model.dim=32"});
  expect_part(wider, "checkpoint.weights = ");
  expect_part(wider, "of other shapes: ");
  expect_part(wider, "is [");
  expect_part(refusal("mlp", {from, "model.layers=3"}), "missing in the checkpoint: blocks.2.");
  expect_part(refusal("mlp", {from, "model.layers=1"}), "unexpected in the checkpoint: blocks.1.");
  // What is not asked for may be anything.
  EXPECT_EQ(refusal("mlp", {from, "model.layers=1", "checkpoint.weights_of=[\"blocks.0\"]"}), "");
  expect_part(refusal("mlp", {from, "checkpoint.weights_of=[\"block\"]"}), "names no parameter of this model");
  expect_part(refusal("mlp", {"checkpoint.weights_of=[\"blocks\"]"}), "needs checkpoint.weights");
  expect_part(refusal("mlp", {"checkpoint.weights=nowhere"}), "there is no complete checkpoint");
}

}  // namespace
}  // namespace bonfire::weights_test
