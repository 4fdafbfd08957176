#include "bonfire/train/loop.h"

#include <optional>
#include <utility>

#include <c10/util/Exception.h>

#include "bonfire/comm/stop_vote.h"
#include "bonfire/train/build.h"
#include "bonfire/train/evaluate.h"
#include "bonfire/train/journal.h"
#include "bonfire/train/memory_need.h"
#include "bonfire/train/step.h"
#include "bonfire/train/tracer.h"

namespace bonfire {

TrainReport train(const World& world, const Config& config, const TrainOptions& options) try {
  if (world.rank() == 0) world.log().info("layout: {}", layout_line(config));
  Run run(world, config);
  Journal journal(run, options);
  Tracer tracer(world, config, options.folder / "trace.json");

  const auto evaluates = [&](std::int64_t step) {
    return config.train.eval_every > 0 && step % config.train.eval_every == 0;
  };
  const auto conclude = [&](StepTaken step) {
    read(run, step);
    journal.end_step({.step = step.step, .loss = step.loss.mean, .grad_norm = step.update.gradient_norm, .lr = step.lr},
                     step.update.skipped);
    tracer.end_step(step.step);
    if (evaluates(step.step)) journal.add_evaluation(evaluate(run));
    journal.write_step();
    enforce_nan_policy(run, step);
  };

  // A step that a device does alone is concluded when the next one is under way, so that the device never waits for the
  // host.
  std::optional<StepTaken> running;
  for (std::int64_t step = 1; step <= config.train.steps; ++step) {
    tracer.begin_step(step);
    const StepBatches batches = next_batches(run, tracer);
    StepTaken taken = take_step(run, batches, step, tracer);
    if (running) conclude(std::move(*std::exchange(running, std::nullopt)));
    const bool something_follows = evaluates(step) || step == config.train.steps || tracer.traces(step + 1);
    if (taken.reading && !something_follows)
      running = std::move(taken);
    else
      conclude(std::move(taken));
    if (options.stop && step < config.train.steps && options.stop->is_last(step)) {
      if (running) conclude(std::move(*running));
      TrainReport report = journal.finish();
      report.stopped = true;
      return report;
    }
  }
  return journal.finish();
} catch (const MemoryRefused& refused) {
  fail_for_memory(config, refused.what());
} catch (const c10::OutOfMemoryError& refused) {
  const std::string words = refused.what_without_backtrace();
  fail_for_memory(config, words.substr(0, words.find('\n')));
}

}  // namespace bonfire
