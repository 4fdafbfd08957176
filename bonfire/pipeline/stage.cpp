#include "bonfire/pipeline/stage.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

ShardOptions options_for(const Stage::Place& place, ShardOptions options) {
  // What is said of the model's outputs is not said of what goes from stage to stage.
  if (!place.last()) options.precision.outputs.reset();
  return options;
}

// Leaves of a new graph over the same memory.
Tensors as_leaves(Tensors values, const std::vector<bool>& differentiable) {
  for (std::size_t at = 0; at < values.size(); ++at) {
    values[at] = values[at].detach();
    if (at < differentiable.size() && differentiable[at]) values[at].set_requires_grad(true);
  }
  return values;
}

std::vector<bool> differentiable(const Crossing& crossing) {
  std::vector<bool> which;
  for (const auto& value : crossing) which.push_back(value.differentiable);
  return which;
}

// The stage before expects a gradient of each, also where nothing used it.
Tensors filled(Tensors gradients, const Tensors& inputs) {
  for (std::size_t at = 0; at < gradients.size(); ++at)
    gradients[at] = gradients[at].defined() ? gradients[at].contiguous() : at::zeros_like(inputs[at]);
  return gradients;
}

}  // namespace

Stage::Stage(const Place& place, StageModule module, const DataGroups& groups, ShardOptions options,
             std::shared_ptr<EngineMemory> memory)
    : place_(place),
      module_(std::move(module)),
      engine_(ScheduleDriver::engine(groups, *module_.module, options_for(place, std::move(options)), std::move(memory))),
      driver_(ScheduleDriver::of(engine_)) {}

std::string Stage::Place::name() const {
  if (units.count() == 1) return fmt::format("stage {} (Unit {})", number, units.begin);
  return fmt::format("stage {} (Units {}..{})", number, units.begin, units.end - 1);
}

Tensors Stage::run(Tensors values, const Microbatch& microbatch) {
  driver_.await_parameters();
  auto outputs = module_.forward(std::move(values), microbatch);
  require(!outputs.empty(), "{}: forward returned nothing; a stage returns at least one tensor", name());
  if (!place_.last()) return outputs;
  require(outputs.front().numel() == 1 && outputs.front().is_floating_point(),
          "{}: the last stage returned a {} of [{}] first; it returns the mean loss, one number", name(),
          c10::toString(outputs.front().scalar_type()), fmt::join(outputs.front().sizes(), ", "));
  return outputs;
}

Crossing Stage::crossing_of(const Tensors& outputs, std::int64_t samples) const {
  if (place_.last()) return {};
  Crossing crossing;
  for (std::size_t at = 0; at < outputs.size(); ++at) {
    const auto& value = outputs[at];
    const auto refuse = [&](const std::string& why) {
      fail_config("{}: value {} of {} that goes to the next stage is {} [{}] for {} samples: {}", name(), at, outputs.size(),
                  c10::toString(value.scalar_type()), fmt::join(value.sizes(), ", "), samples, why);
    };
    switch (value.scalar_type()) {
      case at::kFloat:
      case at::kDouble:
      case at::kBFloat16:
      case at::kHalf:
      case at::kLong:
      case at::kByte: break;
      default: refuse("allowed are fp32, fp64, bf16, fp16, int64 and uint8");
    }
    if (value.dim() == 0 || samples == 0 || value.size(0) % samples != 0)
      refuse("its first dimension must be a multiple of the number of samples");
    crossing.push_back({.per_sample = value.size(0) / samples,
                        .rest = value.sizes().slice(1).vec(),
                        .type = value.scalar_type(),
                        // Where nothing is differentiated: as the probe has found.
                        .differentiable = at::GradMode::is_enabled()
                                              ? value.requires_grad()
                                              : at < differentiable_out_.size() && differentiable_out_[at]});
  }
  return crossing;
}

Crossing Stage::returning(const Form& form) const {
  Crossing crossing = outgoing_.at(form);
  std::erase_if(crossing, [](const CrossingValue& value) { return !value.differentiable; });
  return crossing;
}

// What is agreed on for a form holds for all microbatches of it; how many values there are, and which have gradients, for
// all forms.
void Stage::check_outgoing(int number, const Tensors& outputs, const Microbatch& microbatch) {
  if (place_.last()) return;
  auto going = crossing_of(outputs, microbatch.samples());
  const auto& probed = outgoing_.at(probed_);
  const auto& agreed = outgoing_.try_emplace(form_of(microbatch), going).first->second;
  require(going == agreed && differentiable(going) == differentiable_out_,
          "{}: microbatch {} of {} samples makes {} for the next stage; agreed was {}", name(), number, microbatch.samples(),
          to_string(going), to_string(going == agreed ? probed : agreed));
}

