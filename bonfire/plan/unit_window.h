#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/layout.h"
#include "bonfire/plan/step_events.h"

namespace bonfire::plan {

// The gathers of a pipeline's stage whose Units are gathered one by one. A step has one order of them, computation after
// computation: Units forwards, or backwards; one that is needed again before any other is gathered stays, and so does the
// root. When the use of a Unit begins, the `prefetch` gathers that follow its own are issued, whatever computation they are
// for, but none of the next step. A Unit whose memory has yet to be freed stops that. With `after_reduction` the same
// happens, in backward, when the Unit has been freed.
class BONFIRE_API UnitWindow {
 public:
  struct Events {
    std::function<void(std::size_t flat, std::int64_t place)> gather;  // place: of the gather in its step; -1: none yet
    std::function<void(std::size_t flat)> let_go;
  };
  // `backwards`: of each computation of the stage in a step, whether it is a backward. `units`: in forward order; those with
  // `backward` run in each of them.
  UnitWindow(std::vector<StepUnit> units, const std::vector<bool>& backwards, const DataParallel& layout, Events events);

  // A step begins. The first one finds out the order, and gathers nothing ahead.
  void begin(bool knows_order);
  void run(bool backward);

 private:
  struct Gather {
    std::size_t unit = 0;
    int uses = 0;
  };
  struct State {
    bool in = false;
    std::size_t entry = 0;
    int left = 0;  // uses before it is freed
  };
  std::vector<std::size_t> used_by(bool backward) const;  // without the root
  void enter(std::size_t unit, bool ahead);
  void leave(std::size_t unit);
  void look_ahead();
  void issue();

  std::vector<StepUnit> units_;
  std::optional<std::size_t> root_;
  std::vector<Gather> gathers_;
  std::size_t prefetch_;
  bool ahead_in_backward_;
  Events events_;
  std::vector<State> states_;
  bool follows_ = false;
  std::size_t current_ = 0;  // the last gather whose use has begun
  std::size_t next_ = 0;     // the first that was not issued
};

}  // namespace bonfire::plan
