#include "bonfire/plan/memory.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "bonfire/base/size.h"
#include "bonfire/plan/activation_bytes.h"
#include "bonfire/plan/building.h"
#include "bonfire/plan/loans.h"
#include "bonfire/plan/reductions.h"
#include "bonfire/plan/step_events.h"

namespace bonfire::plan {
namespace {

// The pool of gathered parameters. The first pass finds out the order: each Unit is gathered when it is needed, and freed
// when it has run, whatever comes next. The ones after it follow the order that was learned; without one they are all like
// the first.
std::int64_t gathered_bytes(const std::vector<StepUnit>& units, const std::vector<FlatLayout>& flats,
                            const DataParallel& layout, const std::vector<Event>* events) {
  if (!layout.comes_and_goes()) return 0;
  constexpr std::size_t none = static_cast<std::size_t>(-1);
  Loans pool;
  std::vector<std::size_t> loan(flats.size(), none), part(flats.size(), none);
  const auto bring_in = [&](std::size_t flat, std::int64_t place) {
    if (loan[flat] == none) loan[flat] = pool.borrow(flats[flat].bytes, place);
  };
  const auto let_go = [&](std::size_t flat) {
    if (loan[flat] != none) pool.give_back(std::exchange(loan[flat], none));
    if (part[flat] != none) pool.give_back(std::exchange(part[flat], none));
  };

  std::optional<std::size_t> root;
  for (const auto& unit : units)
    if (unit.flat && unit.root) root = unit.flat;
  const auto root_comes = [&] {
    if (root) bring_in(*root, -1);
  };
  const auto root_goes = [&] {
    if (root) let_go(*root);
  };
  root_comes();
  for (const auto& unit : units) {
    if (!unit.flat || unit.root) continue;
    bring_in(*unit.flat, -1);
    if (layout.reshard_after_forward || !unit.backward) let_go(*unit.flat);
  }
  if (layout.reshard_after_forward) root_goes();
  root_comes();
  for (auto unit = units.rbegin(); unit != units.rend(); ++unit) {
    if (!unit->flat || unit->root || !unit->backward) continue;
    bring_in(*unit->flat, -1);
    let_go(*unit->flat);
  }
  root_goes();
  for (int pass = 0; events && pass < 3; ++pass)
    for (const auto& event : *events) {
      if (event.act == Act::gather) bring_in(event.index, event.place);
      if (event.act == Act::let_go) let_go(event.index);
      if (event.act == Act::keep_part) {
        const std::size_t kept = pool.borrow(flats[event.index].bytes / event.ranks);
        let_go(event.index);
        part[event.index] = kept;
      }
    }
  return pool.bytes();
}

// What reductions hold from the first step on.
struct Pools {
  WholeGradients whole;
  Arrivals arrivals;

  std::int64_t bytes() const { return whole.memory.bytes() + arrivals.bytes(); }
};

// Walks through a step: what there is beside the model's state, and when that is most.
class StepWalk {
 public:
  StepWalk(Pools& pools, const std::vector<FlatLayout>& flats, const DataParallel& layout, const Activations& activations,
           bool on_host)
      : flats_(flats),
        layout_(layout),
        activations_(activations),
        reductions_(pools.whole, on_host ? &pools.arrivals : nullptr, flats, layout) {}

  void follow(const std::vector<Event>& events) {
    compressed_ = 0;
    for (const auto& event : events) {
      switch (event.act) {
        case Act::forward: note(activations_.in_forward[event.index]); break;
        case Act::open_gradients: reductions_.open(event.index); break;
        case Act::backward:
          note(activations_.in_backward[event.index]);
          before_ = event.index > 0 ? activations_.kept[event.index - 1] + activations_.incoming[event.index - 1] : 0;
          break;
        case Act::reduce:
          reductions_.launch(event.index);
          note(0);
          if (event.microbatch + 1 < layout_.microbatches) break;
          compressed_ += compressed_bytes(flats_[event.index], layout_);
          note(before_ + rounding_bytes(flats_[event.index], layout_));
          break;
        case Act::end_of_pass:
          note(0);
          reductions_.land_all();
          break;
        default: break;
      }
    }
    note(0);
  }

