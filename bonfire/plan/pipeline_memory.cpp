#include <algorithm>
#include <deque>
#include <map>
#include <utility>

#include "bonfire/plan/activation_bytes.h"
#include "bonfire/plan/adapters.h"
#include "bonfire/plan/building.h"
#include "bonfire/plan/loans.h"
#include "bonfire/plan/pipeline.h"
#include "bonfire/plan/reductions.h"
#include "bonfire/plan/step_events.h"
#include "bonfire/plan/tensor_part.h"
#include "bonfire/plan/unit_window.h"

namespace bonfire::plan {
namespace {

using schedule::Action;
using schedule::Kind;

// What the second half of a Unit's backward needs of the first, in elements per token: the two factors of each weight's
// gradient, of which one is what forward read and the other the gradient of what it made.
struct PutOff {
  std::int64_t elements = 0;
  std::int64_t kept = 0;  // of these, what forward has kept already
  // Layers of ours let go of what they have kept when they have run, and autograd when all of the first half has: what is
  // not ours, or has no weights. Less than 0: all of it.
  std::int64_t retained = -1;
  std::int64_t at_its_end = 0;  // a norm's own gradient, its input, and what goes past it
};
std::int64_t rows_of(const UnitDescription& unit, const std::string& layer) {
  for (const auto& parameter : unit.parameters)
    if (parameter.name == layer + ".weight") return parameter.shape[0];
  return 0;
}
PutOff put_off(const ModelDescription& part, const UnitDescription& unit, const UnitDescription& described, Dtype compute,
               const MemoryOptions& options) {
  PutOff all;
  if (unit.kind == UnitKind::root) return all;
  const auto& spec = part.spec;
  const bool attends = spec.type == ModelType::llama || spec.type == ModelType::gpt2;
  if (spec.type != ModelType::vgg) all.retained = 0;
  if (attends && unit.kind == UnitKind::block) {
    // Torch's attention: what it reads, and on a CPU what it has made. Ours lets go of both.
    const auto own = heads_of(spec, part.tensor);
    const bool torchs = !options.on_host || bytes_of(compute) == 2 || !options.own_attention;
    if (torchs) all.retained = spec.head_dim * ((options.on_host ? 2 : 1) * own.heads + 2 * own.kv_heads);
    all.at_its_end = 3 * elements_between(part.tensor, spec.dim);
  }
  const auto add = [&](const ParameterDescription& parameter) {
    const auto& shape = parameter.shape;
    if (!parameter.trained || shape.size() < 2) return;
    // An adapter's two factors are small, but for what its product has read and the gradient of what that has made, which
    // all adapters of the product share.
    if (is_adapter(parameter.name)) {
      if (!parameter.name.ends_with(".a")) return;
      const std::string layer = parameter.name.substr(0, parameter.name.find(".adapters."));
      const bool first = adapter_parameter(layer, adapters_of(unit, layer).front().name, 'a') == parameter.name;
      all.elements += 2 * shape[0] + (first ? shape[1] + rows_of(unit, layer) : 0);
      all.kept += shape[0] + (first ? shape[1] : 0);
      return;
    }
    // The rows of a table need the gradient alone, and all tables the same; a product that begins the model, also what it
    // has made of the data.
    if (unit.kind == UnitKind::embedding) {
      all.kept = compute == Dtype::fp32 ? 0 : unit.saved_casts;
      all.elements = unit.output_elements + all.kept;
      return;
    }
    const Convolution convolution = convolution_of(part, unit);
    const bool product = shape.size() == 2;
    const std::int64_t input = product ? shape[1] : convolution.input();
    const std::int64_t gradient = product ? shape[0] : convolution.output();
    all.elements += input + gradient;
    // A loss has its gradient in the place of logits. Of other products forward keeps the input, but for norms and
    // activations, which are made again.
    const bool made_again = attends ? parameter.name != "attention.output.weight" : parameter.name == "feed.down.weight";
    if (unit.kind == UnitKind::head)
      all.kept += input + gradient;
    else if (!made_again)
      all.kept += input;
  };
  for (const auto& parameter : unit.parameters) add(parameter);
  for (const auto& shared : unit.shared)
    for (const auto& parameter : part.units.front().parameters)
      if (parameter.name == shared) add(parameter);
  // Unless they are kept as well.
  all.kept += unit.saved_elements - described.saved_elements;
  return all;
}

struct StageCosts {
  StageCosts(const ModelDescription& model, const PipelineLayout& layout, const MemoryOptions& options, int stage)
      : part(stage_model(model, layout, stage)),
        flats(flats_of_stage(model, layout, stage)),
        units(step_units(part, flats)) {
    const auto described = describe(model.spec, model.tensor);
    for (const auto& unit : part.units)
      later.push_back(put_off(part, unit, described.unit(unit.name), layout.data.compute, options));
    differentiates = trains_before(model, layout, stage);
  }