void Stage::forget_forms() {
  const auto others = [this](const auto& entry) { return entry.first != probed_; };
  std::erase_if(incoming_, others);
  std::erase_if(outgoing_, others);
  announced_in_ = announced_out_ = {probed_};
}

ForwardGraph Stage::graph_of(const Tensors& inputs, const Tensors& outputs) const {
  ForwardGraph graph;
  for (const auto& input : inputs)
    if (input.requires_grad()) graph.inputs.push_back(input);
  for (std::size_t at = 0; at < (place_.last() ? 1 : outputs.size()); ++at)
    if (outputs[at].requires_grad()) graph.outputs.push_back(torch::autograd::impl::gradient_edge(outputs[at]));
  return graph;
}

Tensors Stage::probe(const Probe& how, Tensors values, const Microbatch& microbatch) {
  probed_ = form_of(microbatch);
  incoming_ = {{probed_, how.incoming}};
  differentiable_in_ = differentiable(how.incoming);
  std::vector<at::Tensor> kept;
  for (const auto& buffer : module().buffers()) kept.push_back(buffer.clone());
  Tensors outputs;
  {
    const at::AutoGradMode differentiate(true);
    const auto leaves = as_leaves(std::move(values), differentiable_in_);
    outputs = run(leaves, microbatch);
    driver_.end_computation();
    outgoing_ = {{probed_, crossing_of(outputs, microbatch.samples())}};
    differentiable_out_ = differentiable(outgoing_.at(probed_));
    announced_in_ = announced_out_ = {probed_};
    reports_ = static_cast<int>(outputs.size());
    if (how.split) {
      const std::string operation = unsplittable(graph_of(leaves, outputs));
      if (!operation.empty())
        fail_config(
            "{}: the schedule splits backward into halves, but {} makes the gradients of its input and of its "
            "parameters in one piece; allowed: a schedule with whole backwards",
            name(), operation);
    }
  }
  const at::NoGradGuard no_grad;
  std::size_t next = 0;
  for (auto& buffer : module().buffers()) buffer.copy_(kept[next++]);
  for (auto& output : outputs) output = output.detach().contiguous();
  return outputs;
}

Tensors Stage::forward(int number, Tensors values, const Microbatch& microbatch) {
  const at::AutoGradMode differentiate(true);
  const auto leaves = as_leaves(std::move(values), differentiable_in_);
  auto outputs = run(leaves, microbatch);
  driver_.end_computation();
  check_outgoing(number, outputs, microbatch);
  const bool fresh =
      activations_
          .emplace(number, Activation{graph_of(leaves, outputs), place_.last() ? outputs.front().detach() : at::Tensor()})
          .second;
  require(fresh, "{}: a second forward of microbatch {}", name(), number);
  for (auto& output : outputs) output = output.detach();
  return outputs;
}

Tensors Stage::evaluate(int number, Tensors values, const Microbatch& microbatch) {
  const at::NoGradGuard no_grad;
  auto outputs = run(std::move(values), microbatch);
  driver_.end_evaluation();
  check_outgoing(number, outputs, microbatch);
  return outputs;
}

Stage::Activation& Stage::activation(int number) {
  const auto found = activations_.find(number);
  require(found != activations_.end(), "{}: a backward of microbatch {} without its forward", name(), number);
  return found->second;
}

at::Tensor Stage::loss_gradient(int number, double factor) { return at::full_like(activation(number).loss, factor); }

Tensors Stage::backward(int number, const Tensors& gradients, const BackwardKind& how) {
  driver_.await_parameters();
  driver_.begin_gradients(how);
  const auto graph = std::move(activation(number).graph);
  auto of_inputs = filled(whole_backward(graph, gradients), graph.inputs);
  activations_.erase(number);
  driver_.end_gradients();
  return of_inputs;
}

Tensors Stage::input_gradient(int number, const Tensors& gradients) {
  driver_.await_parameters();
  auto& at = activation(number);
  const auto graph = std::move(at.graph);
  return filled(input_half(graph, gradients, at.weights), graph.inputs);
}

void Stage::weight_gradient(int number, const BackwardKind& how) {
  driver_.await_parameters();
  driver_.begin_gradients(how);
  weight_half(std::move(activation(number).weights));
  activations_.erase(number);
  driver_.end_gradients();
}

}  // namespace bonfire
