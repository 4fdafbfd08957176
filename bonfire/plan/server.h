#pragma once

#include <cstdint>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/collective.h"
#include "bonfire/plan/layout.h"

// The parameter server: what goes over its connections, what its ranks hold, and how long a step takes.
namespace bonfire::plan {

// Every message between a worker and a server begins with so many bytes that say what it is.
inline constexpr std::int64_t server_head_bytes = 88;

struct Served {
  int workers = 1;
  int servers = 1;
  Dtype gradient = Dtype::fp32;  // in which workers keep gradients
  Compression compression = Compression::none;
  int optimizer_states = 2;  // numbers that the optimizer remembers for each parameter, of the master's type
  // Workers get the average gradient in place of weights, and have the optimizers.
  bool pulls_gradients = false;
};

// The buffers of a model, one for each Unit, that can be cut into a share for each server.
BONFIRE_API std::vector<FlatLayout> served_flats(const ModelDescription& model, DataParallel layout, const Served& how);

// All messages of one step over the connection between one worker and one server, at either end, in the order in which that
// end issues them: the gradients of each Unit, in backward order, the end of the step, and the new weights, in forward
// order. Connections of other workers and servers carry the same. `flats` in backward order.
BONFIRE_API std::vector<Collective> messages_of_worker(const std::vector<FlatLayout>& flats, const Served& how);
BONFIRE_API std::vector<Collective> messages_of_server(const std::vector<FlatLayout>& flats, const Served& how);

// Bytes of the model's state on a rank: a worker has weights and gradients, a server its share of weights, gradients and
// optimizer state, and a place for each worker's gradients. Where gradients are pulled the optimizer state is the workers'.
BONFIRE_API std::int64_t worker_state_bytes(const std::vector<FlatLayout>& flats, const Served& how);
BONFIRE_API std::int64_t server_state_bytes(const std::vector<FlatLayout>& flats, const Served& how);

// What a step costs. A rank has a network card with two directions, each a queue; a message takes its turn on the sender's
// and on the receiver's at once.
struct ServedCosts {
  struct Unit {
    double forward = 0, backward = 0;  // seconds, on a worker
    double push = 0, pull = 0;         // seconds of one server's share on a free link
    double update = 0;                 // seconds of one server's share, for all workers' gradients
  };
  std::vector<Unit> units;  // in forward order
};

// Seconds of a step when it has settled. `together`: an update waits for all workers.
BONFIRE_API double served_step_seconds(const ServedCosts& costs, const Served& how, bool together = true);

}  // namespace bonfire::plan
