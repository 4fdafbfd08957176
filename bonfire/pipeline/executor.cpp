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
BackwardKind kind_of_backward(const std::vector<Action>& row, std::size_t at) {
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

std::vector<Executor::Cell> Executor::prepared(const std::vector<Action>& row,
                                               const std::function<int(const Action&)>& peer_of) {
  std::vector<Cell> cells;
  std::set<int> tied;
  for (std::size_t at = 0; at < row.size(); ++at) {
    Cell cell{.action = row[at]};
    if (schedule::is_message(row[at].kind)) cell.peer = peer_of(row[at]);
    if (schedule::ends_activation(row[at].kind)) cell.backward = kind_of_backward(row, at);
    if (row[at].kind == Kind::tie) cell.first_of_tie = tied.insert(row[at].microbatch).second;
    cells.push_back(cell);
  }
  return cells;
}

Executor::Executor(const schedule::Schedule& table, int rank, Stages& stages, const Links& links, Ties& ties)
    : Executor(stages, links, ties) {
  const schedule::Index index(table);
  row_ = prepared(table.rows[static_cast<std::size_t>(rank)], [&](const Action& message) { return index.peer(message); });
  differentiates_ =
      std::any_of(row_.begin(), row_.end(), [](const Cell& cell) { return schedule::ends_activation(cell.action.kind); });
}

Executor::Executor(Stages& stages, const Links& links, Ties& ties)
    : stages_(stages), links_(links), ties_(ties), differentiates_(true), inbox_(links) {}

at::Tensor Executor::run(const Step& step) {
  executed_.clear();
  peak_ = 0;
  sums_ = at::Tensor();
  try {
    if (differentiates_)
      for (auto& [number, stage] : stages_) stage->driver().begin_step();
    for (std::size_t at = 0; at < row_.size(); ++at) execute(row_[at], at, step);
    finish();
    for (auto& [number, stage] : stages_) ties_.finish(number);
  } catch (const std::exception& error) {
    forget(error.what());
    throw;
  }
  return sums_;
}

void Executor::execute(const Cell& cell, std::size_t place, const Step& step) {
  await_arrival(cell.action);
  const Nanoseconds start = now_ns();
  if (step.observe) step.observe(cell.action, true);
  perform(cell, place, step);
  if (step.observe) step.observe(cell.action, false);
  if (!row_.empty()) executed_.push_back({cell.action, start, now_ns()});
  inbox_.progress();
  drop_sent();
}

void Executor::finish() {
  for (auto& sent : sent_) sent.work.wait();
  sent_.clear();
}

void Executor::gradients_received(int microbatch) {
  std::erase_if(sent_, [&](auto& sent) {
    if (sent.values || sent.slot.second > microbatch) return false;
    sent.work.wait();
    return true;
  });
}

// Before the cell begins, so that the time of a computation is its own.
void Executor::await_arrival(const Action& action) {
  const bool reads_gradients = schedule::makes_input_gradient(action.kind);
  if (reads_gradients || action.kind == Kind::forward) inbox_.await({action.stage, action.microbatch}, !reads_gradients);
}

void Executor::perform(const Cell& cell, std::size_t at, const Step& step) {
  const Action& action = cell.action;
  ScheduleDriver& driver = stages_.at(action.stage)->driver();
  switch (action.kind) {
    case Kind::forward: return forward(cell, step);
    case Kind::backward:
    case Kind::input_gradient:
    case Kind::weight_gradient: return backward(cell, step);
    case Kind::send_forward: return send(cell, outputs_, step);
    case Kind::send_backward: return send(cell, input_gradients_, step);
    case Kind::receive_forward:
    case Kind::receive_backward: return receive(cell, at, step);
    case Kind::unshard: return driver.unshard();
    case Kind::reshard: return driver.reshard();
    // Begun by the gradients themselves, the last of which have come.
    case Kind::reduce: return;
    case Kind::tie: {
      if (!cell.first_of_tie) return;
      const auto group = static_cast<std::size_t>(action.microbatch);
      std::map<int, Engine*> engines;
      for (auto& [number, stage] : stages_) {
        if (ties_.groups()[group].names.contains(number)) stage->driver().finish_gradients();
        engines.emplace(number, &stage->engine());
      }
      return ties_.begin_sum(group, engines);
    }
    case Kind::update:
      driver.finish_gradients();
      ties_.finish(action.stage);
      if (step.update) step.update(action.stage);
      return;
  }
}

void Executor::forward(const Cell& cell, const Step& step) {
  const auto [number, kind, at] = cell.action;
  Stage& stage = *stages_.at(number);
  const auto& microbatch = step.microbatch(at);
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
    if (step.report) return step.report(at, numbers);
    const double weight = step.weight(at);
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
  return {stage.loss_gradient(microbatch, step.weight(microbatch) * step.loss_scale)};
}

void Executor::backward(const Cell& cell, const Step& step) {
  const auto [number, kind, at] = cell.action;
  Stage& stage = *stages_.at(number);
  if (kind == Kind::weight_gradient) return stage.weight_gradient(at, cell.backward);
  const Tensors given = gradients_for(stage, at, step);
  Tensors made = kind == Kind::backward ? stage.backward(at, given, cell.backward) : stage.input_gradient(at, given);
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
  if (const auto form = form_of(step.microbatch(cell.action.microbatch)); values && stage.announces_outgoing(form))
    send({links_.announcement(stage.outgoing(form))});
  send(node.mapped());
}

void Executor::receive(const Cell& cell, std::size_t at, const Step& step) {
  const auto [number, kind, number_of_microbatch] = cell.action;
  const auto& microbatch = step.microbatch(number_of_microbatch);
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
    if (differentiates_) stage->driver().abandon_gradients(why);
    stage->driver().reshard();
  }
}

}  // namespace bonfire
