#include "bonfire/train/loop.h"

#include <deque>
#include <new>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/stop_vote.h"
#include "bonfire/train/build.h"
#include "bonfire/train/evaluate.h"
#include "bonfire/train/journal.h"
#include "bonfire/train/memory_need.h"
#include "bonfire/train/saving.h"
#include "bonfire/train/served_run.h"
#include "bonfire/train/step.h"
#include "bonfire/train/tracer.h"

namespace bonfire {

TrainReport train(const World& world, const Config& config, const TrainOptions& options) try {
  if (world.rank() == 0) world.log().info("layout: {}", layout_line(config));
  if (config.layout.server > 0) return train_served(world, config, options);
  Run run(world, config);
  Saving saving(run, options);
  const std::int64_t first = saving.resume() + 1;
  Journal journal(run, options, first);
  Tracer tracer(world, config, options.folder / "trace.json");

  const auto evaluates = [&](std::int64_t step) {
    return config.train.eval_every > 0 && step % config.train.eval_every == 0;
  };
  // False: the run goes back to its newest checkpoint.
  const auto conclude = [&](StepTaken step) {
    read(run, step);
    run.skipped += step.update.skipped ? 1 : 0;
    journal.end_step({.step = step.step,
                      .loss = step.loss.mean,
                      .grad_norm = step.update.gradient_norm,
                      .lr = step.lr,
                      .skipped = run.skipped,
                      .staleness = step.staleness,
                      .stale_stages = step.stale_stages},
                     step.seconds);
    tracer.end_step(step.step);
    if (evaluates(step.step)) journal.add_evaluation(evaluate(run));
    journal.write_step();
    if (!enforce_nan_policy(run, step)) return false;
    if (saving.due(step.step)) saving.save(step.step);
    return true;
  };
  const auto finish = [&] {
    const std::string checkpoint = saving.finish();
    return journal.finish(checkpoint, saving.saves());
  };

  // A step that a device does alone, or that overlaps with those behind it, is concluded when these are under way, so that
  // nobody waits for it.
  std::deque<StepTaken> running;
  // Those that have begun, but for so many. False: the run goes back; then nothing is running.
  const auto conclude_running = [&](std::size_t but) {
    while (running.size() > but) {
      StepTaken step = std::move(running.front());
      running.pop_front();
      if (conclude(std::move(step))) continue;
      // They have been for nothing, but they must have ended.
      for (auto& other : running) read(run, other);
      running.clear();
      return false;
    }
    return true;
  };
  bool stopping = false;
  for (std::int64_t step = first; step <= config.train.steps; ++step) {
    tracer.begin_step(step);
    const StepBatches batches = next_batches(run, tracer);
    saving.begin_step(step);
    running.push_back(take_step(run, batches, step, tracer));
    const bool something_follows =
        evaluates(step) || saving.drains(step) || step == config.train.steps || tracer.traces(step + 1);
    const bool settles = !running.back().reading || (something_follows && run.trainee->can_drain());
    if (settles) run.trainee->drain();
    bool goes_on = conclude_running(settles ? 0 : static_cast<std::size_t>(run.trainee->readings_behind()));
    if (goes_on && options.stop && step < config.train.steps) {
      stopping = stopping || options.stop->is_last(step);
      if (stopping && run.trainee->can_drain()) {
        run.trainee->drain();
        goes_on = conclude_running(0);
        if (goes_on) {
          saving.save_last(step);
          TrainReport report = finish();
          report.stopped = true;
          return report;
        }
      }
    }
    if (!goes_on) {
      step = saving.go_back(journal.step());
      journal.go_back(step);
    }
  }
  require(running.empty(), "the run ends with {} steps that are not done", running.size());
  return finish();
} catch (const MemoryRefused& refused) {
  fail_for_memory(config, refused.what());
} catch (const c10::Error& error) {
  // The host's allocator throws no type of its own.
  const std::string words = error.what_without_backtrace();
  const auto host = words.find("DefaultCPUAllocator: ");
  if (host == std::string::npos && dynamic_cast<const c10::OutOfMemoryError*>(&error) == nullptr) throw;
  const auto said = host == std::string::npos ? words : words.substr(host);
  fail_for_memory(config, said.substr(0, said.find('\n')));
} catch (const std::bad_alloc&) {
  fail_for_memory(config, "the host has none left");
}

}  // namespace bonfire
