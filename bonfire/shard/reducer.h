#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "bonfire/comm/group.h"
#include "bonfire/shard/buffer_pool.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/reduction.h"
#include "bonfire/shard/side_stream.h"

namespace bonfire {

struct ReducerOptions {
  Group shard{};                         // among whom gradients are scattered
  std::optional<at::ScalarType> wire{};  // what they travel in, where that is not what they are kept in
  std::size_t whole_gradients = 2;       // of them at most, written or on their way, exist at a time
};

// Turns whole gradients into the averages of this rank's shares, in one order on all ranks, while backward goes on:
// scattered over the shard group, added to what earlier microbatches left, and at last averaged over the replicas.
class Reducer {
 public:
  using Flats = std::vector<std::unique_ptr<FlatParameter>>;

  Reducer(at::Device device, std::shared_ptr<Reduction> replicas, ReducerOptions options)
      : pool_(device), side_(device), replicas_(std::move(replicas)), options_(std::move(options)) {}

  // A backward begins. `last`: of its step, so that replicas are averaged too.
  void begin(Flats& flats, bool last);
  // The memory for whole gradients of a flat parameter. May wait for an earlier reduction: on a GPU the stream does.
  void open(FlatParameter& flat);
  // All gradients of flat parameter `bucket` have arrived.
  void launch(std::size_t bucket);
  // What has arrived meanwhile is taken a step further. Never waits.
  void progress();
  // Collective: launches what was not, and waits for all.
  void end();

  const BufferPool& pool() const { return pool_; }

 private:
  struct Flight {
    std::size_t bucket = 0;
    Work work{};
    std::vector<at::Tensor> wholes{};  // of the trained shares' regions, as they travel
    std::vector<std::shared_ptr<PoolBuffer>> memory{};
    bool landed = false;
  };
  at::Tensor on_wire(Flight& flight, const at::Tensor& whole);
  void land(Flight& flight);
  void land_front();

  BufferPool pool_;
  SideStream side_;
  std::shared_ptr<Reduction> replicas_;
  ReducerOptions options_;
  Flats* flats_ = nullptr;
  bool last_ = true;
  std::vector<char> launched_;
  std::deque<Flight> flights_;
};

}  // namespace bonfire
