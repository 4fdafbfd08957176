#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "bonfire/plan/layout.h"
#include "bonfire/plan/loans.h"

namespace bonfire::plan {

class Reductions;

// Where a rank's whole gradients lie on their way, and whose they are, in the order in which they set out: the stages of a
// pipeline's rank share them.
struct WholeGradients {
  Loans memory{};
  std::deque<Reductions*> flights{};
};

// The reductions of one engine, in the order in which its backward issues them.
class Reductions {
 public:
  // `whole`: where whole gradients lie on their way to the ranks that keep a share of them. `arrivals`: where the parts of
  // other ranks come; null: they need no memory of this rank's.
  Reductions(WholeGradients& whole, Arrivals* arrivals, const std::vector<FlatLayout>& flats, const DataParallel& layout)
      : whole_(whole), arrivals_(arrivals), flats_(flats), layout_(layout), opened_(flats.size()) {}

  // Memory for the whole gradient of a buffer, where ranks keep shares of it only.
  void open(std::size_t flat);
  // It is complete, and on its way until a later one needs its place.
  void launch(std::size_t flat);
  // All of them have arrived.
  void land_all();

 private:
  struct Flight {
    std::optional<std::size_t> loan{};
    std::vector<std::int64_t> arrivals{};
  };
  void land();
  void make_room();

  WholeGradients& whole_;
  Arrivals* arrivals_;
  const std::vector<FlatLayout>& flats_;
  const DataParallel& layout_;
  std::vector<std::optional<std::size_t>> opened_;  // per buffer: the loan of its whole gradient
  std::deque<Flight> flights_;
};

// The most that a reduction over the replicas has for a moment where it rounds gradients: these are divided before.
std::int64_t rounding_bytes(const FlatLayout& flat, const DataParallel& layout);

}  // namespace bonfire::plan
