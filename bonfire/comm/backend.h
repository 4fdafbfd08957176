#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/work.h"

namespace bonfire {

enum class Reduce { sum, average, max };

// One message of a batch of point-to-point operations.
struct Message {
  enum class Way { send, receive };
  Way way;
  at::Tensor tensor;
  int peer;  // rank inside the group
};

// One pair of a gathering or a scattering reduction: the whole, and the part of it that belongs to this rank. `part` may be
// memory of its own, or this rank's own slice of `whole`; no other overlap is allowed.
struct Transfer {
  at::Tensor whole;
  at::Tensor part;
};

class EmulatedLink;

// One communicator over c10d: what Group asks of Gloo (CPU) and NCCL (GPU). Group has checked every argument: tensors are
// contiguous, on the backend's device, of the right sizes, and there is more than one rank.
class BONFIRE_API Backend {
 public:
  virtual ~Backend() = default;

  virtual Work all_reduce(at::Tensor tensor, Reduce op) = 0;
  // All of the transfers, which are at least one and not empty, as one operation.
  virtual Work all_gather(std::span<const Transfer> transfers) = 0;
  virtual Work reduce_scatter(std::span<const Transfer> transfers, Reduce op) = 0;
  virtual Work broadcast(at::Tensor tensor, int root) = 0;
  virtual Work reduce(at::Tensor tensor, int root, Reduce op) = 0;
  virtual Work scatter(at::Tensor output, at::Tensor input, int root) = 0;  // input: at the root only
  virtual Work gather(at::Tensor output, at::Tensor input, int root) = 0;   // output: at the root only
  virtual Work all_to_all(at::Tensor output, at::Tensor input) = 0;
  virtual Work batch(std::span<const Message> messages) = 0;
  virtual Work barrier() = 0;

  // The work, made to end no sooner than `seconds` after its turn on the emulated link came.
  virtual Work over(EmulatedLink& link, double seconds, Work work) = 0;
  // Whether operations run strictly in the order in which they were issued, so that none can be put off.
  virtual bool ordered() const = 0;
  // Where the collectives run, in words: "gloo", "nccl".
  virtual std::string stream() const = 0;
  // Collective: ends the communicator in good order.
  virtual void shutdown() = 0;
};

}  // namespace bonfire