  bool runs_backward(std::size_t unit) const { return !units[unit].root && (differentiates || units[unit].backward); }

  ModelDescription part;
  std::vector<FlatLayout> flats;
  std::vector<StepUnit> units;
  std::vector<PutOff> later;    // by Unit
  bool differentiates = false;  // a gradient of what comes in is wanted
};

// A rank's row, cell by cell. Buffers that a pool lends are never given away, so what they come to is added to the most of
// everything else.
class RowMemory {
 public:
  RowMemory(const ModelDescription& model, const PipelineLayout& layout, const MemoryOptions& options, int rank)
      : model_(model), layout_(layout), options_(options), row_(layout.table.rows.at(static_cast<std::size_t>(rank))) {
    if (options.on_host) layout_.data.offload = Offload::none;
    for (const auto& action : row_)
      if (action.kind == Kind::forward) stages_.try_emplace(action.stage, model, layout, options, action.stage);
    for (auto& [stage, costs] : stages_) {
      reductions_.try_emplace(stage, whole_, options.on_host ? &arrivals_ : nullptr, costs.flats, layout_.data);
      if (layout_.gathers_units && layout_.data.comes_and_goes()) add_window(stage, costs);
    }
  }

  Memory run() {
    // A stage's parameters come in once before the first step, to see what it makes.
    for (auto& [stage, costs] : stages_) see(stage);
    for (int step = 0; step < 3; ++step) {
      for (auto& [stage, window] : windows_) window.begin(/*knows_order=*/step > 0);
      now_ = 0;
      compressed_ = 0;
      sent_.clear();
      for (at_ = 0; at_ < row_.size(); ++at_) execute(row_[at_]);
    }
    Memory memory{.gathered = gathered_.bytes(),
                  .whole_gradients = whole_.memory.bytes(),
                  .communication = arrivals_.bytes() + links_.bytes() + compressed_at_peak_,
                  .activations = most_,
                  .data = options_.data_bytes + model_.constant_bytes,
                  .workspaces = options_.workspace_bytes};
    std::vector<FlatLayout> flats;
    for (const auto& [stage, costs] : stages_) flats.insert(flats.end(), costs.flats.begin(), costs.flats.end());
    memory.state = model_state(flats, layout_.data, options_.optimizer_states);
    hold_copy(memory, flats, layout_.data, options_);
    memory.building = model_.constant_bytes + bytes_of_whole_build(flats, layout_.data);
    return memory;
  }

 private:
  using Slot = std::pair<int, int>;  // stage and microbatch

