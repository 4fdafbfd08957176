#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/comm/mesh.h"
#include "bonfire/schedule/schedule.h"
#include "bonfire/shard/buffer_pool.h"

namespace bonfire {

using Tensors = std::vector<at::Tensor>;

// One of the tensors that go from one stage to the next. The first dimension counts samples: `per_sample` of its elements
// belong to each.
struct CrossingValue {
  std::int64_t per_sample = 1;
  std::vector<std::int64_t> rest{};  // the other dimensions
  at::ScalarType type = at::kFloat;
  bool differentiable = true;  // a gradient comes back for it

  std::vector<std::int64_t> sizes(std::int64_t samples) const;
  bool operator==(const CrossingValue&) const = default;
};
using Crossing = std::vector<CrossingValue>;

std::string to_string(const Crossing& crossing);
// As words that another rank can read, and back.
std::string to_words(const Crossing& crossing);
Crossing from_words(const std::string& words);

// The messages of a pipeline rank: a communicator for each direction of each pair of ranks that exchange any, so that a
// message waits for those before it on its own way and for no other.
class Links {
 public:
  // Collective along the pipeline: connects all that the table needs.
  Links(const Mesh& mesh, const schedule::Schedule& table, at::Device device);

  // All tensors of a message as one operation. They must be contiguous.
  Work send(const Tensors& tensors, int to) const;
  Work receive(const Tensors& tensors, int from) const;
  // A message that says what the next one on its way holds, for a receiver that cannot know: always of one size.
  at::Tensor room_for_announcement() const;
  at::Tensor announcement(const Crossing& crossing) const;
  // Host: waits for the device.
  static Crossing read(const at::Tensor& announcement);
  // Memory for a message, from a pool: it goes back when nothing uses it any more. `place` names where in the step it is.
  Tensors room(const Crossing& crossing, std::int64_t samples, std::int64_t place) const;
  std::int64_t pool_bytes() const { return pool_->bytes(); }

 private:
  const Group& way(int from, int to) const;

  int rank_;
  std::map<std::pair<int, int>, Group> ways_;  // by places of sender and receiver along the pipeline
  std::shared_ptr<BufferPool> pool_;
};

}  // namespace bonfire
