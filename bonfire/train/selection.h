#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/activations.h"
#include "bonfire/plan/model.h"
#include "bonfire/train/config.h"

// Which parameters and which Units of its model a configuration names. All of it REQUIRES: the model of the configuration is
// resolved.
namespace bonfire {

// Whether `pattern` is `name` or a beginning of it that ends at a dot. A * in the pattern stands for any letters between two
// dots: "blocks.*.attention" names "blocks.3.attention.qkv.weight".
BONFIRE_API bool names_parameter(std::string_view pattern, std::string_view name);

// train.keep_for_backward.
BONFIRE_API plan::Kept kept_of(const Config& config);
// layout.recompute.
BONFIRE_API plan::Recompute recompute_of(const Config& config);

// Of so many ranks along the tensor axis, which one; by default the last, which never has less than another.
BONFIRE_API plan::TensorPart tensor_part_of(const Config& config, std::optional<int> rank = std::nullopt);

// The model, or a rank's part of it, with what train.freeze and layout.ignore leave untrained what train.keep_for_backward
// keeps and layout.recompute makes again.
BONFIRE_API plan::ModelDescription model_of(const Config& config, std::optional<int> tensor_rank = std::nullopt);

// The same as layout.wrap and layout.wrap_types cut it: what does not stay together in a buffer of its own belongs to the
// root, and what layout.ignore names is no parameter any more, only bytes. For arithmetic, not for building.
BONFIRE_API plan::ModelDescription wrapped_model_of(const Config& config, std::optional<int> tensor_rank = std::nullopt);

// Whether forward reads a parameter in fp32 whatever train.precision says (train.keep_fp32); null where it reads none so.
// The name is that in the model, or only that inside its Unit.
BONFIRE_API std::function<bool(const std::string& name)> kept_in_fp32(const Config& config);

// Where a parameter lies in the whole model, for ranks that split the layers; null where none do. The name is that in the
// model, or only that inside its Unit.
BONFIRE_API std::function<plan::Placement(const std::string& name)> placements_of(const Config& config, int tensor_rank);

// How many scales go with a weight of this name and shape that is kept and gathered in eight bits: with train.precision =
// "fp8", what the products of the blocks read. Null where nothing is: offloaded parameters and convolutional models have
// their weights in bf16. The name is that in the model, or only that inside its Unit.
BONFIRE_API std::function<std::int64_t(const std::string& name, const std::vector<std::int64_t>& shape)> scales_of_weights(
    const Config& config);

// The full names of what layout.ignore says.
BONFIRE_API std::vector<std::string> ignored_parameters(const Config& config);

// The full names of the parameters of each group of the optimizer. One may be in several: the first is meant.
BONFIRE_API std::vector<std::set<std::string>> names_of_groups(const Config& config);

// Throws ConfigError for a pattern that names nothing, with the nearest name, where nothing would be trained, and for a kind
// of Units that the model does not have.
BONFIRE_API void check_selections(const Config& config);

}  // namespace bonfire