  void execute(const Action& action) {
    const Slot slot{action.stage, action.microbatch};
    switch (action.kind) {
      case Kind::forward: gather_units(action); return forward(slot);
      case Kind::backward: gather_units(action); return backward(slot);
      case Kind::input_gradient: return input_half(slot);
      case Kind::weight_gradient: return weight_half(slot);
      case Kind::receive_forward: received_[slot] = borrow(action.stage - 1, action.microbatch); return;
      case Kind::receive_backward: gradients_[slot] = borrow(action.stage, action.microbatch); return;
      case Kind::unshard: return unshard(action.stage);
      case Kind::reshard: return reshard(action.stage);
      case Kind::update: return reductions_.at(action.stage).land_all();
      default: return;
    }
  }

  std::size_t borrow(int stage, int microbatch) {
    return links_.borrow(crossing(stage, microbatch), static_cast<std::int64_t>(at_));
  }
  std::int64_t crossing(int stage, int microbatch) const {
    return stage < 0 || stage + 1 >= layout_.table.stages ? 0 : crossing_bytes(model_, layout_, stage, microbatch);
  }
  bool here(int stage) const { return stages_.contains(stage); }
  std::int64_t tokens(int microbatch) const {
    return layout_.samples.at(static_cast<std::size_t>(microbatch)) * layout_.tokens;
  }
  const Activations& activations(const Slot& slot) {
    const auto count = tokens(slot.second);
    const auto found = activations_.find({slot.first, count});
    if (found != activations_.end()) return found->second;
    const auto& of = stages_.at(slot.first);
    MemoryOptions options = options_;
    options.tokens = count;
    return activations_[{slot.first, count}] = activations_of(
               of.part, of.units, layout_.data, {.memory = options, .input_differentiates = of.differentiates});
  }

  // What forward has kept, but for what came in: that is the result of the stage before it, or lies in a buffer of the link.
  std::int64_t kept(const Slot& slot) {
    return std::max<std::int64_t>(0, activations(slot).kept.back() - input_within(slot));
  }
  std::int64_t input_within(const Slot& slot) {
    // Units of the model follow each other as those of its stages do; a root comes before them all.
    const auto first = static_cast<std::size_t>(layout_.stages[static_cast<std::size_t>(slot.first)].begin) +
                       (model_.units.front().kind == UnitKind::root ? 1 : 0);
    return keeps_input(model_, first) && activations(slot).kept.back() > 0 ? crossing(slot.first - 1, slot.second) : 0;
  }

  void forward(const Slot& slot) {
    forget_sent(slot.second);
    const auto& of = activations(slot);
    note(*std::max_element(of.in_forward.begin(), of.in_forward.end()));
    now_ += kept(slot) + crossing(slot.first, slot.second);
    note(0);
  }

  // Values whose gradient came back have been received.
  void begin_backward(const Slot& slot) {
    if (!here(slot.first + 1)) now_ -= crossing(slot.first, slot.second);
  }
  void end_backward(const Slot& slot) {
    now_ -= kept(slot);
    // The gradient that was given is held until the end.
    if (const auto node = gradients_.extract(slot); !node.empty())
      links_.give_back(node.mapped());
    else
      now_ -= crossing(slot.first, slot.second);
    // What came in.
    if (const auto node = received_.extract(slot); !node.empty())
      links_.give_back(node.mapped());
    else
      now_ -= crossing(slot.first - 1, slot.second);
  }
  // The gradient of what came in goes to the stage before. Gloo does not tell when a message has gone: it is kept until the
  // end of the step.
  void hand_on(const Slot& slot) {
    if (!stages_.at(slot.first).differentiates) return;
    const auto bytes = crossing(slot.first - 1, slot.second);
    note(bytes);
    if (!here(slot.first - 1) && !options_.on_host) return;
    now_ += bytes;
    if (layout_.sent_window > 0 && !here(slot.first - 1)) sent_.emplace_back(slot.second, bytes);
  }
  // By the time of this forward.
  void forget_sent(int microbatch) {
    while (!sent_.empty() && sent_.front().first + layout_.sent_window < microbatch) {
      now_ -= sent_.front().second;
      sent_.pop_front();
    }
  }

