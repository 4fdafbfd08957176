#include "bonfire/pipeline/executor.h"

#include <algorithm>
#include <set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>

#include "bonfire/base/error.h"

namespace bonfire {

using schedule::Action;
using schedule::Kind;

namespace {

// Where gradients of a stage go after the cell at `at`.
Engine::GradientPass pass_of(const std::vector<Action>& row, std::size_t at) {
  const auto next = [&](std::size_t from, auto&& wanted) {
    while (++from < row.size())
      if (row[from].stage == row[at].stage && wanted(row[from].kind)) break;
    return from;
  };
  const auto counts = [](Kind kind) {
    return schedule::ends_activation(kind) || kind == Kind::reduce || kind == Kind::update;
  };
  const std::size_t then = next(at, counts);
  if (then == row.size() || row[then].kind != Kind::reduce) return {.reduces = false, .last = false};
  const std::size_t after = next(then, counts);
  return {.reduces = true, .last = after == row.size() || row[after].kind == Kind::update};
}

}  // namespace

Executor::Executor(const schedule::Schedule& table, int rank, Stages& stages, const Links& links, Ties& ties)
    : stages_(stages), links_(links), ties_(ties), inbox_(links) {
  const schedule::Index index(table);
  const auto& row = table.rows[static_cast<std::size_t>(rank)];
  std::set<int> tied;
  for (std::size_t at = 0; at < row.size(); ++at) {
    Cell cell{.action = row[at]};
    if (schedule::is_message(row[at].kind)) cell.peer = index.peer(row[at]);
    if (schedule::ends_activation(row[at].kind)) cell.pass = pass_of(row, at), differentiates_ = true;
    if (row[at].kind == Kind::tie) cell.first_of_tie = tied.insert(row[at].microbatch).second;
    row_.push_back(cell);
  }
}

at::Tensor Executor::run(const Step& step) {
  executed_.clear();
  peak_ = 0;
  sums_ = at::Tensor();
  try {
    if (differentiates_)
      for (auto& [number, stage] : stages_) stage->engine().begin_step();
    for (std::size_t at = 0; at < row_.size(); ++at) {
      await_arrival(row_[at].action);
      const Nanoseconds start = now_ns();
      if (step.observe) step.observe(row_[at].action, true);
      execute(row_[at], at, step);
      if (step.observe) step.observe(row_[at].action, false);
      executed_.push_back({row_[at].action, start, now_ns()});
      inbox_.progress();
      drop_sent();
    }
    for (auto& sent : sent_) sent.work.wait();
    sent_.clear();
    for (auto& [number, stage] : stages_) ties_.finish(number);
  } catch (const std::exception& error) {
    forget(error.what());
    throw;
  }
  return sums_;
}

// Before the cell begins, so that the time of a computation is its own.
void Executor::await_arrival(const Action& action) {
  const bool reads_gradients = schedule::makes_input_gradient(action.kind);
  if (reads_gradients || action.kind == Kind::forward) inbox_.await({action.stage, action.microbatch}, !reads_gradients);
}

void Executor::execute(const Cell& cell, std::size_t at, const Step& step) {
  const Action& action = cell.action;
  Engine& engine = stages_.at(action.stage)->engine();
  switch (action.kind) {
    case Kind::forward: return forward(cell, step);
    case Kind::backward:
    case Kind::input_gradient:
    case Kind::weight_gradient: return backward(cell, step);
    case Kind::send_forward: return send(cell, outputs_, step);
    case Kind::send_backward: return send(cell, input_gradients_, step);
    case Kind::receive_forward:
    case Kind::receive_backward: return receive(cell, at, step);
    case Kind::unshard: return engine.unshard();
    case Kind::reshard: return engine.reshard();
    // Begun by the gradients themselves, the last of which have come.
    case Kind::reduce: return;
    case Kind::tie: {
      if (!cell.first_of_tie) return;
      std::map<int, Engine*> engines;
      for (auto& [number, stage] : stages_) engines.emplace(number, &stage->engine());
      return ties_.begin_sum(static_cast<std::size_t>(action.microbatch), engines);
    }
    case Kind::update:
      engine.finish_gradients();
      ties_.finish(action.stage);
      if (step.update) step.update(action.stage);
      return;
  }
}

void Executor::forward(const Cell& cell, const Step& step) {
  const auto [number, kind, at] = cell.action;
  Stage& stage = *stages_.at(number);
  const auto& microbatch = step.microbatches[static_cast<std::size_t>(at)];
  Tensors values = stage.place().first() ? microbatch.input : inbox_.take({number, at}, /*values=*/true);
  Tensors outputs =
      differentiates_ ? stage.forward(at, std::move(values), microbatch) : stage.evaluate(at, std::move(values), microbatch);
  int live = 0;
  for (const auto& [other, each] : stages_) live += each->live();
  peak_ = std::max(peak_, live);
  if (stage.place().last()) {
    const at::NoGradGuard no_grad;
    for (auto& output : outputs) output = output.detach().to(at::kDouble).reshape(at::IntArrayRef());
    auto numbers = at::stack(outputs);
    const double weight = step.weights[static_cast<std::size_t>(at)];
    weight == 0 ? numbers.zero_() : numbers.mul_(weight);
    sums_ = sums_.defined() ? sums_.add_(numbers) : numbers;
  } else if (stages_.contains(number + 1)) {
    inbox_.put({number + 1, at}, /*values=*/true, std::move(outputs));
  } else {
    for (auto& output : outputs) output = output.contiguous();
    outputs_[{number, at}] = std::move(outputs);
  }
}

Tensors Executor::gradients_for(Stage& stage, int microbatch, const Step& step) {
  if (const Slot slot{stage.place().number, microbatch}; !stage.place().last()) {
    auto gradients = inbox_.take(slot, /*values=*/false);
    drop_values(slot);
    return gradients;
  }
  return {stage.loss_gradient(microbatch, step.weights[static_cast<std::size_t>(microbatch)] * step.loss_scale)};
}

void Executor::backward(const Cell& cell, const Step& step) {
  const auto [number, kind, at] = cell.action;
  Stage& stage = *stages_.at(number);
  if (kind == Kind::weight_gradient) return stage.weight_gradient(at, cell.pass);
  const Tensors given = gradients_for(stage, at, step);
  Tensors made = kind == Kind::backward ? stage.backward(at, given, cell.pass) : stage.input_gradient(at, given);
  if (stage.place().first()) return;
  if (stages_.contains(number - 1))
    inbox_.put({number - 1, at}, /*values=*/false, std::move(made));
  else
    input_gradients_[{number, at}] = std::move(made);
}

void Executor::send(const Cell& cell, std::map<Slot, Tensors>& from, const Step& step) {
  const auto node = from.extract({cell.action.stage, cell.action.microbatch});
  require(!node.empty(), "{}: there is nothing to send yet", schedule::to_text(cell.action));
  const bool values = cell.action.kind == Kind::send_forward;
  const auto send = [&](const Tensors& tensors) {
    sent_.push_back({.slot = node.key(), .values = values, .work = links_.send(tensors, cell.peer), .tensors = tensors});
  };
  Stage& stage = *stages_.at(cell.action.stage);
  if (const auto form = form_of(step.microbatches[static_cast<std::size_t>(cell.action.microbatch)]);
      values && stage.announces_outgoing(form))
    send({links_.announcement(stage.outgoing(form))});
  send(node.mapped());
}

void Executor::receive(const Cell& cell, std::size_t at, const Step& step) {
  const auto [number, kind, number_of_microbatch] = cell.action;
  const auto& microbatch = step.microbatches[static_cast<std::size_t>(number_of_microbatch)];
  inbox_.expect({.stage = *stages_.at(number),
                 .microbatch = number_of_microbatch,
                 .values = kind == Kind::receive_forward,
                 .from = cell.peer,
                 .samples = microbatch.samples(),
                 .form = form_of(microbatch),
                 .place = static_cast<std::int64_t>(at)});
}

void Executor::drop_sent() {
  std::erase_if(sent_, [](auto& sent) {
    if (!sent.work.done()) return false;
    sent.work.wait();
    return true;
  });
}

// Not every backend tells when a send has ended. Values whose gradient came back have been received.
void Executor::drop_values(const Slot& slot) {
  std::erase_if(sent_, [&](auto& sent) {
    if (!sent.values || sent.slot != slot) return false;
    sent.work.wait();
    return true;
  });
}

void Executor::forget(const std::string& why) {
  inbox_.clear();
  outputs_.clear();
  input_gradients_.clear();
  sent_.clear();
  ties_.forget();
  for (auto& [number, stage] : stages_) {
    stage->forget();
    stage->forget_forms();
    if (differentiates_) stage->engine().abandon_gradients(why);
    stage->engine().reshard();
  }
}

}  // namespace bonfire
