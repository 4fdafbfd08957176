#include "bonfire/plan/server.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "bonfire/base/error.h"
#include "bonfire/schedule/clock.h"

namespace bonfire::plan {
namespace {

std::int64_t gradient_bytes(const Served& how) { return how.compression == Compression::none ? bytes_of(how.gradient) : 2; }

// One server's share of what is sent of a buffer, each way.
std::int64_t pushed_bytes(const FlatLayout& flat, const Served& how) {
  return flat.trained_elements() / how.servers * gradient_bytes(how);
}
std::int64_t pulled_bytes(const FlatLayout& flat, const Served& how) {
  return (how.pulls_gradients ? flat.trained_elements() * bytes_of(how.gradient) : flat.trained_bytes()) / how.servers;
}

}  // namespace

std::vector<FlatLayout> served_flats(const ModelDescription& model, DataParallel layout, const Served& how) {
  require(layout.ranks() == 1, "a worker of a parameter server is a rank alone, not one of {} replicas x {} shards",
          layout.replicate, layout.shard);
  layout.gradient = how.gradient;
  layout.buckets.parts = how.servers;
  layout.buckets.one_per_group = true;
  return flats_of(model, layout);
}

std::vector<Collective> messages_of_worker(const std::vector<FlatLayout>& flats, const Served& how) {
  std::vector<Collective> list;
  for (const auto& flat : flats)
    if (flat.any_trained()) list.push_back({CollectiveKind::send, Axis::world, server_head_bytes + pushed_bytes(flat, how)});
  list.push_back({CollectiveKind::send, Axis::world, server_head_bytes});
  for (auto flat = flats.rbegin(); flat != flats.rend(); ++flat)
    if (flat->any_trained())
      list.push_back({CollectiveKind::receive, Axis::world, server_head_bytes + pulled_bytes(*flat, how)});
  return list;
}

std::vector<Collective> messages_of_server(const std::vector<FlatLayout>& flats, const Served& how) {
  std::vector<Collective> list;
  for (const auto& flat : flats) {
    if (!flat.any_trained()) continue;
    list.push_back({CollectiveKind::receive, Axis::world, server_head_bytes});
    list.push_back({CollectiveKind::receive, Axis::world, pushed_bytes(flat, how)});
  }
  list.push_back({CollectiveKind::receive, Axis::world, server_head_bytes});
  for (auto flat = flats.rbegin(); flat != flats.rend(); ++flat)
    if (flat->any_trained())
      list.push_back({CollectiveKind::send, Axis::world, server_head_bytes + pulled_bytes(*flat, how)});
  return list;
}

std::int64_t worker_state_bytes(const std::vector<FlatLayout>& flats, const Served& how) {
  std::int64_t bytes = 0;
  for (const auto& flat : flats) {
    bytes += flat.bytes;
    for (const auto& region : flat.regions) {
      if (!region.trained) continue;
      bytes += region.elements * bytes_of(how.gradient);
      // Masters that only servers update, and memory for new weights where they do not fit the gradients'.
      if (region.compute != region.master) bytes += region.elements * bytes_of(region.master);
      if (how.pulls_gradients)
        bytes += region.elements * bytes_of(region.master) * how.optimizer_states;
      else if (bytes_of(region.compute) != bytes_of(how.gradient))
        bytes += region.bytes();
    }
  }
  return bytes;
}

std::int64_t server_state_bytes(const std::vector<FlatLayout>& flats, const Served& how) {
  std::int64_t bytes = 0;
  for (const auto& flat : flats)
    for (const auto& region : flat.regions) {
      if (!region.trained) continue;
      const std::int64_t elements = region.elements / how.servers, master = bytes_of(region.master);
      // Gradients are summed in the master's type.
      bytes += elements * master * (2 + (how.pulls_gradients ? 0 : how.optimizer_states));
      if (region.compute != region.master) bytes += elements * bytes_of(region.compute);
      bytes += how.workers * elements * std::max({gradient_bytes(how), bytes_of(how.gradient), bytes_of(region.compute)});
    }
  return bytes;
}

namespace {

using schedule::Clock;
using schedule::Resource;
using schedule::Task;

struct Port {
  Resource out, in;
};

// Steps of all ranks, one after the other, on one clock.
class ServedClock {
 public:
  ServedClock(const ServedCosts& costs, const Served& how, bool together) : costs_(costs), how_(how), together_(together) {
    for (int worker = 0; worker < how.workers; ++worker) {
      compute_.push_back(clock_.resource("worker"));
      workers_.push_back({clock_.resource("worker sends"), clock_.resource("worker receives")});
    }
    for (int server = 0; server < how.servers; ++server) {
      update_.push_back(clock_.resource("server"));
      servers_.push_back({clock_.resource("server sends"), clock_.resource("server receives")});
    }
    there_.assign(compute_.size(), std::vector<std::vector<Task>>(costs.units.size()));
  }

