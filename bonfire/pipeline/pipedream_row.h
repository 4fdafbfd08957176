#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/pipeline/executor.h"
#include "bonfire/schedule/pipedream.h"

namespace bonfire {

// A rank's row of an endless table, handed out as minibatches are admitted. How many there will be need not be known: all
// tables of one shape begin alike, but for receives that are posted ahead, and these wait until their minibatch is admitted.
class BONFIRE_API PipeDreamRow {
 public:
  PipeDreamRow(schedule::RoundRobin robin, int rank, int receive_ahead);

  // What comes next when so many minibatches have been admitted: as far as the last forward of them on this rank.
  std::vector<Executor::Cell> admit(int minibatches);
  // The rest, when no others will be. REQUIRES: whole rounds.
  std::vector<Executor::Cell> drain(int minibatches);
  // From an empty pipeline once more.
  void restart();

  // Microbatches after which a microbatch is done with: no message of it is on its way, and nobody reads it.
  int window() const { return window_; }
  // Cells that are at hand: no more, however many minibatches have come.
  std::size_t cells_at_hand() const { return row_.size(); }
  // Where in a period an action is.
  std::size_t place(const schedule::Action& action) const;

 private:
  std::vector<schedule::Action> row_of(int minibatches);
  void take(int minibatches);
  std::vector<Executor::Cell> hand_out(std::size_t end, int limit);
  std::size_t end_of(int limit) const;

  schedule::RoundRobin robin_;
  int rank_;
  schedule::LowerOptions lowering_;
  schedule::Endless endless_;
  int window_ = 1;
  std::int64_t in_prologue_ = 0, in_period_ = 0;     // computations of this rank
  int horizon_ = 0;                                  // minibatches of the row at hand
  std::vector<Executor::Cell> row_;                  // from some period on: what lies far behind is not in it
  std::int64_t dropped_ = 0;                         // computations before it
  std::size_t next_ = 0;                             // the first cell that was not handed out, but for receives
  std::int64_t computed_ = 0;                        // computations that were handed out
  std::set<std::pair<schedule::Kind, int>> posted_;  // receives beyond it that were handed out
  std::vector<Executor::Cell> put_off_;              // receives before it that were not
};

}  // namespace bonfire
