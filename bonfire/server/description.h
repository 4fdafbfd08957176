#pragma once

#include <string>
#include <vector>

#include "bonfire/plan/layout.h"
#include "bonfire/shard/flat_parameter.h"

namespace bonfire {

// What a worker tells a server about its model: the trained parameters of each Unit, in the order of its buffer. The server
// lays them out as the worker has, without the model.
std::string describe_unit(const FlatParameter& flat);
// Throws Error for what describe_unit has not written.
plan::ParameterGroup read_unit(const std::string& text);

// The buffer of a Unit whose regions can be cut into a share for each server.
plan::FlatLayout layout_of(const plan::ParameterGroup& unit, int servers);

}  // namespace bonfire
