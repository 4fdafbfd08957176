#pragma once

#include <string>
#include <vector>

#include "bonfire/schedule/schedule.h"
#include "tests/random/draw.h"

// Tables of schedules: those with names, and some that nobody would write.
namespace bonfire::cases {

// Which REDUCE cells a table brings along.
enum class OwnReductions {
  none,
  fitting,  // after every backward where gradients are kept as shares, after the last one where they are whole
  misfit,   // anywhere, now and then not after the last backward
};

struct TableCase {
  std::string name;  // of a generator, or "written"
  int ranks = 2;
  int chunks = 1;  // of generators
  int microbatches = 2;
  schedule::Schedule table{};
  OwnReductions reductions = OwnReductions::none;
  bool own_updates = false;
  bool own_sharding = false;
};

struct TableShape {
  int ranks = 2;
  int most_stages = 4;
  bool shares = false;   // gradients are kept as shares
  bool gathers = false;  // parameters are
};
TableCase draw_table(Draw draw, const TableShape& shape);

}  // namespace bonfire::cases
