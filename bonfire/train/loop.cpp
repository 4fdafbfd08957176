#include "bonfire/train/loop.h"

#include <c10/util/Exception.h>

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

  for (std::int64_t step = 1; step <= config.train.steps; ++step) {
    tracer.begin_step(step);
    const double lr = run.learning_rate.at(step - 1);
    run.trainee->set_lr(lr);

    const StepBatches batches = next_batches(run, tracer);
    const StepLoss loss = forward_backward(run, batches, step, tracer);
    const StepResult update = update_parameters(run, loss, tracer);
    journal.end_step({.step = step, .loss = loss.mean, .grad_norm = update.gradient_norm, .lr = lr}, update.skipped);
    tracer.end_step(step);

    if (config.train.eval_every > 0 && step % config.train.eval_every == 0) journal.add_evaluation(evaluate(run));
    journal.write_step();
    enforce_nan_policy(run, step, loss, update);
  }
  return journal.finish();
} catch (const MemoryRefused& refused) {
  fail_for_memory(config, refused.what());
} catch (const c10::OutOfMemoryError& refused) {
  const std::string words = refused.what_without_backtrace();
  fail_for_memory(config, words.substr(0, words.find('\n')));
}

}  // namespace bonfire