  // More than what `now_` counts, while backward is at this Unit.
  std::int64_t at_unit(const Slot& slot, std::size_t unit) {
    const auto& of = activations(slot);
    const bool last = unit + 1 == of.kept.size();
    return of.in_backward[unit] - (last ? of.incoming[unit] : 0) - input_within(slot) - kept(slot);
  }

  // The same when its backward has ended.
  std::int64_t behind_unit(const Slot& slot, std::size_t unit) {
    const auto& of = activations(slot);
    return (unit > 0 ? of.kept[unit - 1] + of.incoming[unit - 1] - input_within(slot) : 0) - kept(slot);
  }

  void backward(const Slot& slot) {
    const auto& costs = stages_.at(slot.first);
    begin_backward(slot);
    for (std::size_t unit = costs.units.size(); unit-- > 0;) {
      if (!costs.runs_backward(unit)) continue;
      open(slot.first, unit);
      note(at_unit(slot, unit));
      launch(slot.first, unit, behind_unit(slot, unit));
    }
    end_backward(slot);
    hand_on(slot);
  }

  void input_half(const Slot& slot) {
    const auto& costs = stages_.at(slot.first);
    const auto& of = activations(slot);
    const std::int64_t size = bytes_of(layout_.data.compute) * tokens(slot.second);
    begin_backward(slot);
    const std::int64_t counted = input_within(slot) + kept(slot);
    std::int64_t later = 0, retained = 0;
    for (std::size_t unit = costs.units.size(); unit-- > 0;) {
      if (!costs.runs_backward(unit)) continue;
      const auto& put_off = costs.later[unit];
      note(at_unit(slot, unit) + later + retained);
      const std::int64_t before = unit > 0 ? of.kept[unit - 1] : input_within(slot);
      later += put_off.elements * size;
      retained +=
          put_off.retained < 0 ? of.kept[unit] + of.again[unit] - before - put_off.kept * size : put_off.retained * size;
      const std::int64_t made = unit > 0 ? of.incoming[unit - 1] : crossing(slot.first - 1, slot.second);
      note(before - counted + later + retained + made + put_off.at_its_end * size);
    }
    end_backward(slot);
    now_ += put_off_[slot] = later;
    hand_on(slot);
  }

  void weight_half(const Slot& slot) {
    const auto& costs = stages_.at(slot.first);
    for (std::size_t unit = costs.units.size(); unit-- > 0;) {
      if (!costs.runs_backward(unit)) continue;
      open(slot.first, unit);
      note(activations(slot).in_weights[unit]);
      launch(slot.first, unit, 0);
    }
    now_ -= put_off_[slot];
  }

  // Whether the gradients of this pass are reduced, and whether it is the step's last.
  std::pair<bool, bool> reduces(int stage) const {
    bool reduced = false;
    for (std::size_t later = at_ + 1; later < row_.size(); ++later) {
      if (row_[later].stage != stage) continue;
      if (row_[later].kind == Kind::reduce && !reduced) {
        reduced = true;
        continue;
      }
      if (row_[later].kind == Kind::update) return {reduced, reduced};
      if (schedule::ends_activation(row_[later].kind) || row_[later].kind == Kind::reduce) return {reduced, false};
    }
    return {reduced, reduced};
  }

