#include "tests/random/engine_run.h"

#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include "bonfire/shard/build_scope.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/mean_scale.h"
#include "tests/random/optimizer_of.h"
#include "tests/random/own_options.h"
#include "tests/random/plain.h"
#include "tests/random/recomputed.h"
#include "tests/random/refusal.h"
#include "tests/random/wrapping_of.h"

namespace bonfire::cases {

namespace {

ShardOptions options_of(const EngineCase& each, const PlainRun& plain) {
  const auto& asked = each.options;
  ShardOptions options{.what = asked.what, .prefetch = asked.prefetch};
  options.reshard_after_forward = asked.reshard_ranks > 0 ? ReshardAfterForward(asked.reshard_ranks) : asked.reshard;
  if (asked.prefetch_after_reduction) options.backward_prefetch = BackwardPrefetch::after_reduction;
  if (asked.full_accumulation) options.accumulation = Accumulation::full;
  options.offload = asked.offload;
  options.wrapping = wrapping_of(asked.wrap, plain.chosen);
  // In a region of its own, as if other parts of a model held it too.
  if (asked.wrap == Wrap::tied)
    options.placement = [chosen = plain.chosen](const std::string& name, const at::Tensor&) {
      return plan::Placement{.tie = name == chosen ? "chosen" : ""};
    };
  if (asked.bucket_bytes > 0)
    options.buckets = {.bucket_bytes = asked.bucket_bytes, .first_bucket_bytes = asked.first_bucket_bytes};
  options.negotiate_order = asked.negotiate;
  options.start = asked.broadcast ? Start::broadcast : Start::check;
  options.debug = asked.debug;
  options.versions = asked.versions;
  if (asked.own_options) options.unit = own_options(each.seed);
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
    std::vector<torch::nn::Module*> modules;
    if (each.several)
      for (const auto& call : each.model.root.calls)
        modules.push_back(model_->named_children()[fmt::format("part{}", call.item)].get());
    else
      modules.push_back(model_.get());
    for (auto* module : modules) engines_.push_back(std::make_unique<Engine>(shard(mesh, *module, options)));
    for (const auto& engine : engines_) {
      optimizers_.push_back(optimizer_of(each.update, *engine));
      all_.push_back(engine.get());
    }
    modules_ = std::move(modules);
    recomputed_ = recomputed_units(*model_, each.options.recompute, each.seed, each.options.versions > 1);
  }

  void run() {
    const int events = static_cast<int>(plain_.events.size());
    for (int at = 0; at < events; ++at) {
      event(at);
      if (ended_) return;
      const bool last = at + 1 == events;
      if (last)
        for (auto* engine : all_) engine->check_equal();
      if (last || each_.look_often || each_.script[static_cast<std::size_t>(at)].act == Act::read) compare_weights(at);
    }
  }

