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

Executor::Executor(const schedule::Schedule& table, int rank, Stages& stages, const Links& links, const Ties& ties)
    : stages_(stages), links_(links), ties_(ties) {
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
      drop_sent();
    }
    for (auto& sent : sent_) sent.work.wait();
    sent_.clear();
  } catch (const std::exception& error) {
    forget(error.what());
    throw;
  }
  return sums_;
}

// Before the cell begins, so that the time of a computation is its own.
void Executor::await_arrival(const Action& action) {
  const bool reads_gradients = schedule::makes_input_gradient(action.kind);
  if (!reads_gradients && action.kind != Kind::forward) return;
  auto& from = reads_gradients ? gradients_ : values_;
  if (const auto parcel = from.find({action.stage, action.microbatch}); parcel != from.end()) parcel->second.arrival.wait();
}

void Executor::execute(const Cell& cell, std::size_t at, const Step& step) {
  const Action& action = cell.action;
  Engine& engine = stages_.at(action.stage)->engine();
  switch (action.kind) {
    case Kind::forward: return forward(cell, step);
    case Kind::backward:
    case Kind::input_gradient:
    case Kind::weight_gradient: return backward(cell, step);
    case Kind::send_forward: return send(cell, outputs_);
    case Kind::send_backward: return send(cell, input_gradients_);
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
      return ties_.sum(static_cast<std::size_t>(action.microbatch), engines);
    }
    case Kind::update:
      engine.finish_gradients();
      if (step.update) step.update(action.stage);
      return;
  }
}

double Executor::weight_of(int microbatch, const Step& step) const {
  std::int64_t all = 0;
  for (const auto& each : step.microbatches) all += each.counts ? each.samples() : 0;
  const auto& of = step.microbatches[static_cast<std::size_t>(microbatch)];
  return of.counts ? static_cast<double>(of.samples()) / static_cast<double>(all) : 0;
}

void Executor::forward(const Cell& cell, const Step& step) {
  const auto [number, kind, at] = cell.action;
  Stage& stage = *stages_.at(number);
  const auto& microbatch = step.microbatches[static_cast<std::size_t>(at)];
  Tensors values = stage.place().first() ? microbatch.input : take(values_, {number, at});
  Tensors outputs =
      differentiates_ ? stage.forward(at, std::move(values), microbatch) : stage.evaluate(std::move(values), microbatch);
  int live = 0;
  for (const auto& [other, each] : stages_) live += each->live();
  peak_ = std::max(peak_, live);
  if (stage.place().last()) {
    const at::NoGradGuard no_grad;
    for (auto& output : outputs) output = output.detach().to(at::kDouble).reshape(at::IntArrayRef());
    const auto numbers = at::stack(outputs).mul_(weight_of(at, step));
    sums_ = sums_.defined() ? sums_.add_(numbers) : numbers;
  } else if (stages_.contains(number + 1)) {
    values_[{number + 1, at}] = {std::move(outputs)};
  } else {
    for (auto& output : outputs) output = output.contiguous();
    outputs_[{number, at}] = std::move(outputs);
  }
}

Tensors Executor::gradients_for(Stage& stage, int microbatch, const Step& step) {
  if (const Slot slot{stage.place().number, microbatch}; !stage.place().last()) {
    auto gradients = take(gradients_, slot);
    drop_values(slot);
    return gradients;
  }
  return {stage.loss_gradient(microbatch, weight_of(microbatch, step) * step.loss_scale)};
}

void Executor::backward(const Cell& cell, const Step& step) {
  const auto [number, kind, at] = cell.action;
  Stage& stage = *stages_.at(number);
  if (kind == Kind::weight_gradient) return stage.weight_gradient(at, cell.pass);
  const Tensors given = gradients_for(stage, at, step);
  Tensors made = kind == Kind::backward ? stage.backward(at, given, cell.pass) : stage.input_gradient(at, given);
  if (stage.place().first()) return;
  if (stages_.contains(number - 1))
    gradients_[{number - 1, at}] = {std::move(made)};
  else
    input_gradients_[{number, at}] = std::move(made);
}

void Executor::send(const Cell& cell, std::map<Slot, Tensors>& from) {
  const auto node = from.extract({cell.action.stage, cell.action.microbatch});
  require(!node.empty(), "{}: there is nothing to send yet", schedule::to_text(cell.action));
  sent_.push_back({.slot = node.key(),
                   .values = cell.action.kind == Kind::send_forward,
                   .work = links_.send(node.mapped(), cell.peer),
                   .tensors = node.mapped()});
}

void Executor::receive(const Cell& cell, std::size_t at, const Step& step) {
  const auto [number, kind, microbatch] = cell.action;
  const Stage& stage = *stages_.at(number);
  const bool values = kind == Kind::receive_forward;
  const Crossing& crossing = values ? stage.incoming() : stage.returning();
  const auto samples = step.microbatches[static_cast<std::size_t>(microbatch)].samples();
  Parcel parcel{links_.room(crossing, samples, static_cast<std::int64_t>(at))};
  parcel.arrival = links_.receive(parcel.tensors, cell.peer);
  (values ? values_ : gradients_)[{number, microbatch}] = std::move(parcel);
}

Tensors Executor::take(std::map<Slot, Parcel>& from, const Slot& slot) {
  auto node = from.extract(slot);
  require(!node.empty(), "stage {}, microbatch {}: what it reads has not been received", slot.first, slot.second);
  node.mapped().arrival.wait();
  return std::move(node.mapped().tensors);
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
  values_.clear();
  gradients_.clear();
  outputs_.clear();
  input_gradients_.clear();
  sent_.clear();
  for (auto& [number, stage] : stages_) {
    stage->forget();
    if (differentiates_) stage->engine().abandon_gradients(why);
    stage->engine().reshard();
  }
}

}  // namespace bonfire
