#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/base/collective.h"
#include "bonfire/comm/backend.h"
#include "bonfire/comm/work.h"

namespace bonfire {

class Recorder;

// The ranks along one axis that share all other coordinates: a small value handle with the collectives on it. A group of
// one answers every collective itself, here and nowhere else.
//
// Every collective returns at once with a Work; `.wait()` makes it a blocking one. Until then its tensors may be neither
// read nor written. Tensors must be contiguous (a strided one is refused, never reduced wrongly), on the group's device,
// and of a dtype it can carry: fp32, fp64, bf16, fp16, int64, or uint8 as raw bytes (which cannot be reduced).
//
// Collective: every rank of the group must call the same operations in the same order, from one thread at a time.
class BONFIRE_API Group {
 public:
  Group();  // a group of one

  int rank() const;
  int size() const;
  Axis axis() const;
  c10::Device device() const;                   // where tensors of its collectives lie
  const std::string& name() const;              // "replicate", or what it was called when it was made
  const std::vector<int>& world_ranks() const;  // the members, by their number in the World
  std::int64_t issued() const;                  // collectives, messages aside, since it was made

  [[nodiscard]] Work all_reduce(at::Tensor tensor, Reduce op = Reduce::sum) const;
  // output: size() times the input, in rank order along the first dimension. The input may be this rank's own slice of it.
  [[nodiscard]] Work all_gather(at::Tensor output, at::Tensor input) const;
  // input: size() times the output. Each rank gets the reduction of its part. The output may be this rank's own slice of
  // the input, whose other slices are unspecified afterwards.
  [[nodiscard]] Work reduce_scatter(at::Tensor output, at::Tensor input, Reduce op = Reduce::sum) const;
  // The same for several pairs as one collective: one launch, one record, one turn on an emulated link. Dtypes may differ
  // from pair to pair. Nothing but empty tensors is no collective at all.
  [[nodiscard]] Work all_gather(std::span<const Transfer> transfers) const;
  [[nodiscard]] Work reduce_scatter(std::span<const Transfer> transfers, Reduce op = Reduce::sum) const;
  [[nodiscard]] Work broadcast(at::Tensor tensor, int root) const;
  // The result is at the root; the tensor's content elsewhere is unspecified afterwards.
  [[nodiscard]] Work reduce(at::Tensor tensor, int root, Reduce op = Reduce::sum) const;
  [[nodiscard]] Work scatter(at::Tensor output, at::Tensor input, int root) const;
  [[nodiscard]] Work gather(at::Tensor output, at::Tensor input, int root) const;
  // Part i of the input goes to rank i. REQUIRES: size() divides the number of elements.
  [[nodiscard]] Work all_to_all(at::Tensor output, at::Tensor input) const;
  [[nodiscard]] Work send(at::Tensor tensor, int to) const;
  [[nodiscard]] Work receive(at::Tensor tensor, int from) const;
  // All of the messages at once: the way to exchange without deadlock.
  [[nodiscard]] Work batch(std::span<const Message> messages) const;
  [[nodiscard]] Work barrier() const;

  // Small conveniences over the above, blocking.
  double sum(double value) const;
  double max(double value) const;

  // The `ranks` consecutive members to which this rank belongs, over a communicator of their own. Collective for each size,
  // the first time. Throws ConfigError where `ranks` does not divide the size. REQUIRES: the World lives.
  [[nodiscard]] Group neighbours(int ranks) const;

  // This rank failed between collectives, and says why: others hear it where they wait for this one. True: all ranks of the
  // World, or of the part of it that this group was made for, failed at the same `place`, a number that says what they have
  // issued, so that they may go on. Otherwise their groups throw from now on. Waits for the others, no longer than
  // `patience`.
  bool all_failed_alike(const std::string& words, std::int64_t place, std::chrono::milliseconds patience) const;

  // The same group behind a link of this kind: its collectives complete when such a link would have completed them. They
  // queue on the link one after the other, as on a real one. Affects this handle and its copies.
  [[nodiscard]] Group over(const Link& link) const;
  // Behind a link that other groups may share: they queue on it together.
  [[nodiscard]] Group over(std::shared_ptr<EmulatedLink> link) const;

  struct State;
  explicit Group(std::shared_ptr<const State> state);
  const State& state() const { return *state_; }

 private:
  std::shared_ptr<const State> state_;
};

}  // namespace bonfire
