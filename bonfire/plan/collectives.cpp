#include "bonfire/base/error.h"
#include "bonfire/plan/layout.h"
#include "bonfire/plan/step_events.h"
#include "bonfire/plan/tensor_part.h"

namespace bonfire::plan {
namespace {

struct Issued {
  Collective collective;
  int ranks;
};

// The list, and among how many ranks each of it is. A group of one rank issues nothing.
class List {
 public:
  List(const ModelDescription& model, const DataParallel& layout)
      : layout_(layout), factors_(layout.factors()), flats_(flats_of(model, layout)) {
    if (layout.compression == Compression::powersgd && layout.shard > 1)
      fail_config(
          "compression \"powersgd\" with a sharding factor of {}: a share has no rows and columns; allowed: a factor of 1",
          layout.shard);
    if (layout.compression == Compression::powersgd) find_factors(groups_in_backward_order(model));

    const auto units = step_units(model, flats_);
    const Exchange exchange{.tokens = layout.tokens,
                            .samples = layout.samples,
                            .element_bytes = bytes_of(layout.compute),
                            .context = layout.context};
    for (const auto& event : events_of_step(units, layout)) {
      if (event.act == Act::forward) within_layers(exchanged_in_forward(model, event.index, exchange), model.tensor);
      if (event.act == Act::backward)
        within_layers(exchanged_in_backward(model, event.index, exchange, input_differentiates(units, event.index, false)),
                      model.tensor);
      if (event.act == Act::gather) add(CollectiveKind::all_gather, Axis::shard, flats_[event.index].bytes, event.ranks);
      if (event.act == Act::reduce) reduce(event);
    }
    for (const std::int64_t elements : right_) across(elements * bytes_of(layout.gradient));
    add(CollectiveKind::broadcast, Axis::data, layout.buffer_bytes, layout.ranks());
    add(CollectiveKind::all_reduce, Axis::data, 8, layout.ranks());  // the loss
    if (layout.clip) add(CollectiveKind::all_reduce, Axis::shard, 8, factors_.optimizer);
    if (layout.clip) add(CollectiveKind::all_reduce, Axis::tensor, 8, model.tensor.ranks);
    for (const auto& collective : collectives_of_update(flats_, layout)) list_.push_back({collective, layout.shard});
  }

  std::vector<Issued> issued() && { return std::move(list_); }

 private:
  // PowerSGD: the left factors with everything that is not compressed behind them, while backward runs; the right factors
  // when it has ended.
  void find_factors(const std::vector<ParameterGroup>& groups) {
    left_.resize(flats_.size());
    right_.resize(flats_.size());
    for (std::size_t at = 0; at < flats_.size(); ++at)
      for (const std::size_t group : flats_[at].groups)
        for (const auto& parameter : groups[group].parameters) {
          if (!parameter.trained) continue;
          const auto low = low_rank(parameter.shape, layout_.powersgd_rank);
          left_[at] += low.rank ? low.rows * low.rank : parameter.elements;
          right_[at] += low.columns * low.rank;
        }
  }

  void within_layers(const std::vector<Collective>& exchanged, const TensorPart& part) {
    for (const auto& collective : exchanged)
      list_.push_back({collective, collective.axis == Axis::context ? layout_.context.ranks : part.ranks});
  }

  void reduce(const Event& event) {
    const std::int64_t elements = flats_[event.index].trained_elements();
    add(CollectiveKind::reduce_scatter, Axis::shard, elements * bytes_of(layout_.reduction), layout_.shard);
    if (event.microbatch + 1 < layout_.microbatches) return;
    switch (layout_.compression) {
      case Compression::none: return regions_across(flats_[event.index], bytes_of(layout_.gradient));
      case Compression::bf16:
      case Compression::fp16: return regions_across(flats_[event.index], 2);
      case Compression::powersgd: return across(left_[event.index] * bytes_of(layout_.gradient));
    }
  }

  // A rank's shares of two regions do not lie side by side.
  void regions_across(const FlatLayout& flat, std::int64_t element_bytes) {
    for (const auto& region : flat.regions)
      if (region.trained) across(region.elements / layout_.shard * element_bytes);
  }

  void across(std::int64_t bytes) { add(CollectiveKind::all_reduce, Axis::replicate, bytes, layout_.replicate); }

  void add(CollectiveKind kind, Axis axis, std::int64_t bytes, int ranks) {
    if (ranks > 1 && bytes > 0) list_.push_back({{kind, axis, bytes}, ranks});
  }

  const DataParallel& layout_;
  Factors factors_;
  std::vector<FlatLayout> flats_;
  std::vector<std::int64_t> left_, right_;  // per buffer, in elements
  std::vector<Issued> list_;
};

double moved(const Collective& collective, int ranks) {
  return bus_factor(collective.kind, ranks) * static_cast<double>(collective.bytes);
}

}  // namespace

std::vector<Collective> collectives_of_update(const std::vector<FlatLayout>& flats, const DataParallel& layout) {
  const Factors factors = layout.factors();
  std::vector<Collective> list;
  if (factors.optimizer == 1) return list;
  const auto send = [&](bool scaled) {
    for (const auto& flat : flats)
      if (factors.parameters == 1 && flat.any_trained() && (flat.scales() > 0) == scaled)
        list.push_back({CollectiveKind::all_gather, Axis::shard, flat.trained_bytes()});
  };
  send(false);
  std::int64_t scales = 0;
  for (const auto& flat : flats) scales += flat.scales();
  if (scales == 0) return list;
  list.push_back({CollectiveKind::all_reduce, Axis::shard, scales * bytes_of(Dtype::fp32)});
  send(true);
  return list;
}

std::vector<Collective> collectives_of_step(const ModelDescription& model, const DataParallel& layout) {
  std::vector<Collective> list;
  for (const auto& [collective, ranks] : List(model, layout).issued()) list.push_back(collective);
  return list;
}

double bytes_moved(const ModelDescription& model, const DataParallel& layout) {
  double sum = 0;
  for (const auto& [collective, ranks] : List(model, layout).issued()) sum += moved(collective, ranks);
  return sum;
}

double bytes_moved(const std::vector<Collective>& list, const DataParallel& layout) {
  require(layout.reshard_ranks == 0, "the bytes of a list with gathers among {} of {} ranks cannot be told",
          layout.reshard_ranks, layout.shard);
  double sum = 0;
  for (const auto& one : list) {
    require(one.axis == Axis::shard || one.axis == Axis::replicate || one.axis == Axis::data,
            "axis {} in a list of data parallelism; allowed: shard, replicate, data", name_of(one.axis));
    const int ranks = one.axis == Axis::shard       ? layout.shard
                      : one.axis == Axis::replicate ? layout.replicate
                                                    : layout.ranks();
    sum += moved(one, ranks);
  }
  return sum;
}

}  // namespace bonfire::plan
