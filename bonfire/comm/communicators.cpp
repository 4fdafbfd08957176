#include "bonfire/comm/communicators.h"

#include <algorithm>

#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bonfire/comm/cuda_plugin.h"
#include "bonfire/comm/gloo_backend.h"
#include "bonfire/comm/group_state.h"
#include "bonfire/comm/members.h"
#include "bonfire/comm/secret.h"
#include "bonfire/comm/token_store.h"

namespace bonfire {

Communicators::Communicators(c10::intrusive_ptr<c10d::Store> store, int rank, int size, WorldOptions options)
    : store_(std::move(store)),
      rank_(rank),
      options_(std::move(options)),
      alarms_{{{}, std::make_shared<Alarm>(store_, rank, Alarm::Part{.size = size})}} {}

void Communicators::adopt(std::vector<int> members, std::shared_ptr<Backend> communicator) {
  backends_[{std::string(), std::move(members)}] = std::move(communicator);
}

std::shared_ptr<Backend> Communicators::connect(const std::string& meeting, const Group::State& group) const {
  auto store = c10::make_intrusive<c10d::PrefixStore>(meeting, store_);
  const bool all = group.axis == Axis::world && group.part.empty();
  if (options_.device.is_cuda())
    return require_cuda_plugin().make_nccl(std::move(store), group.rank, group.size(),
                                           {.name = group.name,
                                            .device = options_.device,
                                            .timeout = options_.timeout,
                                            .first = all,
                                            .log = all ? options_.log : Log::silent()});
  return make_gloo_backend(std::move(store), {.rank = group.rank,
                                              .size = group.size(),
                                              .timeout = options_.timeout,
                                              .address = options_.address,
                                              .members = group.world_ranks,
                                              .secret = secret_behind(store_)});
}

const std::shared_ptr<Alarm>& Communicators::alarm_of(const std::vector<int>& part) {
  auto& alarm = alarms_[part];
  if (!alarm)
    alarm = std::make_shared<Alarm>(store_, rank_,
                                    Alarm::Part{.name = fmt::format("alarm of {}", short_hash(Members(part).text())),
                                                .size = static_cast<int>(part.size()),
                                                .of = alarms_.at({})});
  return alarm;
}

Group Communicators::group(const GroupSpec& spec) {
  if (const auto known = groups_.find(spec); known != groups_.end()) return known->second;
  const auto& members = spec.members;
  auto state = std::make_shared<Group::State>();
  state->axis = spec.axis;
  state->name = spec.name.empty() ? name_of(spec.axis) : spec.name;
  state->world_ranks = members;
  state->device = options_.device;
  state->rank = static_cast<int>(std::find(members.begin(), members.end(), rank_) - members.begin());
  state->alarm = alarm_of(spec.part);
  state->maker = weak_from_this();
  state->part = spec.part;
  if (members.size() > 1) {
    auto& backend = backends_[{spec.name, members}];
    // The store's keys name the members by a hash: spelled out, each would be as long as the list.
    if (!backend) backend = connect(fmt::format("group {} {}", spec.name, short_hash(Members(members).text())), *state);
    state->backend = backend;
    state->recorder = recorder_;
    state->progress = progress_;
    // Groups of different parts may have one name and the same members. Each is counted for itself.
    const auto label = spec.part.empty() ? state->name : fmt::format("{} of {}", state->name, Members(spec.part).text());
    state->lane = &progress_->lane(label, members);
    if (options_.debug)
      state->fingerprints = std::make_shared<FingerprintBoard>(store_, fmt::format("{} {}", label, fmt::join(members, ",")),
                                                               members, state->rank, options_.timeout);
  }
  return groups_.emplace(spec, Group(std::move(state))).first->second;
}

}  // namespace bonfire