  std::int64_t compressed() const { return compressed_at_peak_; }
  std::int64_t activations() const { return activations_at_peak_; }

 private:
  void note(std::int64_t activations) {
    if (activations + compressed_ <= activations_at_peak_ + compressed_at_peak_) return;
    activations_at_peak_ = activations;
    compressed_at_peak_ = compressed_;
  }

  const std::vector<FlatLayout>& flats_;
  const DataParallel& layout_;
  const Activations& activations_;
  Reductions reductions_;
  std::int64_t compressed_ = 0;
  std::int64_t before_ = 0;  // what Units keep whose backward is yet to come
  std::int64_t activations_at_peak_ = 0, compressed_at_peak_ = 0;
};

// Goes by what is known of the order before it. Returns what the pools have come to hold.
std::int64_t follow_first_step(Pools& pools, const ModelDescription& model, const std::vector<FlatLayout>& flats,
                               const DataParallel& layout, const MemoryOptions& options) {
  const auto units = step_units(model, flats);
  const auto activations = activations_of(model, units, layout, {.memory = options});
  StepWalk(pools, flats, layout, activations, options.on_host).follow(events_of_step(units, layout));
  return pools.bytes();
}

}  // namespace

ModelState model_state(const std::vector<FlatLayout>& flats, const DataParallel& layout, int optimizer_states) {
  const Factors factors = layout.factors();
  ModelState state;
  // `from`: with this much offloaded, or more, it lies on the host.
  const auto hold = [&](std::int64_t ModelState::*part, Offload from, std::int64_t bytes) {
    state.*(layout.offload >= from ? &ModelState::host : part) += bytes;
  };
  for (const auto& flat : flats) {
    state.parameters += flat.scales() * bytes_of(Dtype::fp32);
    for (const auto& region : flat.regions) {
      hold(&ModelState::parameters, Offload::parameters, region.bytes() / factors.parameters);
      if (!region.trained) continue;
      const std::int64_t updated = region.elements / factors.optimizer;
      // Masters that lie elsewhere than what forward reads are another copy, whatever their type.
      if (region.compute != region.master || layout.offload == Offload::optimizer)
        hold(&ModelState::masters, Offload::optimizer, updated * bytes_of(region.master));
      state.gradients += region.elements / factors.gradients * bytes_of(layout.gradient);
      hold(&ModelState::optimizer, Offload::optimizer, optimizer_states * updated * bytes_of(region.master));
    }
  }
  return state;
}

void hold_copy(Memory& memory, const std::vector<FlatLayout>& flats, const DataParallel& layout,
               const MemoryOptions& options) {
  if (!options.copies_to_save) return;
  (options.on_host ? memory.saving : memory.state.host) += saved_bytes(flats, layout, options.optimizer_states);
}

std::int64_t saved_bytes(const std::vector<FlatLayout>& flats, const DataParallel& layout, int optimizer_states) {
  std::int64_t bytes = 0;
  for (const auto& flat : flats)
    for (const auto& region : flat.regions)
      bytes += region.trained ? region.elements * bytes_of(region.master) * (1 + optimizer_states) : region.bytes();
  return bytes / (layout.shard * layout.replicate);
}

std::int64_t compressed_bytes(const FlatLayout& flat, const DataParallel& layout) {
  const std::int64_t elements = flat.trained_elements() / layout.shard;
  switch (layout.compression) {
    case Compression::none: return 0;
    case Compression::bf16:
    case Compression::fp16: return 2 * elements;
    case Compression::powersgd: return elements * bytes_of(layout.gradient);
  }
  return 0;
}

Memory memory_of(const ModelDescription& model, const DataParallel& given, const MemoryOptions& options) {
  const auto flats = flats_of(model, given);
  DataParallel layout = given;
  // Nothing to move where ranks compute on the host.
  if (options.on_host) layout.offload = Offload::none;
  const auto units = step_units(model, flats);
  const auto events = events_of_step(units, layout);
  const auto activations = activations_of(model, units, layout, {.memory = options});
  const auto first_flats = flats_of(groups_in_likely_order(model), given);
  Pools pools;
  const std::int64_t pools_at_first = follow_first_step(pools, model, first_flats, layout, options);
  StepWalk walk(pools, flats, layout, activations, options.on_host);
  for (int step = 1; step < 3; ++step) walk.follow(events);
  const bool unit_by_unit = given.comes_and_goes() && !options.built_whole;
  Memory memory{.state = model_state(flats, layout, options.optimizer_states),
                .gathered = gathered_bytes(units, flats, layout, options.learns_order ? &events : nullptr),
                .whole_gradients = pools.whole.memory.bytes(),
                .communication = pools.arrivals.bytes() + walk.compressed(),
                .activations = walk.activations(),
                .data = options.data_bytes + model.constant_bytes,
                .workspaces = options.workspace_bytes,
                .building = model.constant_bytes + (unit_by_unit ? bytes_unit_by_unit(units, flats, layout)
                                                                 : bytes_of_whole_build(first_flats, layout))};
  hold_copy(memory, flats, layout, options);
  memory.state.host += activations.on_host;
  if (!given.comes_and_goes())
    memory.moving = bytes_of_move(first_flats, flats, layout) + pools_at_first + memory.data + memory.workspaces;
  return memory;
}

const std::vector<PrecisionKind>& precision_kinds() {
  static const std::vector<PrecisionKind> kinds = {
      {"fp32", Dtype::fp32, Dtype::fp32, Dtype::fp32},
      {"mixed", Dtype::bf16, Dtype::fp32, Dtype::bf16},
      {"mixed, fp32 gradients", Dtype::bf16, Dtype::fp32, Dtype::fp32},
  };
  return kinds;
}

BytesPerParameter bytes_per_parameter(const PrecisionKind& kind, const Factors& factors, int optimizer_states) {
  const auto bytes = [](Dtype dtype, int factor) { return static_cast<double>(bytes_of(dtype)) / factor; };
  return {.parameters = bytes(kind.compute, factors.parameters),
          .gradients = bytes(kind.gradient, factors.gradients),
          .optimizer = (optimizer_states + (kind.compute == kind.master ? 0 : 1)) * bytes(kind.master, factors.optimizer)};
}

double reduction_factor(const PrecisionKind& kind, const Factors& factors, int optimizer_states) {
  return bytes_per_parameter(kind, {}, optimizer_states).total() /
         bytes_per_parameter(kind, factors, optimizer_states).total();
}

std::optional<Fit> smallest_fit(const ModelDescription& model, const DataParallel& layout, const MemoryOptions& options,
                                std::int64_t cap) {
  for (int shard = 1; shard <= layout.readers(); ++shard) {
    if (layout.readers() % shard != 0) continue;
    for (const auto what : {Sharded::none, Sharded::optimizer, Sharded::gradients, Sharded::parameters}) {
      if ((what == Sharded::none) != (shard == 1)) continue;
      DataParallel tried = layout.with_shard(shard);
      tried.what = what;
      tried.reshard_ranks = 0;
      const std::int64_t bytes = memory_of(model, tried, options).total();
      if (bytes <= cap) return Fit{shard, what, bytes};
    }
  }
  return std::nullopt;
}

std::string does_not_fit(const ModelDescription& model, const DataParallel& layout, const MemoryOptions& options,
                         std::int64_t cap) {
  const std::int64_t needed = memory_of(model, layout, options).total();
  std::string text = fmt::format(
      "shard = {}, sharded = \"{}\" needs {} ({} bytes) on each rank, {} more than the {} it may have", layout.shard,
      name_of(layout.what), format_bytes(needed), needed, format_bytes(needed - cap), format_bytes(cap));
  if (const auto fit = smallest_fit(model, layout, options, cap))
    return text + fmt::format("; shard = {}, sharded = \"{}\" would fit with {}", fit->shard, name_of(fit->what),
                              format_bytes(fit->bytes));
  DataParallel most = layout.with_shard(layout.readers());
  most.what = most.shard > 1 ? Sharded::parameters : layout.what;
  most.reshard_ranks = 0;
  return text +
         fmt::format("; shard = {}, the most that {} ranks can, still needs {}: use more ranks or a smaller microbatch",
                     most.shard, layout.ranks(), format_bytes(memory_of(model, most, options).total()));
}

}  // namespace bonfire::plan
