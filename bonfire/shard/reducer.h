#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "bonfire/comm/group.h"
#include "bonfire/comm/side_stream.h"
#include "bonfire/shard/engine_memory.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/reduction.h"

namespace bonfire {

struct ReducerOptions {
  Group shard{};                         // among whom gradients are scattered
  std::optional<at::ScalarType> wire{};  // what they travel in, where that is not what they are kept in
  std::size_t whole_gradients = 2;       // of them at most, written or on their way, exist at a time in the memory
  bool replicated = true;                // what is scattered has to be averaged over replicas, the sooner the better
  // Others reduce over the same ranks: what is begun, and when, must not depend on what has arrived meanwhile.
  bool in_company = false;
  // More than that may: other ranks are known to wait for this one.
  std::function<bool()> must_go_on{};
  // A host that has waited so long for others to reduce what it has believes the same for the rest of the backward.
  std::chrono::milliseconds patience{5000};
};

// Turns whole gradients into the averages of this rank's shares, in one order on all ranks, while backward goes on:
// scattered over the shard group, added to what earlier microbatches left, and at last averaged over the replicas.
class Reducer {
 public:
  using Flats = std::vector<std::unique_ptr<FlatParameter>>;

  Reducer(std::shared_ptr<EngineMemory> memory, std::shared_ptr<Reduction> replicas, ReducerOptions options)
      : memory_(std::move(memory)),
        side_(memory_->gradients.device()),
        replicas_(std::move(replicas)),
        options_(std::move(options)) {}
  ~Reducer() { std::erase(memory_->flights, this); }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // A backward begins. `last`: of its step, so that replicas are averaged too. `in_company`: as in the options, for this
  // one.
  void begin(Flats& flats, bool last, bool in_company = false);
  bool launched(std::size_t bucket) const { return launched_[bucket]; }
  // The memory for whole gradients of a flat parameter. May wait for an earlier reduction: on a GPU the stream does.
  void open(FlatParameter& flat);
  // All gradients of flat parameter `bucket` have arrived.
  void launch(std::size_t bucket);
  // Nothing waits for other ranks any more in this backward but end().
  void hurry() { patient_ = false; }
  // What has arrived meanwhile is taken a step further. Never waits.
  void progress();
  // Collective: launches what was not, and waits for all.
  void end();
  // Backward threw, on all ranks at the same place: ends what was launched, and forgets the rest.
  void abandon();
  // What was launched has never begun: it was captured, in vain.
  void forget();

  const BufferPool& pool() const { return pool_; }
  BufferPool& pool() { return pool_; }

 private:
  struct Flight {
    std::size_t bucket = 0;
    bool last = true;  // of its step
    Work work{};
    std::vector<at::Tensor> wholes{};  // of the trained shares' regions, as they travel
    std::vector<std::shared_ptr<PoolBuffer>> memory{};
    bool landed = false;
  };
  at::Tensor on_wire(Flight& flight, const at::Tensor& whole);
  void land(Flight& flight);
  void land_front();
  void pop_front();
  void land_all();
  bool front_will_land();
  void make_room();

  std::shared_ptr<EngineMemory> memory_;
  BufferPool& pool_ = memory_->gradients;
  SideStream side_;
  std::shared_ptr<Reduction> replicas_;
  ReducerOptions options_;
  Flats* flats_ = nullptr;
  bool last_ = true, patient_ = true, in_company_ = false;
  bool must_wait_ = false;  // somebody is really there
  std::vector<char> launched_;
  std::deque<Flight> flights_;
};

}  // namespace bonfire
