#include "tests/random/engine_work.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace bonfire::cases {
namespace {

constexpr int second_forward = 100;  // what is added to a microbatch's number for another one

Random random_of(const EngineCase& each, const Place& place, const char* what) {
  return Random(each.seed).fork(fmt::format("{} {} {} {}", what, place.event, place.rank, place.number));
}

std::int64_t samples_of(const EngineCase& each, const Place& place) {
  const auto& event = each.script[static_cast<std::size_t>(place.event)];
  if (!event.uneven) return event.samples;
  return place.rank == 1 ? 0 : event.samples + place.rank;
}

// Of everything that a microbatch has one number, or one row, for each of.
std::vector<std::int64_t> shape_of(const EngineCase& each, const Place& place) {
  const auto& event = each.script[static_cast<std::size_t>(place.event)];
  std::vector<std::int64_t> shape{samples_of(each, place)};
  if (each.model.length > 0) shape.push_back(event.length + (event.lengths ? (place.number + place.rank) % 2 : 0));
  return shape;
}

// The numbers of an event's forwards whose losses are differentiated.
std::vector<int> forwards_of(const Event& event) {
  int count = event.microbatches;
  if (event.act == Act::backward_twice) count = 2;
  if (event.act == Act::accumulate_step) ++count;
  std::vector<int> numbers;
  for (int number = 0; number < count; ++number) {
    numbers.push_back(number);
    if (event.two_forwards) numbers.push_back(number + second_forward);
  }
  return numbers;
}

at::Tensor classes_of(const EngineCase& each, const Place& place) {
  const auto& event = each.script[static_cast<std::size_t>(place.event)];
  const auto shape = shape_of(each, place);
  auto target = numbers_below(random_of(each, place, "classes"), shape, each.model.width);
  if (event.mask == Mask::all || (event.mask == Mask::microbatch && (place.number + place.rank + place.event) % 2 == 0))
    target.fill_(masked);
  if (event.mask == Mask::some) target.masked_fill_(numbers_below(random_of(each, place, "mask"), shape, 3).eq(0), masked);
  return target;
}

}  // namespace

at::Tensor numbers_below(const Random& random, at::IntArrayRef shape, int bound) {
  auto values = at::empty(shape, at::kLong);
  for (std::int64_t at = 0; at < values.numel(); ++at)
    values.data_ptr<std::int64_t>()[at] =
        static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(at), static_cast<std::uint64_t>(bound)));
  return values;
}

at::Tensor input_of(const EngineCase& each, const Place& place) {
  const auto& event = each.script[static_cast<std::size_t>(place.event)];
  auto shape = shape_of(each, place);
  const auto random = random_of(each, place, "input");
  if (each.model.tokens) return numbers_below(random, shape, each.model.rows);
  shape.push_back(each.model.width);
  return numbers(random, shape).mul_(2).set_requires_grad(event.input_gradient);
}

at::Tensor loss_of(const EngineCase& each, const std::vector<at::Tensor>& outputs, const Place& place, bool second) {
  const double divisor = each.classes ? 1 : 4.0 * each.model.width;
  at::Tensor loss;
  if (second)
    loss = outputs[0].sin().sum();
  else if (each.classes)
    loss = at::cross_entropy_loss(outputs[0].reshape({-1, each.model.width}), classes_of(each, place).flatten(), {},
                                  at::Reduction::Sum, masked);
  else
    loss = (outputs[0] - numbers(random_of(each, place, "target"), outputs[0].sizes())).pow(2).sum();
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

double count_of(const EngineCase& each, int event, int rank) {
  double count = 0;
  for (const int number : forwards_of(each.script[static_cast<std::size_t>(event)]))
    count += static_cast<double>(classes_of(each, {event, rank, number}).ne(masked).sum().item<std::int64_t>());
  return count;
}

double part_of(const EngineCase& each, int event, double scale) {
  return each.classes ? scale : 1.0 / each.script[static_cast<std::size_t>(event)].microbatches;
}

std::vector<at::Tensor> losses_of(const EngineCase& each, PartImpl& model, const Place& place, const Context& context,
                                  double part) {
  const auto& event = each.script[static_cast<std::size_t>(place.event)];
  const auto outputs = model.forward(input_of(each, place), context);
  auto loss = loss_of(each, outputs, place, false);
  if (event.two_forwards) {
    const Place other{place.event, place.rank, place.number + second_forward};
    loss = loss + loss_of(each, model.forward(input_of(each, other), context), other, false);
  }
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
