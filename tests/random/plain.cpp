#include "tests/random/plain.h"

#include <cmath>

#include <ATen/ATen.h>

namespace bonfire::cases {

double PlainOptimizer::step(const std::map<std::string, at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> gradients;
  double squares = 0;
  for (auto& [name, parameter] : parameters) {
    if (!parameter.requires_grad()) continue;
    auto gradient = parameter.grad().defined() ? parameter.grad().clone() : at::zeros_like(parameter);
    if (update_.clip_value > 0) gradient.clamp_(-update_.clip_value, update_.clip_value);
    squares += gradient.pow(2).sum().item<double>();
    gradients[name] = gradient;
  }
  const double norm = std::sqrt(squares);
  const double factor = update_.clip > 0 && norm > update_.clip ? update_.clip / (norm + 1e-6) : 1;
  for (auto [name, parameter] : parameters) {
    if (gradients.contains(name))
      update(parameter, gradients[name] * factor, states_[name]);
    else
      states_.erase(name);
    parameter.mutable_grad().reset();
  }
  return norm;
}

void PlainOptimizer::update(at::Tensor parameter, at::Tensor gradient, State& state) const {
  const bool less = update_.less_for_vectors && parameter.dim() < 2;
  const double lr = less ? update_.lr / 2 : update_.lr, decay = less ? 0 : update_.weight_decay;
  ++state.steps;
  if (update_.maximize) gradient = -gradient;
  if (update_.rule == Rule::adamw)
    parameter.mul_(1 - lr * decay);
  else
    gradient = gradient + parameter * decay;
  if (update_.rule == Rule::sgd) {
    if (update_.momentum == 0) return void(parameter.sub_(gradient * lr));
    state.first = state.steps == 1 ? gradient.clone() : state.first * update_.momentum + gradient * (1 - update_.dampening);
    parameter.sub_((update_.nesterov ? gradient + state.first * update_.momentum : state.first) * lr);
    return;
  }
  constexpr double beta1 = 0.9, beta2 = 0.999;
  if (state.steps == 1)
    state.first = at::zeros_like(parameter), state.second = at::zeros_like(parameter), state.largest = state.second.clone();
  state.first = state.first * beta1 + gradient * (1 - beta1);
  state.second = state.second * beta2 + gradient * gradient * (1 - beta2);
  state.largest = at::maximum(state.largest, state.second);
  const auto steps = static_cast<double>(state.steps);
  const auto size = (update_.amsgrad ? state.largest : state.second).sqrt() / std::sqrt(1 - std::pow(beta2, steps));
  parameter.sub_(state.first / (1 - std::pow(beta1, steps)) / (size + adam_eps) * lr);
}

namespace {

class Oracle {
 public:
  Oracle(const EngineCase& each, double off) : each_(each), optimizer_(each.update) {
    Nursery nursery{.model = each.model, .random = Random(each.seed).fork("weights"), .plain = true, .shaken = off};
    model_ = make_part(each.model.root, nursery, "");
    names_ = first_names(*model_);
    for (const auto& item : model_->named_parameters()) built_[item.key()] = item.value().requires_grad();
    chosen_ = chosen_name(*model_);
  }

  PlainRun run() {
    PlainRun run{.names = names_, .chosen = chosen_};
    for (int at = 0; at < static_cast<int>(each_.script.size()); ++at) run.events.push_back(event(at));
    return run;
  }

 private:
  EventRecord event(int at) {
    const auto& event = each_.script[static_cast<std::size_t>(at)];
    EventRecord record;
    record.losses.resize(static_cast<std::size_t>(each_.ranks));
    switch (event.act) {
      case Act::train:
        set_frozen(event.frozen);
        for (int number = 0; number < event.microbatches; ++number) add({.event = at, .number = number}, record);
        record.norm = step();
        break;
      case Act::backward_twice:
        add({.event = at, .number = 0}, record);
        add({.event = at, .number = 1}, record);
        if (backward_may_repeat(each_)) record.norm = step();
        break;
      case Act::accumulate_step:
        for (int number = 0; number <= event.microbatches; ++number) add({.event = at, .number = number}, record);
        record.norm = step();
        break;
      case Act::evaluate: {
        const at::NoGradGuard no_grad;
        for (int rank = 0; rank < each_.ranks; ++rank) {
          const Place place{.event = at, .rank = rank};
          record.outputs.push_back(model_->forward(input_of(each_, place), context_of(each_, place))[0]);
        }
        break;
      }
      case Act::write: {
        const at::NoGradGuard no_grad;
        for (auto& item : model_->named_parameters())
          if (names_.at(item.key()) == item.key()) item.value().mul_(0.9);
        break;
      }
      case Act::late:
        set_frozen(event.frozen);
        late(at, event.microbatches, record);
        break;
      case Act::drop:
      case Act::read:
      case Act::step_alone:
      case Act::throw_forward:
      case Act::throw_backward:
      case Act::throw_on_one: break;
    }
    for (const auto& item : model_->named_parameters()) record.weights[item.key()] = item.value().detach().clone();
    return record;
  }

