#include "bonfire/train/predict.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include <fmt/format.h>

#include "bonfire/models/model.h"
#include "bonfire/plan/memory_table.h"
#include "bonfire/train/build.h"
#include "bonfire/train/selection.h"
#include "bonfire/train/whole_model.h"
#include "tests/support/ranks.h"
#include "tests/support/small_net.h"

// What the configuration alone says a rank holds, against the buffers that a rank really has.
namespace bonfire::prediction_test {
namespace {

const std::map<std::string, std::string> models = {
    {"llama",
     "[model]\ntype = \"llama\"\ndim = 20\nlayers = 2\nheads = 2\nffn = 23\nvocab = 41\n[data]\nsequence = 6\nbranching = "
     "4\n"},
    {"gpt2",
     "[model]\ntype = \"gpt2\"\ndim = 18\nlayers = 2\nheads = 2\nvocab = 41\ntied = true\n[data]\nsequence = 6\nbranching "
     "= 4\n"},
    {"mlp", "[model]\ntype = \"mlp\"\ndim = 17\nlayers = 2\ninputs = 13\nclasses = 5\n"},
    {"vgg",
     "[model]\ntype = \"vgg\"\nimage = 8\nchannels = 1\nconvolutions = [5, 0, 7, 0]\npool = 2\nffn = 17\nclasses = 5\n"}};

// A Unit of its own, and parts of one that is trained.
const std::map<std::string, std::string> some_frozen = {{"llama", "['blocks.0', 'blocks.*.attention']"},
                                                        {"gpt2", "['blocks.0', 'blocks.*.*.*.bias']"},
                                                        {"mlp", "['blocks.0', 'blocks.*.feed.up']"},
                                                        {"vgg", "['blocks.0', '*.*.weight']"}};

struct Held {
  std::int64_t parameters = 0, gradients = 0, optimizer = 0;
};

std::int64_t bytes_of(const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.storage().nbytes()); }

Held held_by(const Run& run) {
  Held held{.optimizer = run.whole().optimizer->state_bytes()};
  for (const auto& flat : run.whole().engine.flats()) {
    held.parameters += bytes_of(flat->held(0));
    for (const auto& share : flat->trained()) {
      if (share.low_precision().defined()) held.parameters += bytes_of(share.master);
      held.gradients += bytes_of(share.gradient);
    }
  }
  return held;
}

class Prediction : public ::testing::TestWithParam<std::string> {};

TEST_P(Prediction, OfParametersGradientsAndOptimizerStateIsExact) {
  for (const char* precision : {"fp32", "bf16"}) {
    for (const char* optimizer : {"adamw", "sgd"}) {
      // One bucket, and so many that padding counts.
      for (const char* bucket : {"25", "0.001"}) {
        const std::string what = fmt::format("{} {} bucket_mb {}", precision, optimizer, bucket);
        Config config = parse_config(models.at(GetParam()), "a.toml",
                                     {"run.device=cpu", "train.batch=4", fmt::format("train.precision={}", precision),
                                      fmt::format("optimizer.type={}", optimizer),
                                      fmt::format("layout.bucket_mb={}", bucket), "layout.first_bucket_mb=0.0005"});
        resolve(config, 2);
        const plan::ModelState predicted = predict_memory(config).state;
        testing::run_ranks(2, [&](World& world) {
          bonfire::Run run(world, config);
          // The first backward teaches the order of the buckets; the second step uses it.
          for (int step = 0; step < 2; ++step) {
            const auto batches = run.loader.next();
            const auto& batch = batches->microbatches.at(0);
            run.whole().engine.backward(run.whole().model->loss(batch.input, batch.target));
            run.whole().optimizer->step({});
          }
          const Held held = held_by(run);
          EXPECT_GT(held.optimizer, 0) << what;
          EXPECT_EQ(predicted.parameters + predicted.masters, held.parameters) << what;
          EXPECT_EQ(predicted.gradients, held.gradients) << what;
          EXPECT_EQ(predicted.optimizer, held.optimizer) << what;
        });
      }
    }
  }
}

// The same for every way to divide four ranks, with every parameter trained and with some that are not, in Units of their
// own and in Units with trained ones. What is predicted is what `bonfire plan --memory` prints in the file's row.
TEST_P(Prediction, OfEveryDivisionIsExact) {
  std::vector<Config> configs;
  for (const auto& [shard, what] : testing::divisions())
    for (const char* precision : {"fp32", "bf16"})
      for (const std::string& freeze : {std::string("[]"), some_frozen.at(GetParam())}) {
        configs.push_back(
            parse_config(models.at(GetParam()), "a.toml",
                         {"run.device=cpu", "train.batch=4", fmt::format("layout.replicate={}", 4 / shard),
                          fmt::format("layout.shard={}", shard), fmt::format("layout.sharded={}", plan::name_of(what)),
                          fmt::format("train.precision={}", precision), fmt::format("train.freeze={}", freeze)}));
        resolve(configs.back(), 4);
      }
  testing::run_ranks(4, [&](World& world) {
    for (const auto& config : configs) {
      const auto table =
          plan::memory_table(wrapped_model_of(config), data_parallel_of(config), memory_options_of(config), world.size());
      const auto row = std::find_if(table.begin(), table.end(), [](const plan::MemoryRow& one) { return one.given; });
      ASSERT_NE(row, table.end());
      const auto& predicted = row->state;

      bonfire::Run run(world, config);
      for (int step = 0; step < 2; ++step) {
        const auto batches = run.loader.next();
        run.whole().engine.backward(
            run.whole().model->loss(batches->microbatches.at(0).input, batches->microbatches.at(0).target));
        run.whole().optimizer->step({});
      }
      const Held held = held_by(run);
      const std::string what = fmt::format("F = {}, {}, {}, {} frozen", config.layout.shard, config.layout.sharded,
                                           config.train.precision, config.train.freeze.empty() ? "none" : "some");
      EXPECT_GT(held.optimizer, 0) << what;
      EXPECT_EQ(predicted.parameters + predicted.masters, held.parameters) << what;
      EXPECT_EQ(predicted.gradients, held.gradients) << what;
      EXPECT_EQ(predicted.optimizer, held.optimizer) << what;
    }
  });
}

// Where parameters are not sharded, no more of them exist twice while the model is built than one buffer has: with frozen
// blocks and without optimizer state that is the peak of the run.
TEST_P(Prediction, OfTheBuildingIsExact) {
  for (const char* precision : {"fp32", "bf16"})
    for (const std::string& freeze : {std::string("[]"), some_frozen.at(GetParam())}) {
      Config config = parse_config(models.at(GetParam()), "a.toml",
                                   {"run.device=cpu", "train.batch=4", fmt::format("train.precision={}", precision),
                                    "optimizer.type=sgd", "optimizer.momentum=0", fmt::format("train.freeze={}", freeze),
                                    "layout.bucket_mb=0.002", "layout.first_bucket_mb=0.001"});
      resolve(config, 1);
      const auto predicted = static_cast<double>(predict_memory(config).building);
      // One rank: they are threads of one process here, which all have one meter.
      testing::run_ranks(1, [&](World& world) {
        const bonfire::Run run(world, config);
        EXPECT_NEAR(static_cast<double>(run.memory.peak()), predicted, 1024) << precision << " " << freeze;
      });
    }
}

INSTANTIATE_TEST_SUITE_P(Models, Prediction, ::testing::Values("llama", "gpt2", "mlp", "vgg"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace bonfire::prediction_test