 private:
  void event(int at) {
    const auto& event = each_.script[static_cast<std::size_t>(at)];
    const auto& record = plain_.events[static_cast<std::size_t>(at)];
    const Place here{.event = at, .rank = rank_};
    next_loss_ = 0;
    part_ = part_of(each_, at, each_.classes ? mean_scale(*all_.front(), count_of(each_, at, rank_)) : 0);
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
        const auto whole = full_parameters(/*write=*/true);
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
        must_throw(at, "a backward that throws", [&] { backward(loss, true); });
        return step_must_throw(at, "a step after a backward that threw");
      }
      case Act::throw_on_one: return throw_on_one(at);
      case Act::late: {
        set_frozen(event.frozen);
        std::vector<std::vector<at::Tensor>> losses;
        for (int number = 0; number < event.microbatches; ++number) {
          const Place place{at, rank_, number};
          losses.push_back(losses_of(each_, *model_, place, context_of(each_, place), part_));
        }
        for (std::size_t forward = 0; forward < losses.size(); ++forward) {
          differentiate(at, losses[forward], true, false);
          step(at, forward + 1 == losses.size());
        }
        return;
      }
    }
  }

  // One backward, of whatever engines there are.
  void backward(const at::Tensor& loss, bool last, const BackwardOptions& how = {}) {
    if (each_.several) return last ? bonfire::backward(all_, loss, how) : bonfire::accumulate(all_, loss, how);
    last ? all_.front()->backward(loss, how) : all_.front()->accumulate(loss, how);
  }

  std::vector<Engine::FullParameters> full_parameters(bool write = false) {
    std::vector<Engine::FullParameters> whole;
    for (auto* engine : all_) whole.push_back(engine->full_parameters(write));
    return whole;
  }

  void throw_on_one(int at) {
    const Place here{.event = at, .rank = rank_};
    auto context = context_of(each_, here);
    if (rank_ + 1 == each_.ranks) context.throws = Context::Throws::in_backward;
    const auto loss = loss_of(each_, model_->forward(input_of(each_, here), context), here, false);
    ended_ = true;
    try {
      backward(loss, true);
      // Where nothing was left to wait for, in the next collective.
      for (auto* engine : all_) engine->check_equal();
      const auto whole = full_parameters();
      // An engine without parameters of its own has none.
      all_.front()->groups().all.barrier().wait();
    } catch (const std::exception& error) {
      const std::string words = error.what();
      if (words.find("asked to throw in backward") != std::string::npos) return;
      throw Mismatch(fmt::format("event {}: a rank threw, and another heard: {}", at, first_line(words)));
    }
    throw Mismatch(fmt::format("event {}: a rank threw, and another did not hear of it", at));
  }

  StepOptions step_options() const { return {.clip = each_.update.clip, .clip_value = each_.update.clip_value}; }

  void step(int at, bool last = true) {
    StepResult result;
    for (auto& optimizer : optimizers_) result = optimizer->step(step_options());
    if (!last) return;
    const auto& record = plain_.events[static_cast<std::size_t>(at)];
    const double should_be = record.norm;
    if (each_.update.clip > 0 &&
        !(std::abs(result.gradient_norm - should_be) <= record.tolerance * std::max(0.1, should_be)))
      throw Mismatch(
          fmt::format("event {}: the norm of the gradients is {}, of plain torch {}", at, result.gradient_norm, should_be));
  }

  // `unseen`: the oracle does not do it.
  void differentiate(const Place& place, bool last, bool unseen = false) {
    differentiate(place.event, losses_of(each_, *model_, place, context_of(each_, place), part_), last, unseen);
  }

  void differentiate(int event, const std::vector<at::Tensor>& losses, bool last, bool unseen) {
    for (std::size_t at = 0; at < losses.size(); ++at) {
      const bool kept = at + 1 < losses.size();
      if (!unseen) compare_loss(event, losses[at]);
      backward(losses[at], last && !kept, {.retain_graph = kept});
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
    for (std::size_t number = 0; number < modules_.size(); ++number)
      if (trains(*modules_[number])) must_throw(at, what, [&] { optimizers_[number]->step(step_options()); });
  }

  bool trains(const torch::nn::Module& module) const {
    const bool ignores = each_.options.wrap == Wrap::ignored;
    for (const auto& item : module.named_parameters())
      if (item.value().requires_grad() && item.value().numel() > 0 &&
          !(ignores && plain_.names.at(item.key()) == plain_.chosen))
        return true;
    return false;
  }

  void set_frozen(int pattern) {
    if (pattern > 0) return freeze(each_, *model_, plain_.names, pattern);
    for (auto& item : model_->named_parameters()) item.value().set_requires_grad(built_.at(item.key()));
  }

  void compare_weights(int at) {
    const auto whole = full_parameters();
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
  RecomputedUnits recomputed_;
  std::map<std::string, bool> built_;
  std::vector<torch::nn::Module*> modules_;  // one, or the root's children; of each:
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;
  std::vector<Engine*> all_;
  double part_ = 1;  // of a microbatch's loss
  std::size_t next_loss_ = 0;
  bool ended_ = false;
};

}  // namespace

Compared compared_events(const EngineCase& each) {
  at::set_num_threads(1);
  try {
    const auto plain = run_plainly(each);
    return {.events = static_cast<int>(plain.events.size() + plain.left_out), .left_out = static_cast<int>(plain.left_out)};
  } catch (const std::exception&) {
    return {};  // no case
  }
}

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
