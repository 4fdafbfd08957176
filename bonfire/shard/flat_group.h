#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bonfire/nn/gradient_slots.h"
#include "bonfire/shard/backward.h"
#include "bonfire/shard/driver.h"
#include "bonfire/shard/engine_memory.h"
#include "bonfire/shard/host_clock.h"
#include "bonfire/shard/module_buffers.h"
#include "bonfire/shard/parameter_layout.h"
#include "bonfire/shard/reducer.h"
#include "bonfire/shard/settings.h"

namespace bonfire {

// What the gradients of a module are at the moment.
enum class Gradients {
  none,     // there has been no backward yet
  partial,  // of some microbatches; the last is still to come
  whole,    // of a whole step, averaged over the ranks
  spent,    // used by an update
  lost,     // backward threw
};

class FlatSink;

// The flat parameters of one module with the verbs that take them through a step: gather and free the parameters, collect
// and reduce the gradients, send round what was updated. When each of them is done, a Driver decides.
class FlatGroup {
 public:
  struct Company {
    std::shared_ptr<EngineMemory> memory{};  // that engines share whose modules the same schedule runs; null: its own
    bool reduces_too = false;                // they reduce over the same ranks
  };
  // Finds the parameters and makes them equal on all ranks. `settings` outlives this. Collective.
  FlatGroup(const ShardSettings& settings, torch::nn::Module& module, Company company);
  ~FlatGroup();
  FlatGroup(const FlatGroup&) = delete;
  FlatGroup& operator=(const FlatGroup&) = delete;
  // Lays the parameters out. `driver` outlives every use of this but its end.
  void begin(Driver& driver);

  const ShardSettings& settings() const { return settings_; }
  ParameterLayout& layout() { return layout_; }
  const ParameterLayout& layout() const { return layout_; }
  ParameterLayout::Flats& flats() { return layout_.flats(); }
  const ParameterLayout::Flats& flats() const { return layout_.flats(); }
  const ModuleBuffers& buffers() const { return buffers_; }
  const Backward& backward() const { return backward_; }
  Reducer& reducer() { return *reducer_; }
  Reduction& reduction() const { return *reduction_; }
  const Reducer& reducer() const { return *reducer_; }
  BufferPool& pool() const { return memory_->parameters; }
  // In the pool: no other that shares it has this one, or the next 2^22.
  std::int64_t first_place() const { return first_place_; }
  HostClock& host() { return host_; }
  const HostClock& host() const { return host_; }

  // --- Parameters, all of them. A driver that gathers Unit by Unit calls the same verbs of each FlatParameter.
  // Begins to gather; nothing where they are always in. `behind`: which of the versions that are kept, see FlatParameter.
  // Collective.
  void unshard(int behind = 0);
  // Stream: the current one waits until they are there.
  void await();
  void reshard();

  // --- Gradients.
  // What was frozen or thawed since the last step moves. Collective where something was.
  void follow_freezing();
  // Throws where a parameter was frozen or thawed since.
  void require_same_training() const;
  // Between the two, gradients that autograd accumulates are added to those of the step. With `reduces`, all that is to be
  // reduced is on its way at the end. Collective then.
  void begin_gradients(const BackwardKind& how);
  void end_gradients();
  // In place of end_gradients, on a rank that had none: await_reductions begins what others reduce.
  void leave_gradients() { backward_.end(); }
  // No gradient of these parameters will come any more in this backward. Of those of Units that were not used: before any.
  void expect_none(std::size_t flat) { backward_.complete(flat); }
  void expect_none() { backward_.complete_all(); }
  void backward_ended(const FlatParameter& flat);
  // Reduces what is complete and next in order.
  void reduce_ready();
  // While both have a backward: nothing of this one is reduced before all of `first` is, so that ranks on which gradients
  // arrive in different orders issue their reductions in one. Null: no more.
  void reduce_after(FlatGroup* first);
  // Waits for the reductions that were begun. Collective.
  void await_reductions();
  // The gradients are those of a whole step. Collective.
  void end_step();
  // A backward threw, and said why: its gradients are lost.
  void abandon(const std::string& why);
  // What was issued has never begun: it was captured, in vain.
  void forget();

  Gradients gradients() const { return gradients_; }
  // Throws unless they are those of a whole step that no update has used yet.
  void require_gradients() const;
  void spend_gradients(const GradientUse& use);
  // The next backward starts from nothing.
  void drop_gradients() { gradients_ = Gradients::spent; }

  // --- The order of the flats, which decides in which order squares are added up to a norm.
  // For each group its place in the order that was learned; -1 where none was.
  std::vector<std::int64_t> learned_places() const;
  // What was learned by another run. Nothing happens unless these are the places of all groups. Collective.
  void take_places(const std::vector<std::int64_t>& places);

  // --- Updates: see Engine::updated.
  void updated(std::size_t flat);
  void finish_update();

 private:
  void start_equal();
  void install(torch::nn::Module& module);
  // Takes hooks and sinks off.
  void leave_module();
  void lay_out(const std::vector<std::size_t>& order);
  void require_unwritten() const;
  void hide_gradients();
  void arrive(std::size_t parameter, const at::Tensor& tensor);
  at::Tensor sink_buffer(LaidParameter& parameter, bool& fresh);
  void learn_order();
  void agree_and_encode();

  const ShardSettings& settings_;
  const std::shared_ptr<EngineMemory> memory_;
  const std::int64_t first_place_;
  ParameterLayout layout_;
  ModuleBuffers buffers_;
  HostClock host_;
  std::shared_ptr<Reduction> reduction_;
  std::unique_ptr<Reducer> reducer_;
  std::vector<std::shared_ptr<FlatSink>> sinks_;  // by parameter, of layers that can use one
  Driver* driver_ = nullptr;
  FlatGroup *before_ = nullptr, *behind_ = nullptr;  // see reduce_after
  Backward backward_;
  Gradients gradients_ = Gradients::none;
  bool learned_ = false;  // the order in which backward finishes groups
  std::vector<Work> refreshes_;
  std::vector<std::pair<FlatParameter*, at::Tensor>> to_agree_on_;  // of those that were updated: see there
};

}  // namespace bonfire
