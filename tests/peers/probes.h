#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <nlohmann/json_fwd.hpp>

#include "bonfire/plan/model.h"

// The things that peer_probe does, each for a test in Python to look at.
namespace bonfire::peers {

using Arguments = std::vector<std::string>;

void write_events(const Arguments& arguments);  // events FOLDER: a curve of 100 steps
void join_world(const Arguments& arguments);    // world: joins as the environment says and adds up the ranks' numbers
void dump_model(const Arguments& arguments);    // model NAME FOLDER: weights by their public names, an input, its logits
// train NAME FOLDER KEY=VALUE...: the same, trained on all ranks; losses, gradient norms and every step's tokens
void train_model(const Arguments& arguments);

// The models that the tests look at, and what Python must know of them to build the same.
plan::ModelSpec probe_spec(const std::string& name);
nlohmann::json index_of(const plan::ModelSpec& spec);
void write_raw(const std::filesystem::path& file, const at::Tensor& tensor);  // as fp64

}  // namespace bonfire::peers
