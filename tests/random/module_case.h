#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/random/draw.h"

// Modules as values: what a generator writes, a shrinker makes simpler, and parts.h builds.
namespace bonfire::cases {

// What one layer computes for a stream whose last dimension is the model's width.
enum class Op {
  linear,      // torch's product
  our_linear,  // Bonfire's, which hands its gradients over by itself
  norm,        // LayerNorm
  our_norm,
  gain,        // a vector
  scalar,      // a number, without dimensions
  odd_shape,   // a vector with dimensions of size 1 around it
  bottleneck,  // two products, with `inner` numbers between them
  nothing,     // a parameter without elements
  table,       // rows for tokens; for anything else, the product with all rows and back
};

struct Layer {
  Op op = Op::linear;
  bool bias = true;
  int inner = 2;
  int tie = -1;        // layers with the same number share their weight
  bool alias = false;  // by a tensor of its own over the same memory
  bool frozen = false, frozen_bias = false;
};

// When an item of a Part runs. Steps are counted by events of the script.
enum class When { always, odd_steps, later_steps, twice_later, odd_ranks };

struct Call {
  int item = 0;  // layers come before children
  bool residual = true;
  When when = When::always;
};

enum class Mark { plain, alpha, beta };        // two types of Units, or none
enum class Sequence { none, wrapped, unit };   // layers as children of a Sequential: wrap_children, or a UnitSequential
enum class Side { none, made, idle, weight };  // a second output: of the result; that nobody reads; a weight itself

struct Part {
  Mark mark = Mark::plain;
  Sequence sequence = Sequence::none;
  std::vector<Layer> layers;
  std::vector<Part> children;
  std::vector<int> registration;  // the items in the order in which they are registered
  std::vector<Call> calls;        // forward; items that it does not name are unused
  Side side = Side::none;
  bool in_place = false;  // forward writes to its input
  int shared = -1;        // parts with the same number are one module, registered at several places

  int items() const { return static_cast<int>(layers.size() + children.size()); }
};

struct Model {
  int width = 4;
  int rows = 5;         // of tables
  int length = 0;       // of sequences; 0: the stream is [samples, width]
  bool tokens = false;  // the input is numbers of rows
  Part root;
};

struct ModelLimits {
  bool sharing = true;     // ties, and modules at several places
  bool conditions = true;  // calls that do not always run
  bool strange = true;     // sides that are weights, writes to inputs
  int depth = 2;
};

Model draw_model(Draw draw, const ModelLimits& limits = {});
// A part by itself, for a chain.
Part draw_part(Draw draw, const ModelLimits& limits);

// All parts of it, the part itself first.
std::vector<const Part*> parts_of(const Part& part);
void each_part(Part& part, const std::function<void(Part&)>& visit);
bool any_unit(const Part& part);
bool has_mark(const Part& part, Mark mark);
bool is_strange(const Part& part);
bool shares(const Part& part);

std::string text_of(const Part& part, int indent);
std::string text_of(const Model& model);

// Each a little simpler in one way.
std::vector<Part> simpler(const Part& part);
std::vector<Model> simpler(const Model& model);

}  // namespace bonfire::cases
