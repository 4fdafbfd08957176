#include "tests/random/engine_run.h"

#include <cmath>
#include <memory>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "bonfire/shard/build_scope.h"
#include "bonfire/shard/engine.h"
#include "tests/random/optimizer_of.h"
#include "tests/random/plain.h"
#include "tests/random/refusal.h"

namespace bonfire::cases {

namespace {

ShardOptions options_of(const EngineCase& each, const PlainRun& plain) {
  const auto& asked = each.options;
  ShardOptions options{.what = asked.what, .prefetch = asked.prefetch};
  options.reshard_after_forward = asked.reshard_ranks > 0 ? ReshardAfterForward(asked.reshard_ranks) : asked.reshard;
  if (asked.prefetch_after_reduction) options.backward_prefetch = BackwardPrefetch::after_reduction;
  if (asked.full_accumulation) options.accumulation = Accumulation::full;
  options.offload = asked.offload;
  auto& wrapping = options.wrapping;
  switch (asked.wrap) {
    case Wrap::every: break;
    case Wrap::two_at_once: wrapping.all_in_one = true; [[fallthrough]];
    case Wrap::types: wrapping.types = {"Beta"}; break;
    case Wrap::unknown_type: wrapping.types = {"Gamma"}; break;
    case Wrap::min_parameters: wrapping.min_parameters = 40; break;
    case Wrap::predicate:
      wrapping.predicate = [](const std::string& path, torch::nn::Module&) { return path.size() % 2 == 0; };
      break;
    case Wrap::all_in_one: wrapping.all_in_one = true; break;
    case Wrap::apart: wrapping.apart = {{plain.chosen}}; break;
    case Wrap::ignored: wrapping.ignored_parameters = {plain.chosen}; break;
  }
  if (asked.bucket_bytes > 0)
    options.buckets = {.bucket_bytes = asked.bucket_bytes, .first_bucket_bytes = asked.first_bucket_bytes};
  options.negotiate_order = asked.negotiate;
  options.start = asked.broadcast ? Start::broadcast : Start::check;
  options.debug = asked.debug;
  options.patience = std::chrono::milliseconds(100);
  options.log = Log::silent();
  return options;
}

// One rank's part of a case.
class Trainee {
 public:
  Trainee(const EngineCase& each, const PlainRun& plain, const World& world)
      : each_(each), plain_(plain), rank_(world.rank()) {
    const Mesh mesh = world.mesh({.replicate = each.ranks / each.factor, .shard = each.factor});
    const auto options = options_of(each, plain);
    Random random = Random(each.seed).fork("weights");
    if (each.options.broadcast && rank_ > 0) random = random.fork(static_cast<std::uint64_t>(rank_));
    Nursery nursery{.model = each.model, .random = random};
    std::optional<Build> building;
    if (each.options.build_scope) building.emplace(mesh, options);
    model_ = make_part(each.model.root, nursery, "");
    building.reset();
    for (const auto& item : model_->named_parameters()) built_[item.key()] = item.value().requires_grad();
    engine_.emplace(shard(mesh, static_cast<torch::nn::Module&>(*model_), options));
    optimizer_ = optimizer_of(each.update, *engine_);
  }

  void run() {
    for (int at = 0; at < static_cast<int>(each_.script.size()); ++at) {
      event(at);
      if (ended_) return;
      const bool last = at + 1 == static_cast<int>(each_.script.size());
      if (last) engine_->check_equal();
      if (last || each_.look_often || each_.script[static_cast<std::size_t>(at)].act == Act::read) compare_weights(at);
    }
  }

 private:
  void event(int at) {
    const auto& event = each_.script[static_cast<std::size_t>(at)];
    const auto& record = plain_.events[static_cast<std::size_t>(at)];
    const Place here{.event = at, .rank = rank_};
    next_loss_ = 0;
    switch (event.act) {
      case Act::train:
        set_frozen(event.frozen);
        for (int number = 0; number < event.microbatches; ++number)
          differentiate({at, rank_, number}, number + 1 == event.microbatches);
        return step(at);
      case Act::backward_twice:
        differentiate({at, rank_, 0}, true);
        if (backward_may_repeat(each_)) {
          differentiate({at, rank_, 1}, true);
          return step(at);
        }
        must_throw(at, "a second backward before the step", [&] { differentiate({at, rank_, 1}, true); });
        ended_ = true;
        return;
      case Act::accumulate_step:
        for (int number = 0; number < event.microbatches; ++number) differentiate({at, rank_, number}, false);
        step_must_throw(at, "a step after accumulate alone");
        // The error has changed nothing.
        differentiate({at, rank_, event.microbatches}, true);
        return step(at);
      case Act::step_alone: return step_must_throw(at, "a step without a backward");
      case Act::evaluate: {
        const at::NoGradGuard no_grad;
        const auto output = model_->forward(input_of(each_, here), context_of(each_, here))[0];
        if (const double away = distance(output, record.outputs[static_cast<std::size_t>(rank_)]);
            !(away <= record.tolerance))
          throw Mismatch(fmt::format("event {}: an evaluation is {:.1e} of its size away", at, away));
        return;
      }
      case Act::drop: model_->forward(input_of(each_, here), context_of(each_, here)); return;
      case Act::read: return;
      case Act::write: {
        const auto whole = engine_->full_parameters(/*write=*/true);
        const at::NoGradGuard no_grad;
        for (auto& item : model_->named_parameters())
          if (plain_.names.at(item.key()) == item.key()) item.value().mul_(0.9);
        return;
      }
      case Act::throw_forward: {
        auto context = context_of(each_, here);
        context.throws = Context::Throws::in_forward;
        must_throw(at, "a forward that throws", [&] { model_->forward(input_of(each_, here), context); });
        return step_must_throw(at, "a step after a forward that threw");
      }
      case Act::throw_backward: {
        for (int number = 0; number + 1 < event.microbatches; ++number) differentiate({at, rank_, number}, false, true);
        auto context = context_of(each_, here);
        context.throws = Context::Throws::in_backward;
        const auto loss = loss_of(each_, model_->forward(input_of(each_, here), context), here, false);
        must_throw(at, "a backward that throws", [&] { engine_->backward(loss); });
        return step_must_throw(at, "a step after a backward that threw");
      }
      case Act::throw_on_one: return throw_on_one(at);
    }
  }

