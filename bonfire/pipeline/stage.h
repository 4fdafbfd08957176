#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bonfire/pipeline/chain.h"
#include "bonfire/pipeline/form.h"
#include "bonfire/pipeline/halves.h"
#include "bonfire/pipeline/links.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/schedule_driver.h"

namespace bonfire {

// One stage on one rank: its module, the engine that keeps its parameters, and what its forwards left for their backwards.
class Stage {
 public:
  struct Place {
    int number = 0;
    int stages = 1;
    UnitRange units{};

    bool first() const { return number == 0; }
    bool last() const { return number + 1 == stages; }
    std::string name() const;  // "stage 2 (Units 4..5)", for messages
  };

  // `groups`: the ranks that hold this stage. `memory`: shared by the stages of this rank.
  Stage(const Place& place, StageModule module, const DataGroups& groups, ShardOptions options,
        std::shared_ptr<EngineMemory> memory);

  const Place& place() const { return place_; }
  Engine& engine() { return engine_; }
  // The verbs by which the schedule takes its parameters and gradients through a step.
  ScheduleDriver& driver() { return driver_; }
  torch::nn::Module& module() { return *module_.module; }
  std::string name() const { return place_.name(); }

  // What comes in for one sample, and what goes out, of microbatches of a form; of the first and the last stage, nothing.
  // A probe tells, or the first forward of the form; the stage before tells what comes in.
  bool knows_incoming(const Form& form) const { return incoming_.contains(form); }
  bool knows_outgoing(const Form& form) const { return outgoing_.contains(form); }
  const Crossing& incoming(const Form& form) const { return incoming_.at(form); }
  const Crossing& outgoing(const Form& form) const { return outgoing_.at(form); }
  void set_incoming(const Form& form, Crossing crossing) { incoming_[form] = std::move(crossing); }
  // What comes back for what went out.
  Crossing returning(const Form& form) const;
  // Whether the next message of this form is the first: its shapes are announced before it. True once, for each end.
  bool announces_outgoing(const Form& form) { return announced_out_.insert(form).second; }
  bool awaits_announcement(const Form& form) { return announced_in_.insert(form).second; }
  // Something threw: but for the form of the probe, which all ranks know, nobody can say what others have heard.
  void forget_forms();
  int reports() const { return reports_; }  // of the last stage: numbers that a forward returns
  // Runs a forward to see what goes out, given what comes in, and which of it has gradients, whatever the form; nothing else
  // of the stage changes. With `split`, throws
  // ConfigError where the backward cannot be done in halves.
  struct Probe {
    Crossing incoming{};
    bool split = false;
  };
  Tensors probe(const Probe& how, Tensors values, const Microbatch& microbatch);

  // A forward for which a backward comes, numbered by its microbatch. `values`: what came in.
  Tensors forward(int number, Tensors values, const Microbatch& microbatch);
  // One without.
  Tensors evaluate(int number, Tensors values, const Microbatch& microbatch);
  // Each takes the gradients of the differentiable values that went out (of the last stage: that of its loss) and returns
  // those of the ones that came in.
  // Of a last stage: where backward begins.
  at::Tensor loss_gradient(int number, double factor);
  Tensors backward(int number, const Tensors& gradients, const BackwardKind& how);
  Tensors input_gradient(int number, const Tensors& gradients);
  void weight_gradient(int number, const BackwardKind& how);

  int live() const { return static_cast<int>(activations_.size()); }  // forwards whose backward has yet to end
  void forget() { activations_.clear(); }

 private:
  struct Activation {
    ForwardGraph graph;
    at::Tensor loss{};
    WeightGradients weights{};
  };
  Tensors run(Tensors values, const Microbatch& microbatch);
  ForwardGraph graph_of(const Tensors& inputs, const Tensors& outputs) const;
  Crossing crossing_of(const Tensors& outputs, std::int64_t samples) const;
  void check_outgoing(int number, const Tensors& outputs, const Microbatch& microbatch);
  Activation& activation(int number);

  Place place_;
  StageModule module_;
  Engine engine_;
  ScheduleDriver& driver_;
  std::map<Form, Crossing> incoming_, outgoing_;
  std::set<Form> announced_in_, announced_out_;
  Form probed_;
  std::vector<bool> differentiable_in_, differentiable_out_;  // of the values, in order
  int reports_ = 0;
  std::map<int, Activation> activations_;
};

}  // namespace bonfire
