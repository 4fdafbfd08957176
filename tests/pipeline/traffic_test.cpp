// What a pipeline sends, beside what data parallelism sends for the same model and batch: by the recorder and by the plan.
#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

#include <gtest/gtest.h>

#include <fmt/format.h>

#include "bonfire/base/size.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/models/model.h"
#include "bonfire/plan/pipeline.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/lowering.h"
#include "tests/support/pipeline_training.h"
#include "tests/support/ranks.h"
#include "tests/support/tiny_training.h"

namespace bonfire::traffic_test {
namespace {

constexpr int ranks = 4;

// Bytes that a rank sends in a step: its messages to other stages, the sums of tied weights, and data parallelism's.
struct Sent {
  double messages = 0, ties = 0, data = 0;
  bool operator==(const Sent&) const = default;
};

Sent sent_by(const std::vector<Collective>& list) {
  Sent sent;
  for (const auto& one : list) {
    const auto bytes = static_cast<double>(one.bytes);
    if (one.kind == CollectiveKind::send) sent.messages += bytes;
    if (one.kind == CollectiveKind::all_reduce && one.axis == Axis::pipeline) sent.ties += bus_factor(one.kind, 2) * bytes;
    if (one.axis == Axis::replicate || one.axis == Axis::shard) sent.data += bus_factor(one.kind, ranks) * bytes;
  }
  return sent;
}

plan::PipelineLayout layout_of(const plan::ModelDescription& model, const schedule::Schedule& table) {
  plan::PipelineLayout layout{.table = table};
  for (const auto& range : split_evenly(static_cast<int>(plan::chain_of(model).size()), table.stages))
    layout.stages.push_back({range.begin, range.end});
  return layout;
}

TEST(Traffic, IsThePlansInAPipelineAndInReplicas) {
  auto spec = testing::tiny_models()[2].spec;
  spec.layers = 6;
  const auto model = plan::describe(spec);
  constexpr int microbatches = 4;
  constexpr std::int64_t samples = testing::tiny_samples / microbatches, sequence = 8;
  std::mutex mutex;
  std::map<int, Sent> pipeline_sent, pipeline_planned, replicas_sent;
  testing::run_ranks(ranks, [&](World& world) {
    const auto record = [&](const std::function<void()>& step) {
      step();
      world.recorder().clear();
      world.recorder().start();
      step();
      world.recorder().stop();
      return sent_by(world.recorder().collectives());
    };
    Pipeline pipeline(world.mesh({.pipeline = ranks}), testing::chain_of_model(spec, {.dtype = at::kFloat}),
                      {.schedule = schedule::generate("1f1b", {.ranks = ranks, .microbatches = microbatches})});
    std::vector<Microbatch> batch;
    for (int at = 0; at < microbatches; ++at) {
      const auto [input, target] = testing::tiny_data(spec, 0, samples * at, samples);
      batch.push_back({.input = {input}, .target = {target}});
    }
    const auto staged = record([&] {
      pipeline.step(batch);
      for (const int stage : pipeline.local_stages()) pipeline.engine(stage).spend_gradients();
    });
    auto layout = layout_of(model, pipeline.table());
    layout.samples.assign(microbatches, samples);
    layout.tokens = sequence;

    auto replica = build_model(spec, {.seed = 5});
    Engine engine = shard(world.mesh({.replicate = ranks}), *replica, {});
    const auto [input, target] = testing::tiny_data(spec, 0, samples * world.rank(), samples);
    const auto replicated = record([&] {
      engine.backward(replica->loss(input, target));
      engine.spend_gradients();
    });
    const std::lock_guard lock(mutex);
    pipeline_sent[world.rank()] = staged;
    pipeline_planned[world.rank()] = sent_by(plan::collectives_of_step(model, layout, world.rank()));
    replicas_sent[world.rank()] = replicated;
  });
  EXPECT_EQ(pipeline_sent, pipeline_planned);
  const auto replicas_planned = sent_by(plan::collectives_of_step(model, plan::DataParallel{.replicate = ranks}));
  EXPECT_GT(replicas_planned.data, 0);
  for (const auto& [rank, sent] : replicas_sent) EXPECT_EQ(sent, replicas_planned) << "rank " << rank;

  // One value of `dim` numbers for each token goes over each cut and comes back: both ends send to one side, others to two.
  const double cut = 4.0 * static_cast<double>(testing::tiny_samples * sequence * spec.dim);
  for (const auto& [rank, sent] : pipeline_sent)
    EXPECT_EQ(sent.messages, cut * (rank == 0 || rank + 1 == ranks ? 1 : 2)) << "rank " << rank;
}

// The table of docs/pipeline.md is what the plan says.
TEST(Traffic, OfPublishedModelsIsOnThePage) {
  std::ifstream in(BONFIRE_SOURCE_DIR "/docs/pipeline.md");
  std::stringstream page;
  page << in.rdbuf();
  constexpr std::int64_t samples = 32, sequence = 1024;
  for (const auto* name : {"gpt2-124m", "gpt2-1558m", "llama2-7b"}) {
    const auto model = plan::describe(plan::published_model(name));
    const bool tied = model.spec.tied;
    auto table = schedule::generate("1f1b", {.ranks = ranks, .microbatches = samples});
    table = schedule::lower(
        table, {.reductions = true,
                .tied = tied ? std::vector<std::vector<int>>{{0, ranks - 1}} : std::vector<std::vector<int>>{}});
    auto layout = layout_of(model, table);
    layout.samples.assign(samples, 1);
    layout.tokens = sequence;
    layout.data.compute = plan::Dtype::bf16;
    Sent most;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto sent = sent_by(plan::collectives_of_step(model, layout, rank));
      most = {std::max(most.messages, sent.messages), std::max(most.ties, sent.ties)};
    }
    auto replicas = layout.data, shares = layout.data;
    replicas.replicate = ranks;
    shares.shard = ranks;
    shares.what = plan::Sharded::parameters;
    const auto words = [](double bytes) { return bytes > 0 ? format_bytes(static_cast<std::int64_t>(bytes)) : "none"; };
    const auto row = fmt::format("| {} | {} | {} | {} | {} |", name, words(most.messages), words(most.ties),
                                 words(sent_by(plan::collectives_of_step(model, replicas)).data),
                                 words(sent_by(plan::collectives_of_step(model, shares)).data));
    EXPECT_NE(page.str().find(row), std::string::npos) << row;
  }
}

}  // namespace
}  // namespace bonfire::traffic_test