  void throw_on_one(int at) {
    const Place here{.event = at, .rank = rank_};
    auto context = context_of(each_, here);
    if (rank_ + 1 == each_.ranks) context.throws = Context::Throws::in_backward;
    const auto loss = loss_of(each_, model_->forward(input_of(each_, here), context), here, false);
    ended_ = true;
    try {
      engine_->backward(loss);
      // Where nothing was left to wait for, in the next collective.
      engine_->check_equal();
      const auto whole = engine_->full_parameters();
    } catch (const std::exception& error) {
      const std::string words = error.what();
      if (words.find("asked to throw in backward") != std::string::npos) return;
      throw Mismatch(fmt::format("event {}: a rank threw, and another heard: {}", at, first_line(words)));
    }
    throw Mismatch(fmt::format("event {}: a rank threw, and another did not hear of it", at));
  }

  StepOptions step_options() const { return {.clip = each_.update.clip, .clip_value = each_.update.clip_value}; }

  void step(int at) {
    const auto result = optimizer_->step(step_options());
    const auto& record = plain_.events[static_cast<std::size_t>(at)];
    const double should_be = record.norm;
    if (each_.update.clip > 0 &&
        !(std::abs(result.gradient_norm - should_be) <= record.tolerance * std::max(0.1, should_be)))
      throw Mismatch(
          fmt::format("event {}: the norm of the gradients is {}, of plain torch {}", at, result.gradient_norm, should_be));
  }

  // `unseen`: the oracle does not do it.
  void differentiate(const Place& place, bool last, bool unseen = false) {
    const auto losses = losses_of(each_, *model_, place, context_of(each_, place));
    for (std::size_t at = 0; at < losses.size(); ++at) {
      const bool kept = at + 1 < losses.size();
      if (!unseen) compare_loss(place.event, losses[at]);
      if (kept || !last)
        engine_->accumulate(losses[at], {.retain_graph = kept});
      else
        engine_->backward(losses[at]);
    }
  }

  void compare_loss(int event, const at::Tensor& loss) {
    const auto& record = plain_.events[static_cast<std::size_t>(event)];
    const double should_be = record.losses[static_cast<std::size_t>(rank_)].at(next_loss_++), is = loss.item<double>();
    if (!(std::abs(is - should_be) <= record.tolerance * std::max(1.0, std::abs(should_be))))
      throw Mismatch(fmt::format("event {}: loss {} is {}, of plain torch {}", event, next_loss_ - 1, is, should_be));
  }

  template <class Body>
  void must_throw(int at, const char* what, const Body& body) {
    try {
      body();
    } catch (const Mismatch&) {
      throw;
    } catch (const std::exception& error) {
      if (is_timeout(error.what())) throw;
      return;
    }
    throw Mismatch(fmt::format("event {}: {} was not refused", at, what));
  }

  // Where nothing is trained there is nothing to wait for.
  void step_must_throw(int at, const char* what) {
    const bool ignores = each_.options.wrap == Wrap::ignored;
    for (const auto& item : model_->named_parameters())
      if (item.value().requires_grad() && item.value().numel() > 0 &&
          !(ignores && plain_.names.at(item.key()) == plain_.chosen))
        return must_throw(at, what, [&] { optimizer_->step(step_options()); });
  }

  void set_frozen(int pattern) {
    if (pattern > 0) return freeze(each_, *model_, plain_.names, pattern);
    for (auto& item : model_->named_parameters()) item.value().set_requires_grad(built_.at(item.key()));
  }

  void compare_weights(int at) {
    const auto whole = engine_->full_parameters();
    double worst = 0;
    std::string where;
    const auto& record = plain_.events[static_cast<std::size_t>(at)];
    for (const auto& item : model_->named_parameters()) {
      const double away = distance(item.value().detach(), record.weights.at(item.key()));
      if (away > worst) worst = away, where = item.key();
    }
    if (worst > record.tolerance)
      throw Mismatch(fmt::format("after event {}: '{}' is {:.1e} of its size away from plain torch", at, where, worst));
  }

  const EngineCase& each_;
  const PlainRun& plain_;
  int rank_;
  std::shared_ptr<PartImpl> model_;
  std::map<std::string, bool> built_;
  std::optional<Engine> engine_;
  std::unique_ptr<Optimizer> optimizer_;
  std::size_t next_loss_ = 0;
  bool ended_ = false;
};

}  // namespace

std::string run_engine_case(const EngineCase& each) {
  at::set_num_threads(1);
  PlainRun plain;
  try {
    plain = run_plainly(each);
  } catch (const std::exception& error) {
    return fmt::format("{} plain torch throws: {}", no_case, first_line(error.what()));
  }
  const Verdict verdict = verdict_of(each);
  return run_and_judge(each.ranks, [&](World& world) {
    return judge<Trainee>(verdict, "shard()", [&](std::optional<Trainee>& trainee) { trainee.emplace(each, plain, world); });
  });
}

}  // namespace bonfire::cases
