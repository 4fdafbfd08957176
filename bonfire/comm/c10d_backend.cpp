#include "bonfire/comm/c10d_backend.h"

#include <cstdlib>
#include <mutex>

namespace bonfire {
namespace {

// `tensor` cut into equal parts along its first dimension, one per rank, as c10d's list forms want them.
std::vector<at::Tensor> parts(const at::Tensor& tensor, int ranks) {
  const auto flat = tensor.view({ranks, -1});
  std::vector<at::Tensor> list;
  for (int rank = 0; rank < ranks; ++rank) list.push_back(flat.select(0, rank));
  return list;
}

}  // namespace

c10d::ReduceOp to_c10d(Reduce op) {
  switch (op) {
    case Reduce::sum: return c10d::ReduceOp::SUM;
    case Reduce::average: return c10d::ReduceOp::AVG;
    case Reduce::max: return c10d::ReduceOp::MAX;
  }
  return c10d::ReduceOp::SUM;
}

void switch_flight_recorder_off() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (std::getenv("TORCH_NCCL_TRACE_BUFFER_SIZE") == nullptr) setenv("TORCH_FR_BUFFER_SIZE", "0", 0);
  });
}

Work C10dBackend::all_reduce(at::Tensor tensor, Reduce op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d(op);
  return track(backend_->allreduce(tensors, options), tensors);
}

Work C10dBackend::broadcast(at::Tensor tensor, int root) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return track(backend_->broadcast(tensors, options), tensors);
}

Work C10dBackend::reduce(at::Tensor tensor, int root, Reduce op) {
  std::vector<at::Tensor> tensors{tensor};
  c10d::ReduceOptions options;
  options.rootRank = root;
  options.reduceOp = to_c10d(op);
  return track(backend_->reduce(tensors, options), tensors);
}

Work C10dBackend::scatter(at::Tensor output, at::Tensor input, int root) {
  std::vector<at::Tensor> outputs{output.view(-1)};
  std::vector<std::vector<at::Tensor>> inputs;
  if (backend_->getRank() == root) inputs.push_back(parts(input, backend_->getSize()));
  c10d::ScatterOptions options;
  options.rootRank = root;
  return track(backend_->scatter(outputs, inputs, options), {output, input});
}

Work C10dBackend::gather(at::Tensor output, at::Tensor input, int root) {
  std::vector<at::Tensor> inputs{input.view(-1)};
  std::vector<std::vector<at::Tensor>> outputs;
  if (backend_->getRank() == root) outputs.push_back(parts(output, backend_->getSize()));
  c10d::GatherOptions options;
  options.rootRank = root;
  return track(backend_->gather(outputs, inputs, options), {output, input});
}

Work C10dBackend::all_to_all(at::Tensor output, at::Tensor input) {
  std::vector<int64_t> equal;
  auto flat_output = output.view(-1), flat_input = input.view(-1);
  return track(backend_->alltoall_base(flat_output, flat_input, equal, equal, {}), {output, input});
}

Work C10dBackend::barrier() { return track(backend_->barrier({}), {}); }

void C10dBackend::shutdown() { backend_->shutdown(); }

}  // namespace bonfire
