#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/comm/mesh.h"
#include "bonfire/pipeline/chain.h"
#include "bonfire/pipeline/executed.h"
#include "bonfire/schedule/pipedream.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/shares.h"
#include "bonfire/shard/slices.h"

namespace bonfire {

struct PipeDreamOptions {
  // Replicas of each stage, which weights minibatches see, and the microbatches of one. Their number does not count: it is
  // endless.
  schedule::RoundRobin robin{};
  std::vector<UnitRange> stages{};  // empty: evenly by count
  // Whether a backward has the weights of its own forward. Without, it has the newest: gradients are not those of any
  // weights.
  bool stash = true;
  int receive_ahead = 1;
  // Of every stage. Nothing is sharded: replicas hold a whole stage each.
  ShardOptions shard{};
  Microbatch example{};  // such as will come, whatever is in it
};

// The table of a full pipeline, as `pipedream_table` has checked it. Throws ConfigError where there cannot be one. Needs no
// ranks.
BONFIRE_API schedule::Schedule pipedream_table(const schedule::RoundRobin& robin);

// Minibatches that can be admitted one after the other: microbatches have numbers, which begin anew when the pipeline has
// run empty.
BONFIRE_API std::int64_t most_without_drain(const schedule::RoundRobin& robin);

// An update of this rank's stage that has been made.
struct StageUpdate {
  std::int64_t number = 0;     // of the stage, from 0
  std::int64_t minibatch = 0;  // the last one in it
  // How many updates came between the weights that this rank's part of its gradient was made with and those that it
  // changes: counted from the weights that forward and backward had in memory.
  int staleness = 0;
};

// A model cut into stages of which each is on several ranks, its replicas, trained the way of PipeDream: minibatches follow
// each other through the pipeline without waiting for the updates of those before them. Every rank holds one stage.
//
// docs/pipedream.md says which weights a minibatch sees in which mode.
class BONFIRE_API PipeDream : public Shares, public Sliced {
 public:
  // The pipeline axis of the mesh has a place for each replica of each stage, those of the first stage first; its other
  // axes are 1. Throws ConfigError, the same on all ranks, where the model cannot be had so. Collective over the mesh.
  PipeDream(const Mesh& mesh, Chain chain, PipeDreamOptions options);
  ~PipeDream() override;
  PipeDream(PipeDream&&) noexcept;
  PipeDream& operator=(PipeDream&&) noexcept;

  // Called for each update of this rank's stage, with its gradients complete: an optimizer of this steps.
  void on_update(std::function<void(const StageUpdate&)> update);
  void on_cell(CellObserver observe);

  // The next minibatch, the same on all ranks. Microbatch::weight: in the mean of their minibatch; minibatches weigh alike.
  // Goes on as far as its forward on this rank's stage, if it is this replica's; what follows waits for the minibatches
  // behind it. Collective.
  void admit(const std::vector<Microbatch>& minibatch);
  // Runs the pipeline empty: all that was admitted has been trained with. Throws Error unless can_drain(). Collective.
  void drain();
  // The replicas of every stage have had whole rounds.
  bool can_drain() const;
  bool empty() const;                    // nothing is on its way
  std::int64_t admitted() const;         // minibatches, since it was made
  std::int64_t drains() const;           // that had something to wait for
  std::int64_t updates() const;          // of this rank's stage
  int minibatches_on_their_way() const;  // in a full pipeline, at most: what was admitted before has been updated with

  // Of a minibatch that was admitted: this rank's part of its loss, a sum over ranks. 0 where another rank has it, or where
  // its forward is yet to come.
  double take_loss(std::int64_t minibatch);
  // Forwards alone, with the newest weights. Mean loss by weights. REQUIRES: empty(). Collective.
  double evaluate(const std::vector<Microbatch>& microbatches);

  const schedule::RoundRobin& robin() const;
  const std::vector<UnitRange>& stages() const;
  int stage() const;  // this rank's
  Engine& engine();
  torch::nn::Module& module();
  int versions() const;          // that this rank keeps
  int peak_activations() const;  // forwards of this rank whose backward had not ended, at most

  // As of a Pipeline.
  std::vector<Slice> slices() override;
  void slices_written() override;

  // For optimizers, of this rank's stage alone: see Shares. A norm is that of one stage.
  std::vector<Part> parts() const override;
  std::int64_t layout_version() const override;
  Division division() const override;
  at::Device device() const override;
  void sum(at::Tensor& numbers) const override;
  void require_gradients() const override;
  void spend_gradients(const GradientUse& use = {}) override;
  void updated(std::size_t part) override;
  void finish_update() override;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace bonfire
