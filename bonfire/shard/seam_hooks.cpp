#include "bonfire/shard/seam_hooks.h"

#include <map>
#include <optional>
#include <utility>

namespace bonfire {

SeamHooks::SeamHooks(FlatGroup& flats, torch::nn::Module& module, Options options)
    : flats_(flats), units_(module, flats.layout().groups()) {
  const auto& settings = flats.settings();
  const auto& precision = settings.options.precision;
  if (settings.options.debug && settings.gathers_units()) units_.add(check_.emplace(flats.layout(), units_));
  if (options.casts) {
    std::map<const UnitSeam*, at::ScalarType> own;
    for (const auto& [unit, name, hooks, group] : units_.units())
      if (const auto type =
              group < 0 ? std::nullopt : flats.layout().unit_options(static_cast<std::size_t>(group)).parameters)
        own.emplace(unit, *type);
    units_.add(casting_.emplace(
        Casting::Types{.inputs = precision.parameters, .outputs = precision.outputs, .of_units = std::move(own)}));
  }
  if (settings.gathers_units()) put_residency(std::move(options));
}

void SeamHooks::put_residency(Options options) {
  const auto& settings = flats_.settings();
  const auto& asked = settings.options;
  ResidencyOptions how{.gathers = settings.groups.gathers,
                       .meetings = settings.groups.shards,
                       .prefetch = asked.prefetch,
                       .prefetch_before_reduction = asked.backward_prefetch == BackwardPrefetch::before_reduction,
                       .negotiate = asked.negotiate_order,
                       .first_place = flats_.first_place(),
                       .ends_evaluations = options.ends_evaluations,
                       .log = asked.log,
                       .before_pass = std::move(options.before_pass),
                       .backward_ended = [this](const FlatParameter& flat) { flats_.backward_ended(flat); }};
  if (const int ranks = asked.reshard_after_forward.ranks; ranks > 1) how.kept = settings.groups.shards.neighbours(ranks);
  residency_ = std::make_shared<Residency>(flats_.pool(), flats_.host(), std::move(how));
  units_.add(*residency_);
}

void SeamHooks::laid_out() {
  if (!residency_) return;
  std::vector<Residency::Home> homes;
  const auto& reshard = flats_.settings().options.reshard_after_forward;
  for (const auto& [unit, name, hooks, group] : units_.units()) {
    auto& home = homes.emplace_back(
        Residency::Home{.unit = unit, .name = name, .free_after_forward = reshard.free && reshard.ranks != 1});
    if (group < 0) continue;
    home.flat = flats_.layout().flat_of(static_cast<std::size_t>(group));
    const auto& own = flats_.layout().unit_options(static_cast<std::size_t>(group));
    home.free_after_forward = own.reshard_after_forward.value_or(home.free_after_forward);
  }
  residency_->set_units(homes);
}

}  // namespace bonfire