  void open(int stage, std::size_t unit) {
    for (const std::size_t flat : stages_.at(stage).units[unit].writes) reductions_.at(stage).open(flat);
  }
  // Beside what `now_` counts there is so much.
  void launch(int stage, std::size_t unit, std::int64_t beside) {
    const auto& costs = stages_.at(stage);
    const auto [reduced, last] = reduces(stage);
    if (!reduced) return;
    for (const std::size_t flat : costs.units[unit].writes) {
      // A tied weight's, when the last that writes it has.
      bool more = false;
      for (std::size_t other = 0; other < unit; ++other)
        more = more || (costs.runs_backward(other) &&
                        std::count(costs.units[other].writes.begin(), costs.units[other].writes.end(), flat) > 0);
      if (more) continue;
      reductions_.at(stage).launch(flat);
      if (!last) continue;
      compressed_ += compressed_bytes(costs.flats[flat], layout_.data);
      note(beside + rounding_bytes(costs.flats[flat], layout_.data));
    }
  }
  void see(int stage) {
    if (const auto window = windows_.find(stage); window != windows_.end()) {
      window->second.begin(/*knows_order=*/false);
      return window->second.run(/*backward=*/false);
    }
    unshard(stage);
    reshard(stage);
  }
  // The most that is gathered at a time is all that is asked of it.
  void gather_units(const Action& action) {
    if (const auto window = windows_.find(action.stage); window != windows_.end())
      window->second.run(action.kind == Kind::backward);
  }
  void add_window(int stage, const StageCosts& costs) {
    const UnitWindow::Events events{.gather =
                                        [this, stage, &costs](std::size_t flat, std::int64_t place) {
                                          in_[stage].resize(costs.flats.size());
                                          in_[stage][flat] =
                                              gathered_.borrow(costs.flats[flat].bytes,
                                                               place < 0 ? place : stage * places_of_a_stage + place);
                                        },
                                    .let_go = [this, stage](std::size_t flat) { gathered_.give_back(in_[stage][flat]); }};
    windows_.try_emplace(stage, units_of_stage(model_, layout_, stage, costs.flats), backwards_of_stage(layout_, stage),
                         layout_.data, events);
  }
  void unshard(int stage) {
    if (!layout_.data.comes_and_goes()) return;
    const auto& flats = stages_.at(stage).flats;
    auto& loans = in_[stage];
    for (std::size_t at = 0; at < flats.size(); ++at)
      loans.push_back(gathered_.borrow(flats[at].bytes, stage * places_of_a_stage + static_cast<std::int64_t>(at)));
  }
  void reshard(int stage) {
    for (const auto loan : std::exchange(in_[stage], {})) gathered_.give_back(loan);
  }

  void note(std::int64_t more) {
    if (now_ + more + compressed_ <= most_ + compressed_at_peak_) return;
    most_ = now_ + more;
    compressed_at_peak_ = compressed_;
  }

  static constexpr std::int64_t places_of_a_stage = 1 << 20;

  const ModelDescription& model_;
  PipelineLayout layout_;
  const MemoryOptions& options_;
  const std::vector<Action>& row_;
  std::map<int, StageCosts> stages_;
  std::map<std::pair<int, std::int64_t>, Activations> activations_;  // by stage and tokens
  Loans gathered_;
  WholeGradients whole_;
  Loans links_;
  Arrivals arrivals_;
  std::map<int, Reductions> reductions_;
  std::map<int, std::vector<std::size_t>> in_;  // loans of stages that are gathered, or of their Units by buffer
  std::map<int, UnitWindow> windows_;           // of stages whose Units are gathered one by one
  std::map<Slot, std::size_t> received_, gradients_;
  std::map<Slot, std::int64_t> put_off_;
  std::deque<std::pair<int, std::int64_t>> sent_;  // gradients, by microbatch: bytes
  std::size_t at_ = 0;                             // the cell
  std::int64_t now_ = 0, most_ = 0, compressed_ = 0, compressed_at_peak_ = 0;
};

}  // namespace

Memory memory_of(const ModelDescription& model, const PipelineLayout& layout, const MemoryOptions& options, int rank) {
  return RowMemory(model, layout, options, rank).run();
}

Memory memory_of(const ModelDescription& model, const PipelineLayout& layout, const MemoryOptions& options) {
  Memory most;
  for (int rank = 0; rank < layout.table.ranks(); ++rank) {
    const Memory memory = memory_of(model, layout, options, rank);
    if (memory.total() > most.total()) most = memory;
  }
  return most;
}

}  // namespace bonfire::plan
