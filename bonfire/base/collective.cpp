#include "bonfire/base/collective.h"

#include <fmt/format.h>

namespace bonfire {

const char* name_of(Axis axis) {
  switch (axis) {
    case Axis::pipeline: return "pipeline";
    case Axis::replicate: return "replicate";
    case Axis::shard: return "shard";
    case Axis::context: return "context";
    case Axis::tensor: return "tensor";
    case Axis::data: return "data";
    case Axis::world: return "world";
  }
  return "?";
}

const char* name_of(CollectiveKind kind) {
  switch (kind) {
    case CollectiveKind::all_reduce: return "all_reduce";
    case CollectiveKind::all_gather: return "all_gather";
    case CollectiveKind::reduce_scatter: return "reduce_scatter";
    case CollectiveKind::broadcast: return "broadcast";
    case CollectiveKind::reduce: return "reduce";
    case CollectiveKind::scatter: return "scatter";
    case CollectiveKind::gather: return "gather";
    case CollectiveKind::all_to_all: return "all_to_all";
    case CollectiveKind::send: return "send";
    case CollectiveKind::receive: return "receive";
    case CollectiveKind::barrier: return "barrier";
  }
  return "?";
}

std::string to_string(const Collective& collective) {
  return fmt::format("{} over {}, {} bytes", name_of(collective.kind), name_of(collective.axis), collective.bytes);
}

double bus_factor(CollectiveKind kind, int ranks) {
  const double others = static_cast<double>(ranks - 1) / ranks;
  switch (kind) {
    case CollectiveKind::all_reduce: return 2 * others;
    case CollectiveKind::all_gather:
    case CollectiveKind::reduce_scatter:
    case CollectiveKind::all_to_all:
    case CollectiveKind::scatter:
    case CollectiveKind::gather: return others;
    case CollectiveKind::broadcast:
    case CollectiveKind::reduce:
    case CollectiveKind::send:
    case CollectiveKind::receive: return ranks > 1 ? 1 : 0;
    case CollectiveKind::barrier: return 0;
  }
  return 0;
}

double seconds_over(const Link& link, const Collective& collective, int ranks) {
  if (ranks <= 1) return 0;
  const double bytes = bus_factor(collective.kind, ranks) * static_cast<double>(collective.bytes);
  return link.latency_seconds + (link.bytes_per_second > 0 ? bytes / link.bytes_per_second : 0);
}

}  // namespace bonfire
