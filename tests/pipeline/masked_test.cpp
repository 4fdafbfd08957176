// Masked targets: the loss is the mean over all targets of a step that are not masked, however ranks and microbatches share
// them. The oracle is one rank with one batch, and torch's own mean.
#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "bonfire/comm/recorder.h"
#include "bonfire/data/loader.h"
#include "bonfire/models/model.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/pipeline/pipedream.h"
#include "bonfire/pipeline/pipeline.h"
#include "bonfire/plan/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/mean_scale.h"
#include "tests/support/pipeline_training.h"
#include "tests/support/ranks.h"
#include "tests/support/thrown.h"
#include "tests/support/tiny_training.h"

namespace bonfire::masked_test {
namespace {

using testing::run_ranks;

constexpr std::int64_t samples = 12, ignored = -100;
constexpr int steps = 4;
constexpr double rate = 0.1;

plan::ModelSpec llama() {
  auto spec = testing::tiny_models()[3].spec;
  spec.layers = 4;
  return spec;
}

// Samples [begin, begin + count) of a step: uneven numbers of targets for each, none at all of some. With 2 ranks of 3
// microbatches each, one is masked in the first step; in the second all of a rank's, in the third everything.
Batch batch_of(int step, std::int64_t begin, std::int64_t count) {
  auto [input, target] = testing::tiny_data(llama(), step, begin, count);
  target = target.clone();
  for (std::int64_t at = 0; at < count; ++at) {
    const auto sample = begin + at;
    for (std::int64_t place = 0; place < target.size(1); ++place)
      if ((sample * 7 + place * 3 + step) % (3 + sample % 4) < 2) target[at][place] = ignored;
    if ((step == 0 && sample / 2 == 1) || (step == 1 && sample >= samples / 2) || step == 2) target[at].fill_(ignored);
  }
  return {input, target, {}};
}

double count_of(const at::Tensor& target) { return target.ne(ignored).sum().item<double>(); }

at::Tensor torch_loss(const at::Tensor& logits, const at::Tensor& target, at::Reduction::Reduction reduction) {
  return at::cross_entropy_loss(logits.flatten(0, -2), target.flatten(), {}, reduction, ignored);
}

struct Trained {
  std::vector<double> losses;
  std::vector<double> evaluated;  // after all steps, of each step's samples
  std::map<std::string, at::Tensor> weights;
};

const Trained& oracle() {
  static const Trained trained = [] {
    auto model = build_model(llama(), {.seed = 5, .dtype = at::kDouble});
    Trained run;
    for (int step = 0; step < steps; ++step) {
      const auto batch = batch_of(step, 0, samples);
      if (count_of(batch.target) == 0) {
        run.losses.push_back(0);
        continue;
      }
      const auto loss = torch_loss(model->forward(batch.input), batch.target, at::Reduction::Mean);
      run.losses.push_back(loss.item<double>());
      loss.backward();
      const at::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.sub_(parameter.grad() * rate), parameter.mutable_grad().reset();
    }
    const at::NoGradGuard no_grad;
    for (int step = 0; step < steps; ++step) {
      const auto batch = batch_of(step, 0, samples);
      const bool any = count_of(batch.target) > 0;
      run.evaluated.push_back(any ? torch_loss(model->forward(batch.input), batch.target, at::Reduction::Mean).item<double>()
                                  : 0);
    }
    for (const auto& item : model->named_parameters()) run.weights[item.key()] = item.value().detach();
    return run;
  }();
  return trained;
}

void expect_near(const std::vector<double>& losses, const std::vector<double>& expected) {
  ASSERT_EQ(losses.size(), expected.size());
  for (std::size_t step = 0; step < losses.size(); ++step)
    EXPECT_NEAR(losses[step], expected[step], 1e-12 * expected[step]) << "step " << step;
}

void expect_weights(torch::nn::Module& module) {
  for (const auto& item : module.named_parameters())
    EXPECT_LT((item.value().detach() - oracle().weights.at(item.key())).abs().max().item<double>(), 1e-12) << item.key();
}

struct DataLayout {
  const char* name;
  MeshShape shape;
  Sharded what = Sharded::none;
  Accumulation accumulation = Accumulation::sharded;
  int microbatches = 1;
};

class MaskedTargets : public ::testing::TestWithParam<DataLayout> {};

TEST_P(MaskedTargets, OfDataParallelRanksAreThoseOfOneRank) {
  const auto& [name, shape, what, accumulation, microbatches] = GetParam();
  run_ranks(shape.size(),
            [&, shape = shape, what = what, accumulation = accumulation, microbatches = microbatches](World& world) {
              auto model = build_model(llama(), {.seed = 5, .dtype = at::kDouble});
              Engine engine = shard(world.mesh(shape), *model, {.what = what, .accumulation = accumulation});
              Sgd sgd(engine, {.lr = rate});
              const std::int64_t each = samples / world.size() / microbatches;
              std::vector<double> losses;
              for (int step = 0; step < steps; ++step) {
                std::vector<Batch> batches;
                double count = 0, sum = 0;
                for (int at = 0; at < microbatches; ++at) {
                  batches.push_back(batch_of(step, (world.rank() * microbatches + at) * each, each));
                  count += count_of(batches.back().target);
                }
                const double scale = mean_scale(engine, count);
                for (int at = 0; at < microbatches; ++at) {
                  const auto& batch = batches[static_cast<std::size_t>(at)];
                  const auto loss = torch_loss(model->forward(batch.input), batch.target, at::Reduction::Sum) * scale;
                  sum += loss.item<double>();
                  at + 1 < microbatches ? engine.accumulate(loss) : engine.backward(loss);
                }
                sgd.step();
                losses.push_back(world.group().sum(sum) / world.size());
              }
              expect_near(losses, oracle().losses);
              const auto whole = engine.full_parameters();
              expect_weights(*model);
            });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, MaskedTargets,
    ::testing::Values(DataLayout{"one_rank", {}}, DataLayout{.name = "accumulation", .shape = {}, .microbatches = 3},
                      DataLayout{"ddp", {.replicate = 2}},
                      DataLayout{.name = "ddp_accumulation", .shape = {.replicate = 2}, .microbatches = 3},
                      DataLayout{.name = "zero1", .shape = {.shard = 2}, .what = Sharded::optimizer, .microbatches = 3},
                      DataLayout{.name = "zero2", .shape = {.shard = 2}, .what = Sharded::gradients, .microbatches = 3},
                      DataLayout{.name = "zero2_full",
                                 .shape = {.shard = 2},
                                 .what = Sharded::gradients,
                                 .accumulation = Accumulation::full,
                                 .microbatches = 3},
                      DataLayout{.name = "zero3", .shape = {.shard = 2}, .what = Sharded::parameters, .microbatches = 3},
                      DataLayout{"hybrid", {.replicate = 2, .shard = 2}, Sharded::parameters}),
    [](const auto& info) { return std::string(info.param.name); });

struct PipelineLayout {
  const char* name;
  const char* schedule;
  MeshShape shape;
  Sharded what = Sharded::none;
  bool own_loss = false;  // of our kernels, in the place of torch's
};

class MaskedPipeline : public ::testing::TestWithParam<PipelineLayout> {};

Chain masked_chain(bool own_loss) {
  Chain chain = testing::chain_of_model(llama(), {});
  if (own_loss) return chain;
  chain.build = [](UnitRange units) {
    auto model =
        build_model(plan::part_of(plan::describe(llama()), units.begin, units.end), {.seed = 5, .dtype = at::kDouble});
    return StageModule{model, [model](Tensors values, const Microbatch& microbatch) {
                         const auto out = model->forward(values[0]);
                         return Tensors{model->head() ? torch_loss(out, microbatch.target[0], at::Reduction::Mean) : out};
                       }};
  };
  return chain;
}

TEST_P(MaskedPipeline, IsThatOfOneRank) {
  const auto& layout = GetParam();
  constexpr int microbatches = 6;
  run_ranks(layout.shape.size(), [&](World& world) {
    const Mesh mesh = world.mesh(layout.shape);
    PipelineOptions options{
        .schedule = schedule::generate(layout.schedule, {.ranks = layout.shape.pipeline,
                                                         .microbatches = microbatches / layout.shape.along(Axis::data),
                                                         .chunks = schedule::natural_chunks(layout.schedule)}),
        .schedule_name = layout.schedule};
    options.shard.what = layout.what;
    Pipeline pipeline(mesh, masked_chain(layout.own_loss), options);
    std::vector<std::unique_ptr<Sgd>> optimizers;
    for (const int stage : pipeline.local_stages())
      optimizers.push_back(std::make_unique<Sgd>(pipeline.engine(stage), SgdOptions{.lr = rate}));
    const auto& data = mesh.group(Axis::data);
    const auto microbatches_of = [&](int step) {
      std::vector<Microbatch> list;
      const int each = microbatches / data.size();
      for (int at = 0; at < each; ++at) {
        const auto batch = batch_of(step, (data.rank() * each + at) * 2, 2);
        list.push_back({.input = {batch.input}, .target = {batch.target}, .weight = count_of(batch.target)});
      }
      return list;
    };
    const auto mean_of = [&](const PipelineReport& report) {
      const double all = data.sum(report.weight), sum = data.sum(report.loss * report.weight);
      return all > 0 ? sum / all : 0;
    };
    std::vector<double> losses, evaluated;
    for (int step = 0; step < steps; ++step) {
      losses.push_back(mean_of(pipeline.step(microbatches_of(step))));
      for (auto& optimizer : optimizers) optimizer->step();
    }
    for (int step = 0; step < steps; ++step) evaluated.push_back(mean_of(pipeline.evaluate(microbatches_of(step))));
    expect_near(losses, oracle().losses);
    expect_near(evaluated, oracle().evaluated);
    for (const int stage : pipeline.local_stages()) {
      const auto whole = pipeline.engine(stage).full_parameters();
      expect_weights(pipeline.module(stage));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, MaskedPipeline,
    ::testing::Values(PipelineLayout{"one_f_one_b", "1f1b", {.pipeline = 2}},
                      PipelineLayout{"own_loss", "1f1b", {.pipeline = 2}, Sharded::none, true},
                      PipelineLayout{"halves", "zb-h1", {.pipeline = 2}}, PipelineLayout{"v", "zb-v", {.pipeline = 2}},
                      PipelineLayout{"own_loss_halves", "zb-h1", {.pipeline = 2, .replicate = 2}, Sharded::none, true},
                      PipelineLayout{"replicas", "1f1b", {.pipeline = 2, .replicate = 2}},
                      PipelineLayout{"zero2", "zb-h1", {.pipeline = 2, .shard = 2}, Sharded::gradients},
                      PipelineLayout{"zero3", "1f1b", {.pipeline = 2, .shard = 2}, Sharded::parameters, true}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Weights, AreSaidOfAllMicrobatchesOrOfNone) {
  run_ranks(2, [](World& world) {
    Pipeline pipeline(world.mesh({.pipeline = 2}), masked_chain(false),
                      {.schedule = schedule::generate("1f1b", {.ranks = 2, .microbatches = 2})});
    const auto refusal = [&](std::optional<double> first, std::optional<double> second) -> std::string {
      const auto batch = batch_of(3, 0, 2);
      const Microbatch like{.input = {batch.input}, .target = {batch.target}};
      std::vector<Microbatch> microbatches{like, like};
      microbatches[0].weight = first;
      microbatches[1].weight = second;
      try {
        pipeline.evaluate(microbatches);
        return "";
      } catch (const Error& error) {
        return error.what();
      }
    };
    EXPECT_EQ(refusal(1, std::nullopt),
              "microbatch 1 has no weight, and microbatch 0 has one; allowed: all of them, or none");
    EXPECT_EQ(refusal(std::nullopt, 1),
              "microbatch 1 has a weight, and microbatch 0 has none; allowed: all of them, or none");
    EXPECT_EQ(refusal(1, -2), "microbatch 1 has a weight of -2; allowed: 0 and more");
    EXPECT_EQ(refusal(1, 0), "");
  });
}

// A mean by samples would be wrong, and nothing would say so.
TEST(Weights, AreAskedForWhereTargetsAreMasked) {
  run_ranks(2, [](World& world) {
    Pipeline pipeline(world.mesh({.pipeline = 2}), masked_chain(false),
                      {.schedule = schedule::generate("1f1b", {.ranks = 2, .microbatches = 2})});
    const auto batch = batch_of(3, 0, 2);
    const Microbatch whole{.input = {batch.input}, .target = {batch.target.clamp_min(0)}};
    Microbatch masked{.input = {batch.input}, .target = {batch.target}};
    for (const bool trains : {true, false}) {
      const auto run = [&](const std::vector<Microbatch>& microbatches) {
        if (!trains) return pipeline.evaluate(microbatches).loss;
        const double loss = pipeline.step(microbatches).loss;
        for (const int stage : pipeline.local_stages()) pipeline.engine(stage).spend_gradients();
        return loss;
      };
      EXPECT_EQ(
          testing::thrown<Error>([&] {
            run({whole, masked});
          }),
          "microbatch 1 has targets of -100, which are masked, and no Microbatch::weight; allowed: on all microbatches "
          "of all ranks, the number of targets that its loss is the mean of");
      // Nothing has happened to either side.
      EXPECT_GT(run({whole, whole}), 0);
      auto both = std::vector{whole, masked};
      both[0].weight = count_of(whole.target[0]);
      both[1].weight = count_of(masked.target[0]);
      EXPECT_GT(run(both), 0);
    }
  });
}

PipeDreamOptions flushed(std::vector<int> replicas, int microbatches) {
  const auto batch = batch_of(3, 0, 2);
  PipeDreamOptions options{.example = {.input = {batch.input}, .target = {batch.target}}};
  options.robin = {.replicas = std::move(replicas), .mode = schedule::WeightMode::flush, .microbatches = microbatches};
  return options;
}

// With flushes PipeDream's equations are those of one rank.
TEST(PipeDream, MaskedTargetsAreThoseOfOneRank) {
  constexpr int each = samples / 6;
  for (const auto& replicas : {std::vector{1, 1}, {2, 1}, {1, 2}})
    for (const bool own_loss : {false, true})
      run_ranks(replicas[0] + replicas[1], [&](World& world) {
        PipeDream pipeline(world.mesh({.pipeline = world.size()}), masked_chain(own_loss), flushed(replicas, 6));
        Sgd sgd(pipeline, {.lr = rate});
        pipeline.on_update([&](const StageUpdate&) { sgd.step(); });
        const auto minibatch = [&](int step) {
          std::vector<Microbatch> list;
          for (int at = 0; at < 6; ++at) {
            const auto batch = batch_of(step, at * each, each);
            list.push_back({.input = {batch.input}, .target = {batch.target}, .weight = count_of(batch.target)});
          }
          return list;
        };
        for (int step = 0; step < steps; ++step) pipeline.admit(minibatch(step));
        pipeline.drain();
        std::vector<double> losses, evaluated;
        for (int step = 0; step < steps; ++step) losses.push_back(world.group().sum(pipeline.take_loss(step)));
        for (int step = 0; step < steps; ++step) evaluated.push_back(pipeline.evaluate(minibatch(step)));
        expect_near(losses, oracle().losses);
        expect_near(evaluated, oracle().evaluated);
        const auto whole = pipeline.engine().full_parameters();
        expect_weights(pipeline.module());
      });
}

// Nothing has happened when a minibatch is refused.
TEST(PipeDream, MaskedTargetsWithoutAWeightAreRefused) {
  run_ranks(2, [](World& world) {
    PipeDream pipeline(world.mesh({.pipeline = 2}), masked_chain(false), flushed({1, 1}, 2));
    Sgd sgd(pipeline, {.lr = rate});
    pipeline.on_update([&](const StageUpdate&) { sgd.step(); });
    const auto batch = batch_of(3, 0, 2);
    const Microbatch whole{.input = {batch.input}, .target = {batch.target.clamp_min(0)}};
    const Microbatch masked{.input = {batch.input}, .target = {batch.target}};
    for (const bool trains : {true, false}) {
      const auto run = [&](const std::vector<Microbatch>& microbatches) {
        if (!trains) return static_cast<void>(pipeline.evaluate(microbatches));
        pipeline.admit(microbatches);
        pipeline.drain();
      };
      testing::expect_part(testing::thrown<Error>([&] {
                             run({whole, masked});
                           }),
                           "microbatch 1 has targets of -100, which are masked, and no Microbatch::weight");
      run({whole, whole});
    }
    EXPECT_EQ(pipeline.updates(), 1);
  });
}

// Only the last stage's rank was given masked targets, and the other one does not wait for it for ever.
TEST(PipeDream, MaskedTargetsThatOneRankHasAllHearOf) {
  run_ranks(2, [](World& world) {
    auto options = flushed({1, 1}, 2);
    options.shard.patience = std::chrono::milliseconds(100);
    PipeDream pipeline(world.mesh({.pipeline = 2}), masked_chain(false), options);
    Sgd sgd(pipeline, {.lr = rate});
    pipeline.on_update([&](const StageUpdate&) { sgd.step(); });
    const auto batch = batch_of(3, 0, 2);
    const Microbatch mine{.input = {batch.input}, .target = {world.rank() == 1 ? batch.target : batch.target.clamp_min(0)}};
    const auto words = testing::thrown<std::exception>([&] {
      pipeline.admit({mine, mine});
      pipeline.drain();
    });
    testing::expect_part(words, "no Microbatch::weight");
  });
}

// The other replica has no masked target, and does not wait for this one for ever.
TEST(Weights, ThatOneReplicaLacksAllHearOf) {
  run_ranks(2, [](World& world) {
    Pipeline pipeline(world.mesh({.replicate = 2}), masked_chain(false),
                      {.schedule = schedule::generate("1f1b", {.ranks = 1, .microbatches = 1}),
                       .shard = {.patience = std::chrono::milliseconds(100)}});
    const auto batch = batch_of(3, 0, 2);
    const Microbatch mine{.input = {batch.input}, .target = {world.rank() == 0 ? batch.target : batch.target.clamp_min(0)}};
    testing::expect_part(testing::thrown<std::exception>([&] { pipeline.step({mine}); }), "no Microbatch::weight");
  });
}

// Law 2: the weights of a step cost one number, on the ranks that have the loss, and nothing where there are none.
TEST(Weights, CostWhatThePlanSays) {
  const MeshShape shape{.pipeline = 2, .replicate = 2};
  run_ranks(4, [&](World& world) {
    const Mesh mesh = world.mesh(shape);
    Pipeline pipeline(mesh, masked_chain(false), {.schedule = schedule::generate("1f1b", {.ranks = 2, .microbatches = 2})});
    for (const bool weighs : {false, true}) {
      std::vector<Microbatch> microbatches;
      for (int at = 0; at < 2; ++at) {
        const auto batch = batch_of(3, 2 * at, 2);
        microbatches.push_back({.input = {batch.input}, .target = {weighs ? batch.target : batch.target.clamp_min(0)}});
        if (weighs) microbatches.back().weight = count_of(batch.target);
      }
      const auto step = [&] {
        pipeline.step(microbatches);
        for (const int stage : pipeline.local_stages()) pipeline.engine(stage).spend_gradients();
      };
      step();
      world.recorder().clear();
      world.recorder().start();
      step();
      world.recorder().stop();
      plan::PipelineLayout layout{.table = pipeline.table(), .samples = {2, 2}, .tokens = 8, .weighs = weighs};
      for (const auto& range : pipeline.stages()) layout.stages.push_back({range.begin, range.end});
      layout.data = {.replicate = 2,
                     .compute = plan::Dtype::fp64,
                     .gradient = plan::Dtype::fp64,
                     .reduction = plan::Dtype::fp64,
                     .clip = false};
      auto planned = plan::collectives_of_step(plan::describe(llama()), layout, mesh.coordinate(Axis::pipeline));
      // The loop's own.
      const auto loss =
          std::find_if(planned.rbegin(), planned.rend(), [](const Collective& one) { return one.axis == Axis::data; });
      ASSERT_NE(loss, planned.rend());
      planned.erase(std::next(loss).base());
      const auto of_data = [](const std::vector<Collective>& list) {
        return std::count_if(list.begin(), list.end(), [](const Collective& one) { return one.axis == Axis::data; });
      };
      EXPECT_EQ(of_data(world.recorder().collectives()), of_data(planned)) << "rank " << world.rank();
      EXPECT_EQ(of_data(planned), weighs && mesh.coordinate(Axis::pipeline) == 1 ? 1 : 0);
    }
  });
}

}  // namespace
}  // namespace bonfire::masked_test
