#pragma once

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "bonfire/pipeline/executed.h"
#include "bonfire/pipeline/inbox.h"
#include "bonfire/pipeline/links.h"
#include "bonfire/pipeline/stage.h"
#include "bonfire/pipeline/tied.h"
#include "bonfire/schedule/schedule.h"

namespace bonfire {

// Goes through one rank's row of a table, cell by cell, and knows nothing of schedules beyond the cells. Sends, receives,
// gathers and reductions are begun by their cell; whatever needs their result waits for it.
class Executor {
 public:
  using Stages = std::map<int, std::unique_ptr<Stage>>;

  struct Cell {
    schedule::Action action;
    int peer = -1;            // of a message
    BackwardKind backward{};  // of a backward, or its weight half
    bool first_of_tie = false;
  };
  // `peer_of`: the rank at the other end of a message.
  static std::vector<Cell> prepared(const std::vector<schedule::Action>& row,
                                    const std::function<int(const schedule::Action&)>& peer_of);

  // REQUIRES: the table is valid and has every message; `stages` are those of the rank. All outlive this.
  Executor(const schedule::Schedule& table, int rank, Stages& stages, const Links& links, Ties& ties);
  // For cells that come piece by piece. REQUIRES: together they are a row of such a table.
  Executor(Stages& stages, const Links& links, Ties& ties);

  struct Step {
    const std::vector<Microbatch>& microbatches;
    std::vector<double> weights;              // of each, in the mean
    double loss_scale = 1;                    // gradients are those of so many times the mean
    std::function<void(int stage)> update{};  // called in update cells, with the gradients of the stage complete
    CellObserver observe{};
    int first = 0;  // the number of the first microbatch, where they come piece by piece
    // Where somebody wants them of each microbatch: what the last stage returned.
    std::function<void(int microbatch, const at::Tensor& numbers)> report{};

    const Microbatch& microbatch(int number) const { return microbatches[static_cast<std::size_t>(number - first)]; }
    double weight(int number) const { return weights[static_cast<std::size_t>(number - first)]; }
  };
  // The weighted means of what the last stage returned; empty on other ranks. What weighs nothing is left out, whatever it
  // is. Collective.
  at::Tensor run(const Step& step);

  // --- Piece by piece.
  // One cell; `place`: where it is in the step, as often as there are such places.
  void execute(const Cell& cell, std::size_t place, const Step& step);
  // Gradients of microbatches up to this one have been received by those they were sent to.
  void gradients_received(int microbatch);
  // Waits for what was sent.
  void finish();
  // Something threw.
  void forget(const std::string& why);

  // Of the last run.
  const std::vector<ExecutedCell>& executed() const { return executed_; }
  int peak_activations() const { return peak_; }

 private:
  using Slot = Inbox::Slot;

  // What goes to another rank is kept until it is there.
  struct Sent {
    Slot slot;
    bool values = true;  // not gradients
    Work work{};
    Tensors tensors{};
  };

  void await_arrival(const schedule::Action& action);
  void perform(const Cell& cell, std::size_t at, const Step& step);
  void forward(const Cell& cell, const Step& step);
  void backward(const Cell& cell, const Step& step);
  void send(const Cell& cell, std::map<Slot, Tensors>& from, const Step& step);
  void receive(const Cell& cell, std::size_t at, const Step& step);
  Tensors gradients_for(Stage& stage, int microbatch, const Step& step);
  void drop_sent();
  void drop_values(const Slot& slot);

  Stages& stages_;
  const Links& links_;
  Ties& ties_;
  std::vector<Cell> row_;
  bool differentiates_ = false;

  Inbox inbox_;                                        // what a stage is to read
  std::map<Slot, Tensors> outputs_, input_gradients_;  // that a stage has made for another rank
  std::vector<Sent> sent_;
  at::Tensor sums_;
  std::vector<ExecutedCell> executed_;
  int peak_ = 0;
};

}  // namespace bonfire
