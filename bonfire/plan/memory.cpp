#include "bonfire/plan/memory.h"

#include <algorithm>
#include <deque>
#include <utility>

#include <fmt/format.h>

#include "bonfire/base/limits.h"
#include "bonfire/base/size.h"
#include "bonfire/plan/course.h"
#include "bonfire/plan/loans.h"

namespace bonfire::plan {
namespace {

// The pool of gathered parameters. The first pass finds out the order: each Unit comes in when it is needed, and goes out
// when it has run, whatever comes next. The ones after it follow the course.
std::int64_t gathered_bytes(const std::vector<CourseUnit>& units, const std::vector<FlatLayout>& flats,
                            const DataParallel& layout, const std::vector<Event>& course) {
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

  for (int pass = 0; pass < 3; ++pass)
    for (const auto& event : course) {
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

// Walks through a step: what is out beside the model's state, and when that is most.
class StepWalk {
 public:
  StepWalk(const ModelDescription& model, const std::vector<FlatLayout>& flats, const DataParallel& layout,
           const MemoryOptions& options)
      : model_(model),
        flats_(flats),
        layout_(layout),
        options_(options),
        factors_(layout.factors()),
        units_(course_units(model, flats)) {
    std::int64_t saved = 0;
    for (const auto& unit : model.units) kept_.push_back(saved += unit.activation_bytes(bytes_of(layout.compute)));
  }

  void follow(const std::vector<Event>& course) {
    compressed_ = 0;
    for (const auto& event : course) {
      last_ = event.microbatch + 1 == layout_.microbatches;
      switch (event.act) {
        case Act::open_gradients: open(event.index); break;
        case Act::backward: note(activations_in_backward(event.index)); break;
        case Act::reduce: reduce(event.index); break;
        case Act::end_of_pass:
          note(0);
          while (!flights_.empty()) land();
          break;
        default: break;
      }
    }
    note(0);
  }

  std::int64_t whole_gradients() const { return pool_.bytes(); }
  std::int64_t communication() const { return arrivals_.bytes() + compressed_at_peak_; }
  std::int64_t activations() const { return activations_at_peak_; }

 private:
  struct Flight {
    std::optional<std::size_t> loan;
    std::vector<std::int64_t> arrivals;  // where the parts of other ranks come
  };

  std::int64_t activations_in_backward(std::size_t at) const {
    const auto& unit = model_.units[at];
    const std::int64_t element = bytes_of(layout_.compute);
    if (unit.kind == UnitKind::head && unit.output_elements * element * options_.tokens > most_logit_bytes)
      return activations_of_chunks(at);
    const std::int64_t incoming = unit.kind == UnitKind::head ? 0 : unit.output_elements;
    const Dtype arrives = factors_.gradients > 1 ? layout_.reduction : layout_.gradient;
    const std::int64_t weight = unit.weight_apart || arrives != layout_.compute ? unit.weight_elements * element : 0;
    const std::int64_t working = std::max(unit.working_elements * element * options_.tokens,
                                          unit.working_beside_weight * element * options_.tokens + weight);
    return (kept_[at] + incoming * element) * options_.tokens + working;
  }

  // A head whose logits would be too many makes them in chunks, and both gradients in forward: that of the weight in fp32,
  // that of its input in the place of the normed input, which is there as well until forward has ended.
  std::int64_t activations_of_chunks(std::size_t at) const {
    const auto& unit = model_.units[at];
    const std::int64_t element = bytes_of(layout_.compute), input = unit.weight_elements / unit.output_elements;
    const std::int64_t kept = kept_[at] - unit.output_elements * element;
    const std::int64_t row_bytes = unit.output_elements * element;
    return (kept + input * element) * options_.tokens + unit.weight_elements * bytes_of(Dtype::fp32) +
           rows_of_chunk(options_.tokens, row_bytes) * row_bytes;
  }

  void open(std::size_t flat) {
    while (flights_.size() >= limit()) land();
    opened_.resize(flats_.size());
    opened_[flat] = pool_.borrow(flats_[flat].trained_elements() * bytes_of(layout_.reduction));
  }

  void reduce(std::size_t flat) {
    const std::int64_t wire = flats_[flat].trained_elements() * bytes_of(layout_.reduction);
    if (layout_.shard > 1) {
      Flight flight;
      if (factors_.gradients > 1)
        flight.loan = opened_[flat];
      else if (layout_.reduction != layout_.gradient)
        flight.loan = pool_.borrow(wire);
      for (const auto& region : flats_[flat].regions)
        if (options_.on_host && region.trained)
          flight.arrivals.push_back(
              arrivals_.take(region.elements / layout_.shard * (layout_.shard - 1) * bytes_of(layout_.reduction)));
      flights_.push_back(std::move(flight));
      note(0);
      while (flights_.size() >= limit()) land();
    }
    if (last_ && layout_.replicate > 1) compressed_ += compressed_bytes(flats_[flat]);
  }

  // What the reduction over the replicas holds until backward has ended, or, with PowerSGD, for good.
  std::int64_t compressed_bytes(const FlatLayout& flat) const {
    const std::int64_t elements = flat.trained_elements() / layout_.shard;
    switch (layout_.compression) {
      case Compression::none: return 0;
      case Compression::bf16:
      case Compression::fp16: return 2 * elements;
      case Compression::powersgd: return elements * bytes_of(layout_.gradient);
    }
    return 0;
  }

  void land() {
    if (flights_.front().loan) pool_.give_back(*flights_.front().loan);
    for (const auto buffer : flights_.front().arrivals) arrivals_.give_back(buffer);
    flights_.pop_front();
  }

  void note(std::int64_t activations) {
    if (activations + compressed_ <= activations_at_peak_ + compressed_at_peak_) return;
    activations_at_peak_ = activations;
    compressed_at_peak_ = compressed_;
  }

  std::size_t limit() const { return static_cast<std::size_t>(whole_gradient_limit(layout_)); }

  const ModelDescription& model_;
  const std::vector<FlatLayout>& flats_;
  const DataParallel& layout_;
  const MemoryOptions& options_;
  Factors factors_;
  std::vector<CourseUnit> units_;
  std::vector<std::int64_t> kept_;  // per Unit: what forward has kept up to its end, per token
  Loans pool_;
  std::vector<std::size_t> opened_;  // per buffer: the loan of its whole gradient
  std::deque<Flight> flights_;
  bool last_ = true;
  Arrivals arrivals_;
  std::int64_t compressed_ = 0;
  std::int64_t activations_at_peak_ = 0, compressed_at_peak_ = 0;
};

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

Memory memory_of(const ModelDescription& model, const DataParallel& given, const MemoryOptions& options) {
  const auto flats = flats_of(model, given);
  DataParallel layout = given;
  // Nothing to move where ranks compute on the host.
  if (options.on_host) layout.offload = Offload::none;
  const auto units = course_units(model, flats);
  const auto course = course_of_step(units, layout);
  StepWalk walk(model, flats, layout, options);
  for (int step = 0; step < 2; ++step) walk.follow(course);
  return {.state = model_state(flats, layout, options.optimizer_states),
          .gathered = gathered_bytes(units, flats, layout, course),
          .whole_gradients = walk.whole_gradients(),
          .communication = walk.communication(),
          .activations = walk.activations(),
          .data = options.data_bytes + model.constant_bytes};
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
  const int ranks = layout.ranks();
  for (int shard = 1; shard <= ranks; ++shard) {
    if (ranks % shard != 0) continue;
    for (const auto what : {Sharded::none, Sharded::optimizer, Sharded::gradients, Sharded::parameters}) {
      if ((what == Sharded::none) != (shard == 1)) continue;
      DataParallel tried = layout;
      tried.replicate = ranks / shard;
      tried.shard = shard;
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
  DataParallel most = layout;
  most.replicate = 1;
  most.shard = layout.ranks();
  most.what = most.shard > 1 ? Sharded::parameters : layout.what;
  most.reshard_ranks = 0;
  return text +
         fmt::format("; shard = {}, the most that {} ranks can, still needs {}: use more ranks or a smaller microbatch",
                     most.shard, layout.ranks(), format_bytes(memory_of(model, most, options).total()));
}

}  // namespace bonfire::plan