  void set_frozen(int pattern) {
    if (pattern > 0) return freeze(each_, *model_, names_, pattern);
    for (auto& item : model_->named_parameters()) item.value().set_requires_grad(built_.at(item.key()));
  }

  // Of the mean over all targets of all ranks that count.
  double scale(int event) const {
    double all = 0;
    for (int rank = 0; rank < each_.ranks; ++rank) all += count_of(each_, event, rank);
    return all > 0 ? each_.ranks / all : 0;
  }

  void add(Place place, EventRecord& record) {
    const double part = part_of(each_, place.event, each_.classes ? scale(place.event) : 0);
    for (int rank = 0; rank < each_.ranks; ++rank) {
      place.rank = rank;
      at::Tensor sum;
      for (const auto& loss : losses_of(each_, *model_, place, context_of(each_, place), part)) {
        record.losses[static_cast<std::size_t>(rank)].push_back(loss.item<double>());
        sum = sum.defined() ? sum + loss : loss;
      }
      (sum / each_.ranks).backward();
    }
  }

  // Gradients of all forwards with the weights from before the first update.
  void late(int at, int forwards, EventRecord& record) {
    std::vector<at::Tensor> parameters;
    for (const auto& item : model_->named_parameters())
      if (names_.at(item.key()) == item.key()) parameters.push_back(item.value());
    std::vector<std::vector<at::Tensor>> gradients;
    for (int number = 0; number < forwards; ++number) {
      add({.event = at, .number = number}, record);
      auto& mine = gradients.emplace_back();
      for (auto& parameter : parameters) {
        mine.push_back(parameter.grad());
        parameter.mutable_grad() = at::Tensor();
      }
    }
    for (const auto& of_forward : gradients) {
      for (std::size_t each = 0; each < parameters.size(); ++each) parameters[each].mutable_grad() = of_forward[each];
      record.norm = step();
    }
  }

  double step() {
    std::map<std::string, at::Tensor> parameters;
    const bool ignores = each_.options.wrap == Wrap::ignored;
    for (auto& item : model_->named_parameters()) {
      if (names_.at(item.key()) != item.key()) continue;
      if (ignores && item.key() == chosen_)
        item.value().mutable_grad().reset();
      else
        parameters[item.key()] = item.value();
    }
    return optimizer_.step(parameters);
  }

  const EngineCase& each_;
  std::shared_ptr<PartImpl> model_;
  Names names_;
  std::map<std::string, bool> built_;  // whether it is trained unless said
  std::string chosen_;
  PlainOptimizer optimizer_;
};

}  // namespace

PlainRun run_plainly(const EngineCase& each) {
  auto run = Oracle(each, 0).run();
  run.left_out =
      set_tolerances(run.events, Oracle(each, shaken).run().events,
                     [](const EventRecord& record, const EventRecord& other, const auto& look) {
                       for (std::size_t rank = 0; rank < record.losses.size(); ++rank)
                         for (std::size_t loss = 0; loss < record.losses[rank].size(); ++loss) {
                           const double should_be = record.losses[rank][loss];
                           look(std::abs(other.losses[rank][loss] - should_be) / std::max(1.0, std::abs(should_be)));
                         }
                       for (std::size_t rank = 0; rank < record.outputs.size(); ++rank)
                         look(distance(other.outputs[rank], record.outputs[rank]));
                     });
  return run;
}

double distance(const Weights& are, const Weights& should_be) {
  double worst = 0;
  for (const auto& [name, value] : should_be) worst = std::max(worst, distance(are.at(name), value));
  return worst;
}

double distance(const at::Tensor& is, const at::Tensor& should_be) {
  if (is.sizes() != should_be.sizes()) return std::numeric_limits<double>::infinity();
  if (is.numel() == 0) return 0;
  const double size = std::max(0.1, should_be.abs().max().item<double>());
  const double difference = (is - should_be).abs().max().item<double>();
  return std::isfinite(difference) ? difference / size : std::numeric_limits<double>::infinity();
}

}  // namespace bonfire::cases
