#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/server/options.h"
#include "bonfire/shard/engine.h"

namespace bonfire {

// Trains a module with weights that servers keep: the data-parallel engine of one rank, whose gradients go to the servers
// instead of other replicas. There is no optimizer here.
//
//   Worker worker(world, model, options);
//   for (...) {
//     worker.backward(loss(model->forward(x)));  // gradients leave meanwhile
//     worker.step();                             // new weights come; the next forward waits for each Unit's
//   }
//   worker.finish();
//
// Units are the messages: mark them (BONFIRE_UNIT), and the root, and a forward begins when the first one has its weights.
// Of a module without, each parameter is a message, and step() waits for all.
class BONFIRE_API Worker {
 public:
  // All workers begin with the servers' weights, which are worker 0's. Of `shard`, `hook`, `reduction` and what is sharded
  // are not for the caller to say: throws ConfigError. Collective among this worker and all servers.
  Worker(const World& world, torch::nn::Module& module, const ServerOptions& options, ShardOptions shard = {});
  template <class Holder>
  requires requires(Holder& holder) { static_cast<torch::nn::Module&>(*holder); }
  Worker(const World& world, Holder& holder, const ServerOptions& options, ShardOptions shard = {})
      : Worker(world, static_cast<torch::nn::Module&>(*holder), options, std::move(shard)) {}
  // Leaves, unless an exception is on its way.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // As Engine's.
  void accumulate(const at::Tensor& loss, const BackwardOptions& how = {});
  void backward(const at::Tensor& loss, const BackwardOptions& how = {});
  // Ends a step: the servers have its gradients, and the new weights are on their way. `number`, normally the loss, is
  // averaged over the workers. Not where gradients are pulled: then an optimizer of the engine's takes the step.
  void step(double number = 0);
  // What the last step has come to. Waits for the first Unit's weights.
  ServedStep report();
  // All weights are there: to read them outside of forward.
  void await();
  // This worker has done all its steps: the others go on without it.
  void finish();

  Engine& engine();
  // Steps that were taken before this Worker was made: 0, unless this worker was lost and is back.
  std::int64_t steps_before() const;
  // This worker was there before, was lost, and is back.
  bool is_back() const;
  // It was lost when it had done all its steps already: there is nothing to do, and there are no weights.
  bool has_left() const;
  // The recorder of the connection to each server.
  Recorder& recorder(int server) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bonfire
