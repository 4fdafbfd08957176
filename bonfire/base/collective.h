#pragma once

#include <compare>
#include <cstdint>
#include <string>

#include "bonfire/base/api.h"

// The words that comm (which performs collectives), plan (which predicts them) and the clock (which times them) share.
namespace bonfire {

// Axes of the mesh, slowest to fastest. `data` is replicate x shard taken as one; `world` is every rank.
enum class Axis { pipeline, replicate, shard, context, tensor, data, world };

enum class CollectiveKind {
  all_reduce,
  all_gather,
  reduce_scatter,
  broadcast,
  reduce,
  scatter,
  gather,
  all_to_all,
  send,
  receive,
  barrier,
};

// One collective as both the recorder and the plan list it. `bytes` is the largest buffer that a rank hands in or gets
// back: the tensor of an all-reduce or broadcast, the output of an all-gather, the input of a reduce-scatter.
struct Collective {
  CollectiveKind kind;
  Axis axis;
  std::int64_t bytes;

  auto operator<=>(const Collective&) const = default;
};

// A network link between neighbours. A bandwidth of 0 means that bytes cost nothing.
struct Link {
  double latency_seconds = 0;
  double bytes_per_second = 0;
};

BONFIRE_API const char* name_of(Axis axis);
BONFIRE_API const char* name_of(CollectiveKind kind);
BONFIRE_API std::string to_string(const Collective& collective);

// Bytes that cross each rank's link per byte of the buffer, by the best algorithm for large messages; the "bus" factor of
// the tables people know. An all-reduce over n ranks moves 2(n-1)/n.
BONFIRE_API double bus_factor(CollectiveKind kind, int ranks);

// How long `collective` takes over `link`: one latency and its bus bytes.
BONFIRE_API double seconds_over(const Link& link, const Collective& collective, int ranks);

}  // namespace bonfire
