#include "bonfire/pipeline/links.h"

#include <set>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"

namespace bonfire {

std::vector<std::int64_t> CrossingValue::sizes(std::int64_t samples) const {
  std::vector<std::int64_t> all{per_sample * samples};
  all.insert(all.end(), rest.begin(), rest.end());
  return all;
}

std::string to_string(const Crossing& crossing) {
  std::vector<std::string> words;
  for (const auto& value : crossing)
    words.push_back(fmt::format("{} [{}n{}{}]", c10::toString(value.type),
                                value.per_sample == 1 ? "" : fmt::format("{}", value.per_sample),
                                value.rest.empty() ? "" : ", ", fmt::join(value.rest, ", ")));
  return words.empty() ? "nothing" : fmt::format("{}", fmt::join(words, ", "));
}

Links::Links(const Mesh& mesh, const schedule::Schedule& table, at::Device device)
    : rank_(mesh.coordinate(Axis::pipeline)), pool_(std::make_shared<BufferPool>(device)) {
  // In one order on all ranks: each waits for the other end of the first pair that it has not connected.
  const schedule::Index index(table);
  std::set<std::pair<int, int>> pairs;
  for (int rank = 0; rank < table.ranks(); ++rank)
    for (const auto& action : table.rows[static_cast<std::size_t>(rank)])
      if (schedule::is_send(action.kind)) pairs.emplace(rank, index.peer(action));
  for (const auto& [from, to] : pairs) {
    if (from != rank_ && to != rank_) continue;
    const Group group = mesh.pipeline_subgroup({from, to}, fmt::format("pipeline {}>{}", from, to));
    // The first message makes the connection.
    auto hello = at::zeros({1}, at::TensorOptions(at::kByte).device(device));
    (from == rank_ ? group.send(hello, 1) : group.receive(hello, 0)).wait();
    ways_.emplace(std::pair(from, to), group);
  }
}

const Group& Links::way(int from, int to) const {
  const auto found = ways_.find({from, to});
  require(found != ways_.end(), "no link from pipeline rank {} to {}: the table had no message on it", from, to);
  return found->second;
}

Work Links::send(const Tensors& tensors, int to) const {
  std::vector<Message> messages;
  for (const auto& tensor : tensors) messages.push_back({Message::Way::send, tensor, 1});
  return way(rank_, to).batch(messages);
}

Work Links::receive(const Tensors& tensors, int from) const {
  std::vector<Message> messages;
  for (const auto& tensor : tensors) messages.push_back({Message::Way::receive, tensor, 0});
  return way(from, rank_).batch(messages);
}

Tensors Links::room(const Crossing& crossing, std::int64_t samples, std::int64_t place) const {
  Tensors tensors;
  for (std::size_t at = 0; at < crossing.size(); ++at) {
    const auto sizes = crossing[at].sizes(samples);
    std::int64_t elements = 1;
    for (const auto size : sizes) elements *= size;
    const auto bytes = elements * static_cast<std::int64_t>(c10::elementSize(crossing[at].type));
    // The memory belongs to the tensor, and to whatever autograd keeps of it.
    auto buffer = pool_->borrow(bytes, place * static_cast<std::int64_t>(crossing.size()) + static_cast<std::int64_t>(at));
    void* const data = buffer->data();
    tensors.push_back(at::from_blob(
        data, sizes, [buffer = std::move(buffer), pool = pool_](void*) mutable { buffer.reset(); },
        at::TensorOptions(crossing[at].type).device(pool_->device())));
  }
  return tensors;
}

}  // namespace bonfire
