#include "bonfire/pipeline/links.h"

#include <algorithm>
#include <set>
#include <sstream>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

constexpr std::int64_t announcement_bytes = 2048;

}  // namespace

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

std::string to_words(const Crossing& crossing) {
  std::ostringstream words;
  words << crossing.size();
  for (const auto& value : crossing) {
    words << ' ' << value.per_sample << ' ' << static_cast<int>(value.type) << ' ' << value.differentiable << ' '
          << value.rest.size();
    for (const auto size : value.rest) words << ' ' << size;
  }
  return words.str();
}

Crossing from_words(const std::string& text) {
  std::istringstream words(text);
  std::size_t count = 0;
  words >> count;
  Crossing crossing(count);
  for (auto& value : crossing) {
    int type = 0;
    std::size_t dims = 0;
    words >> value.per_sample >> type >> value.differentiable >> dims;
    value.type = static_cast<at::ScalarType>(type);
    value.rest.resize(dims);
    for (auto& size : value.rest) words >> size;
  }
  require(!words.fail(), "shapes that another rank has sent cannot be read: '{}'", text);
  return crossing;
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

at::Tensor Links::room_for_announcement() const {
  return at::zeros({announcement_bytes}, at::TensorOptions(at::kByte).device(pool_->device()));
}

at::Tensor Links::announcement(const Crossing& crossing) const {
  const auto words = to_words(crossing);
  require(static_cast<std::int64_t>(words.size()) <= announcement_bytes,
          "the shapes of {} values that go to the next stage take {} bytes to write down; allowed: {}", crossing.size(),
          words.size(), announcement_bytes);
  auto bytes = at::zeros({announcement_bytes}, at::kByte);
  std::copy(words.begin(), words.end(), bytes.data_ptr<std::uint8_t>());
  return bytes.to(pool_->device());
}

Crossing Links::read(const at::Tensor& announcement) {
  const auto here = announcement.cpu();
  return from_words({here.data_ptr<std::uint8_t>(), here.data_ptr<std::uint8_t>() + here.numel()});
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
