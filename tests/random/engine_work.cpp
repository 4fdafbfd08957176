#include "tests/random/engine_work.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace bonfire::cases {
namespace {

Random random_of(const EngineCase& each, const Place& place, const char* what) {
  return Random(each.seed).fork(fmt::format("{} {} {} {}", what, place.event, place.rank, place.number));
}

}  // namespace

at::Tensor input_of(const EngineCase& each, const Place& place) {
  const auto& event = each.script[static_cast<std::size_t>(place.event)];
  std::int64_t samples = event.samples;
  if (event.uneven) samples = place.rank == 1 ? 0 : samples + place.rank;
  std::vector<std::int64_t> shape{samples};
  if (each.model.length > 0) shape.push_back(each.model.length);
  const auto random = random_of(each, place, "input");
  if (!each.model.tokens) {
    shape.push_back(each.model.width);
    return numbers(random, shape).mul_(2).set_requires_grad(event.input_gradient);
  }
  auto tokens = at::empty(shape, at::kLong);
  for (std::int64_t at = 0; at < tokens.numel(); ++at)
    tokens.data_ptr<std::int64_t>()[at] =
        static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(at), static_cast<std::uint64_t>(each.model.rows)));
  return tokens;
}

at::Tensor loss_of(const EngineCase& each, const std::vector<at::Tensor>& outputs, const Place& place, bool second) {
  const double divisor = 4.0 * each.model.width;
  const auto target = numbers(random_of(each, place, "target"), outputs[0].sizes());
  auto loss = second ? outputs[0].sin().sum() : (outputs[0] - target).pow(2).sum();
  for (std::size_t at = 1; at < outputs.size(); ++at) loss = loss + outputs[at].cos().sum() * 0.3;
  loss = loss / divisor;
  // A loss that nothing trained is part of has a backward all the same.
  return loss.requires_grad() ? loss : loss + at::zeros({}, at::kDouble).requires_grad_(true);
}

Context context_of(const EngineCase& each, const Place& place) {
  Context context{.event = place.event, .rank = place.rank};
  const auto& event = each.script[static_cast<std::size_t>(place.event)];
  // Some call is always there to throw.
  if (!each.model.root.calls.empty()) context.after = event.after % static_cast<int>(each.model.root.calls.size());
  return context;
}

std::vector<at::Tensor> losses_of(const EngineCase& each, PartImpl& model, const Place& place, const Context& context) {
  const auto& event = each.script[static_cast<std::size_t>(place.event)];
  const auto outputs = model.forward(input_of(each, place), context);
  auto loss = loss_of(each, outputs, place, false);
  if (event.two_forwards) {
    const Place other{place.event, place.rank, place.number + 100};
    loss = loss + loss_of(each, model.forward(input_of(each, other), context), other, false);
  }
  const double part = 1.0 / event.microbatches;
  if (!event.retain) return {loss * part};
  return {loss * part, loss_of(each, outputs, place, true) * part};
}

Names first_names(const torch::nn::Module& model) {
  Names names;
  std::map<const c10::TensorImpl*, std::string> first;
  for (const auto& item : model.named_parameters())
    names[item.key()] = first.try_emplace(item.value().unsafeGetTensorImpl(), item.key()).first->second;
  return names;
}

void freeze(const EngineCase& each, torch::nn::Module& model, const Names& names, int pattern) {
  const Random random = Random(each.seed).fork("frozen").fork(static_cast<std::uint64_t>(pattern));
  for (auto& item : model.named_parameters())
    item.value().set_requires_grad(random.fork(names.at(item.key())).below(0, 3) != 0);
}

std::string chosen_name(const torch::nn::Module& model) {
  for (const auto& item : model.named_parameters())
    if (item.value().numel() > 0) return item.key();
  return model.named_parameters().front().key();
}

}  // namespace bonfire::cases
