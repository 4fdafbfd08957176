#include "tests/random/pipeline_work.h"

#include <cmath>

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace bonfire::cases {
namespace {

// The mean over samples, and the worst of them.
Tensors squares(const Tensors& values, const at::Tensor& target) {
  auto wrong = (values[0] - target).pow(2).flatten(1).sum(1);
  for (std::size_t at = 1; at < values.size(); ++at)
    wrong = wrong + (values[at].is_floating_point() ? values[at].cos() : values[at] * 0.5).flatten(1).sum(1) * 0.3;
  return {wrong.mean() / static_cast<double>(values[0].size(-1)), wrong.detach().max()};
}

// The mean over targets that count, and twice the same as a report.
Tensors entropy(const Tensors& values, const at::Tensor& target) {
  const auto counts = target.ne(masked).to(at::kDouble);
  auto wrong = -values[0].log_softmax(-1).gather(-1, target.clamp_min(0).unsqueeze(-1)).squeeze(-1);
  for (std::size_t at = 1; at < values.size(); ++at)
    wrong = wrong + (values[at].is_floating_point()
                         ? values[at].cos().sum(-1)
                         : values[at].view(-1).mul(0.5).reshape(wrong.dim() == 1 ? std::vector<std::int64_t>{-1}
                                                                                 : std::vector<std::int64_t>{-1, 1})) *
                        0.3;
  const auto mean = (wrong * counts).sum() / counts.sum().clamp_min(1);
  return {mean, mean.detach() * 2};
}

}  // namespace

RowImpl::RowImpl(const PipelineCase& each, const UnitRange& units, bool plain, double off) : each_(each), units_(units) {
  Nursery nursery{.model = each.model, .random = Random(each.seed).fork("weights"), .plain = plain, .shaken = off};
  parts_.resize(static_cast<std::size_t>(units.count()));
  for (int at = 0; at < units.count(); ++at) {
    // The oracle may be registered in whatever order it likes.
    const int unit = each.units_reversed && !plain ? units.end - 1 - at : units.begin + at;
    const auto name = fmt::format("u{}", unit);
    parts_[static_cast<std::size_t>(unit - units.begin)] =
        register_module(name, make_part(each.units[static_cast<std::size_t>(unit)], nursery, name));
  }
}

Tensors RowImpl::forward(Tensors values, const Microbatch& microbatch) {
  if (units_.begin == 0 && each_.flags) values.push_back(at::arange(values[0].size(0), at::kLong).remainder(2).unsqueeze(1));
  for (const auto& part : parts_) {
    auto outputs = part->forward(values[0], {});
    values[0] = outputs[0];
    values.insert(values.end(), outputs.begin() + 1, outputs.end());
  }
  if (units_.end < static_cast<int>(each_.units.size())) return values;
  return each_.classes ? entropy(values, microbatch.target[0]) : squares(values, microbatch.target[0]);
}

std::vector<Microbatch> batch_of(const PipelineCase& each, int number, int data_rank) {
  const auto& event = each.script[static_cast<std::size_t>(number)];
  const bool trains = event.act == PipelineAct::train;
  std::vector<Microbatch> batch;
  for (int at = 0, count = trains ? each.table.table.microbatches : event.microbatches; at < count; ++at) {
    const auto key = [&](const char* what) {
      return Random(each.seed).fork(fmt::format("{} {} {} {}", what, number, data_rank, at));
    };
    std::vector<std::int64_t> shape{event.samples + (event.uneven ? (at + data_rank) % 3 : 0)};
    if (event.length > 0) shape.push_back(event.length + (event.lengths ? at % 2 : 0));
    auto wide = shape;
    wide.push_back(each.model.width);
    const auto classes = [&](const char* what, int bound) { return numbers_below(key(what), shape, bound); };
    Microbatch microbatch{
        .input = {each.model.tokens ? classes("tokens", each.model.rows) : numbers(key("input"), wide).mul_(2)},
        .target = {numbers(key("target"), wide)}};
    if (each.classes) {
      auto target = classes("classes", each.model.width);
      if (event.mask == Mask::all || (event.mask == Mask::microbatch && at == number % count)) target.fill_(masked);
      if (event.mask == Mask::some) target.masked_fill_(classes("mask", 3).eq(0), masked);
      microbatch.target = {target};
    }
    batch.push_back(std::move(microbatch));
  }
  return batch;
}

double weight_of(const PipelineCase& each, const Microbatch& microbatch) {
  if (!each.classes) return static_cast<double>(microbatch.samples());
  return static_cast<double>(microbatch.target[0].ne(masked).sum().item<std::int64_t>());
}

void freeze(const PipelineCase& each, torch::nn::Module& module, const PlainPipeline& plain, int pattern) {
  const Random random = Random(each.seed).fork("frozen").fork(static_cast<std::uint64_t>(pattern));
  for (auto& item : module.named_parameters()) {
    const auto& name = plain.names.at(item.key());
    item.value().set_requires_grad(pattern > 0 ? random.fork(name).below(0, 3) != 0 : plain.trained.at(name));
  }
}

namespace {

// One of those that have one use: the copies of others are kept equal.
std::string chosen_of(const PipelineCase& each, const Names& names) {
  std::map<std::string, int> uses;
  for (const auto& [name, first] : names) ++uses[first];
  std::vector<std::string> candidates;
  for (const auto& [name, count] : uses)
    if (count == 1) candidates.push_back(name);
  if (candidates.empty()) return "";
  return candidates[Random(each.seed).fork("ignored").below(0, candidates.size())];
}

PlainPipeline run_once(const PipelineCase& each, double off) {
  RowImpl model(each, {0, static_cast<int>(each.units.size())}, /*plain=*/true, off);
  PlainPipeline plain{.names = first_names(model)};
  for (const auto& item : model.named_parameters()) plain.trained[item.key()] = item.value().requires_grad();
  plain.chosen = chosen_of(each, plain.names);
  const bool ignores = each.options.wrap == Wrap::ignored;
  PlainOptimizer optimizer(each.update);
  for (int at = 0; at < static_cast<int>(each.script.size()); ++at) {
    const auto& event = each.script[static_cast<std::size_t>(at)];
    PipelineRecord record;
    if (event.act == PipelineAct::train) freeze(each, model, plain, event.frozen);
    double everything = 0;
    std::vector<std::vector<Microbatch>> batches;
    for (int rank = 0; rank < each.data_ranks() && event.act != PipelineAct::step_alone; ++rank) {
      batches.push_back(batch_of(each, at, rank));
      record.weights_of_ranks.push_back(0);
      for (const auto& microbatch : batches.back()) record.weights_of_ranks.back() += weight_of(each, microbatch);
      everything += record.weights_of_ranks.back();
    }
    for (std::size_t rank = 0; rank < batches.size(); ++rank)
      for (const auto& microbatch : batches[rank]) {
        const at::AutoGradMode mode(event.act == PipelineAct::train);
        // Targets count alike wherever they are; means over samples are averaged over the ranks.
        const double all = each.classes ? everything : record.weights_of_ranks[rank] * each.data_ranks();
        const double part = all == 0 ? 0 : weight_of(each, microbatch) / all;
        const auto outputs = model.forward(microbatch.input, microbatch);
        const auto loss = outputs[0] * part;
        record.loss += loss.item<double>();
        record.report += outputs[1].item<double>() * part;
        if (loss.requires_grad()) loss.backward();
      }
    if (event.act == PipelineAct::train) {
      std::map<std::string, at::Tensor> parameters;
      for (auto& item : model.named_parameters())
        if (ignores && item.key() == plain.chosen)
          item.value().mutable_grad().reset();
        else if (plain.names.at(item.key()) == item.key())
          parameters[item.key()] = item.value();
      record.norm = optimizer.step(parameters);
    }
    for (const auto& item : model.named_parameters()) record.weights[item.key()] = item.value().detach().clone();
    plain.events.push_back(std::move(record));
  }
  return plain;
}

}  // namespace

PlainPipeline run_plainly(const PipelineCase& each) {
  auto run = run_once(each, 0);
  set_tolerances(run.events, run_once(each, shaken).events,
                 [](const PipelineRecord& record, const PipelineRecord& other, const auto& look) {
                   look(std::abs(other.loss - record.loss) / std::max(1.0, std::abs(record.loss)));
                   look(std::abs(other.report - record.report) / std::max(1.0, std::abs(record.report)));
                 });
  return run;
}

}  // namespace bonfire::cases
