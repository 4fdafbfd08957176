#pragma once

#include <string>
#include <vector>

// The things that peer_probe does, each for a test in Python to look at.
namespace bonfire::peers {

using Arguments = std::vector<std::string>;

void write_events(const Arguments& arguments);  // events FOLDER: a curve of 100 steps
void join_world(const Arguments& arguments);    // world: joins as the environment says and adds up the ranks' numbers
void dump_model(const Arguments& arguments);    // model NAME FOLDER: weights by their public names, an input, its logits

}  // namespace bonfire::peers
