#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "bonfire/base/api.h"
#include "bonfire/base/log.h"
#include "bonfire/comm/group.h"
#include "bonfire/comm/mesh.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace bonfire {

class ProgressBoard;
class Recorder;

struct WorldOptions {
  c10::Device device = c10::Device(c10::kCPU);
  std::string address = "127.0.0.1";                             // the interface that Gloo's connections are bound to
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  // of one collective
  // Compare fingerprints (kind, shape, dtype, sequence number) before each collective; slow, for finding mistakes.
  bool debug = false;
  int local_rank = 0;
  int local_size = 1;
  int node = 0;
  Log log{};
};

// One rank's view of all ranks of a run: a value handle. There is no global one; it is passed to whoever needs it, so many
// ranks can live in one process (each in its thread). It owns neither main nor the signals nor the logger.
class BONFIRE_API World {
 public:
  // A world of one rank, alone.
  World();
  // Inside an existing program that has a store. Collective.
  static World from_store(c10::intrusive_ptr<c10d::Store> store, int rank, int size, WorldOptions options = {});
  // Inside an existing program that has a Gloo process group: collectives of all ranks go over it. Axes of a mesh that hold
  // fewer ranks, and gathers, connect through the store. Collective.
  static World from_process_group(c10::intrusive_ptr<c10d::Backend> process_group, c10::intrusive_ptr<c10d::Store> store,
                                  WorldOptions options = {});

  int rank() const;
  int size() const;
  int local_rank() const;
  int local_size() const;
  int node() const;
  c10::Device device() const;
  const Log& log() const;

  // All ranks.
  const Group& group() const;
  // Collective: makes the groups of every axis. Throws ConfigError where the product of the axes is not size().
  Mesh mesh(const MeshShape& shape) const;
  // A mesh of some ranks, in this order; the others need not know of it. Collective among them. Throws ConfigError unless
  // there are as many as the shape has, each once, and this rank is one of them.
  Mesh mesh(const MeshShape& shape, const std::vector<int>& ranks) const;
  // These ranks over a communicator of their own, one for each name and list. `axis` is what the recorder lists it under.
  // Collective among them, the first time. REQUIRES: this rank is one of them.
  Group group(const std::string& name, const std::vector<int>& ranks, Axis axis = Axis::data) const;
  // What every group of this world has done since it was cleared.
  Recorder& recorder() const;
  // Where this rank notes how far it is, for the watchdog.
  const std::shared_ptr<ProgressBoard>& progress() const;
  // Something that must live as long as the World and end before its groups: its watchdog.
  void keep(std::shared_ptr<void> companion) const;
  // For rendezvous and small values; never null.
  c10d::Store& store() const;

  struct State;
  explicit World(std::shared_ptr<State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<State> state_;
};

}  // namespace bonfire
