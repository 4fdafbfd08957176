#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bonfire/nn/gradient_slots.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/settings.h"
#include "bonfire/shard/wrap.h"

namespace bonfire {

// One parameter of a module, trained or frozen, and where it lies.
struct LaidParameter {
  std::string name;
  at::Tensor tensor;
  std::size_t group = 0;                // of the module's
  at::ScalarType master = at::kFloat;   // the dtype it was given in, which its optimizer state keeps
  at::ScalarType compute = at::kFloat;  // what forward reads
  bool trained = true;
  // More than 0: while it is trained, forward reads it in eight bits, with so many scales.
  std::int64_t scales = 0;
  std::shared_ptr<WeightScales> known_scales{};
  std::vector<std::shared_ptr<Fp8Product>> products{};  // that it takes part in and that are made in fp8
  plan::Placement placement{};
  std::size_t flat = 0, segment = 0;  // where it lies now
  std::vector<at::Tensor> tied{};     // other tensors of the module over the same memory
  at::Tensor carried{};               // a gradient on its way to another flat buffer
  // Forward reads a copy of what is updated, and so often had somebody else written to it when the two were alike.
  bool copied = false;
  std::int64_t writes = 0;

  // As layout arithmetic sees it.
  plan::ParameterSize size() const;
  // The others have this one's memory.
  void tell_tied() {
    for (auto& other : tied) other.set_data(tensor.detach());
  }
  std::vector<at::Tensor> all() const {
    std::vector<at::Tensor> tensors{tensor};
    tensors.insert(tensors.end(), tied.begin(), tied.end());
    return tensors;
  }
};

// Where the parameters of a module lie: which of them share a flat buffer, in which order the buffers are, and how
// parameters move to others.
class ParameterLayout {
 public:
  using Flats = std::vector<std::unique_ptr<FlatParameter>>;

  // Finds the parameters; they are laid out by the first lay_out. `settings` outlives this. Throws ConfigError for a
  // parameter that cannot be trained so.
  ParameterLayout(const ShardSettings& settings, torch::nn::Module& module);

  std::vector<LaidParameter>& parameters() { return parameters_; }
  const std::vector<LaidParameter>& parameters() const { return parameters_; }
  const std::vector<ModuleGroup>& groups() const { return groups_; }
  // What the Unit of a group has for itself.
  const UnitOptions& unit_options(std::size_t group) const { return unit_options_[group]; }
  // Whether a build scope has laid out this parameter, and seen to its values.
  bool prepared(const LaidParameter& parameter) const;

  Flats& flats() { return flats_; }
  const Flats& flats() const { return flats_; }
  // The groups as backward finishes them, which is the order of the flats.
  const std::vector<std::size_t>& order() const { return order_; }
  // How often they were laid out.
  std::int64_t version() const { return version_; }
  // Which of the flats this is.
  std::size_t index_of(const FlatParameter& flat) const;
  // That of a group's first parameter: with parameters that come and go a Unit's only one.
  FlatParameter* flat_of(std::size_t group) const;

  // Until a backward has shown better: the reverse of the order of registration.
  std::vector<std::size_t> likely_order() const;
  // Puts the groups into flat parameters in this order. Parameters that already share a buffer stay where they are: in which
  // order they lie in it makes no difference. `averaged`: gradients that are kept whole are those of a whole step.
  // Collective.
  void lay_out(const std::vector<std::size_t>& order, bool averaged);
  // Takes over what was frozen and thawed since the last time.
  struct Change {
    bool any = false, thawed = false;
  };
  Change note_training();

  // What forward reads is what is updated now. From then on nobody but the engine may write to it, where it is a copy.
  void note_writes();
  // The first copy that somebody else has written to; null: none.
  const LaidParameter* written_by_others() const;

  // Gives all parameters memory of their own again, whole and in their own type. Collective.
  void release(bool averaged);

 private:
  std::unique_ptr<FlatParameter> adopt(const plan::FlatLayout& layout, const std::vector<std::size_t>& members);
  std::unique_ptr<FlatParameter> make_flat(plan::FlatLayout layout, const std::vector<std::size_t>& members);
  void dissolve(const FlatParameter& flat, bool averaged);
  std::int64_t writes_of_others(const LaidParameter& parameter) const;
  void tell_scales();

  const ShardSettings& settings_;
  std::vector<LaidParameter> parameters_;
  std::vector<ModuleGroup> groups_;
  std::vector<UnitOptions> unit_options_;
  std::vector<std::vector<std::size_t>> members_;  // of each group, by their numbers in `parameters_`
  Flats flats_;
  std::vector<std::size_t> order_;
  std::int64_t version_ = 0;
  std::int64_t next_generation_ = 0;  // that no buffer had whose parameters have moved
};

}  // namespace bonfire
