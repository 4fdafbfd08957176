#include "bonfire/train/predict.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

#include <fmt/format.h>

#include "bonfire/models/model.h"
#include "bonfire/train/build.h"
#include "tests/support/ranks.h"

// What the configuration alone says a rank holds, against the buffers that a rank really has.
namespace bonfire {
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

struct Held {
  std::int64_t parameters = 0, gradients = 0, optimizer = 0;
};

std::int64_t bytes_of(const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.storage().nbytes()); }

Held held_by(const Run& run) {
  Held held{.optimizer = run.optimizer->state_bytes()};
  for (const auto& flat : run.engine.flats()) {
    held.parameters += bytes_of(flat->held(0));
    for (const auto& share : flat->trained()) {
      if (share.low_precision.defined()) held.parameters += bytes_of(share.master);
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
            run.engine.backward(run.model->loss(batch.input, batch.target));
            run.optimizer->step({});
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

INSTANTIATE_TEST_SUITE_P(Models, Prediction, ::testing::Values("llama", "gpt2", "mlp", "vgg"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace bonfire
