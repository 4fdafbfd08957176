#pragma once

#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "bonfire/base/api.h"
#include "bonfire/comm/backend.h"

namespace bonfire {

// What Gloo and NCCL have in common: both are c10d backends.
class BONFIRE_API C10dBackend : public Backend {
 public:
  explicit C10dBackend(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  Work all_reduce(at::Tensor tensor, Reduce op) override;
  Work broadcast(at::Tensor tensor, int root) override;
  Work reduce(at::Tensor tensor, int root, Reduce op) override;
  Work scatter(at::Tensor output, at::Tensor input, int root) override;
  Work gather(at::Tensor output, at::Tensor input, int root) override;
  Work all_to_all(at::Tensor output, at::Tensor input) override;
  Work barrier() override;
  void shutdown() override;

 protected:
  // The handle for a c10d work, with the tensors kept alive until it is gone.
  virtual Work track(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> tensors) = 0;

  c10d::Backend& backend() { return *backend_; }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
};

BONFIRE_API c10d::ReduceOp to_c10d(Reduce op);

// c10d notes every collective in a flight recorder, one for the whole process: host time for each, and not safe for ranks
// that are threads. Ours does its work, so it is off unless TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE asks for
// it. REQUIRES: called before the first process group is made.
BONFIRE_API void switch_flight_recorder_off();

}  // namespace bonfire
