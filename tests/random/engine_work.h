#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/random/engine_case.h"
#include "tests/random/parts.h"

// What both sides of a comparison do: the data, the loss, what is frozen. No line of it is the engine's.
namespace bonfire::cases {

// A target that does not count.
inline constexpr std::int64_t masked = -100;
// Tokens, or classes.
at::Tensor numbers_below(const Random& random, at::IntArrayRef shape, int bound);

// One microbatch of a rank in an event; `number` tells several forwards apart.
struct Place {
  int event = 0;
  int rank = 0;
  int number = 0;
};
at::Tensor input_of(const EngineCase& each, const Place& place);
// A number from what the root returned; the second kind is another function of the same.
at::Tensor loss_of(const EngineCase& each, const std::vector<at::Tensor>& outputs, const Place& place, bool second);
Context context_of(const EngineCase& each, const Place& place);

// How many targets of an event count on a rank, in all of its microbatches.
double count_of(const EngineCase& each, int event, int rank);
// What each microbatch's loss is multiplied by, where `scale` is the one of a mean over targets.
double part_of(const EngineCase& each, int event, double scale);
// The losses of microbatch `number` of an event, each for one backward; all but the last keep the graph.
std::vector<at::Tensor> losses_of(const EngineCase& each, PartImpl& model, const Place& place, const Context& context,
                                  double part);

// The names of one model: tied parameters have several, of which the first is the one that counts.
using Names = std::map<std::string, std::string>;
Names first_names(const torch::nn::Module& model);
// Sets requires_grad as the pattern says.
void freeze(const EngineCase& each, torch::nn::Module& model, const Names& names, int pattern);

// Of the engine's options that need names: the parameter that is tied, or ignored.
std::string chosen_name(const torch::nn::Module& model);

}  // namespace bonfire::cases