  // When the last worker ends this step's backward.
  double step() {
    const auto units = costs_.units.size();
    std::vector<std::vector<std::vector<Task>>> pushed(workers_.size(), std::vector<std::vector<Task>>(servers_.size()));
    std::vector<Task> ends(workers_.size());
    for (std::size_t worker = 0; worker < workers_.size(); ++worker)
      for (std::size_t unit = 0; unit < units; ++unit)
        ends[worker] = clock_.task(compute_[worker], costs_.units[unit].forward, there_[worker][unit]);
    for (std::size_t unit = units; unit-- > 0;)
      for (std::size_t worker = 0; worker < workers_.size(); ++worker) {
        ends[worker] = clock_.task(compute_[worker], costs_.units[unit].backward);
        for (std::size_t server = 0; server < servers_.size(); ++server)
          message(workers_[worker].out, servers_[server].in, costs_.units[unit].push, {ends[worker]},
                  pushed[worker][server]);
      }
    for (auto& of : there_)
      for (auto& tasks : of) tasks.clear();
    // Servers agree on an update of all workers: each begins it when the last of them has the last gradient.
    std::vector<Task> all;
    for (const auto& of_worker : pushed)
      for (const auto& tasks : of_worker) all.insert(all.end(), tasks.begin(), tasks.end());
    // Issued in the order in which they happen: what a worker receives comes from all servers at once.
    for (std::size_t unit = 0; unit < units; ++unit) {
      std::vector<Task> updated;
      for (std::size_t server = 0; together_ && server < servers_.size(); ++server)
        updated.push_back(clock_.task(update_[server], costs_.units[unit].update, all));
      for (std::size_t worker = 0; worker < workers_.size(); ++worker)
        for (std::size_t server = 0; server < servers_.size(); ++server) {
          const auto ready =
              together_ ? updated[server] : clock_.task(update_[server], costs_.units[unit].update, pushed[worker][server]);
          message(servers_[server].out, workers_[worker].in, costs_.units[unit].pull, {ready}, there_[worker][unit]);
        }
    }
    clock_.run();
    double end = 0;
    for (const auto& task : ends) end = std::max(end, clock_.end(task));
    return end;
  }

 private:
  // It is received while it is sent. `ended`: what to wait for.
  void message(Resource out, Resource in, double seconds, std::initializer_list<Task> after, std::vector<Task>& ended) {
    const auto begins = clock_.task(out, 0, after);
    ended.push_back(clock_.task(out, seconds));
    ended.push_back(clock_.task(in, seconds, {begins}));
  }

  const ServedCosts& costs_;
  const Served& how_;
  bool together_;
  Clock clock_;
  std::vector<Resource> compute_, update_;
  std::vector<Port> workers_, servers_;
  std::vector<std::vector<std::vector<Task>>> there_;  // by worker and Unit: what its forward waits for
};

}  // namespace

double served_step_seconds(const ServedCosts& costs, const Served& how, bool together) {
  require(how.workers >= 1 && how.servers >= 1, "a step of {} workers and {} servers; allowed: 1 or more of each",
          how.workers, how.servers);
  ServedClock clock(costs, how, together);
  constexpr int warmup = 3;
  double before = 0;
  for (int step = 0; step < warmup; ++step) before = clock.step();
  return clock.step() - before;
}

}  // namespace bonfire::plan
