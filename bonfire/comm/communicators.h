#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "bonfire/comm/alarm.h"
#include "bonfire/comm/backend.h"
#include "bonfire/comm/group.h"
#include "bonfire/comm/progress.h"
#include "bonfire/comm/recorder.h"
#include "bonfire/comm/world.h"

namespace bonfire {

// What makes a group another than the others of this World.
struct GroupSpec {
  Axis axis = Axis::world;
  // Empty: the axis's own group, which shares a communicator with other axes that have the same members. Otherwise a group
  // with this name and a communicator to itself, whose collectives are in no order with those of any other.
  std::string name;
  std::vector<int> members;
  std::vector<int> part{};  // of the World that works by itself and has this group; empty: all of it

  auto operator<=>(const GroupSpec&) const = default;
};

// The groups of one World, each made once, however many meshes ask for it: its collectives are counted and compared once.
class Communicators : public std::enable_shared_from_this<Communicators> {
 public:
  Communicators(c10::intrusive_ptr<c10d::Store> store, int rank, int size, WorldOptions options);

  // A communicator of these members that exists already.
  void adopt(std::vector<int> members, std::shared_ptr<Backend> communicator);
  // Collective among the members, the first time: connects them.
  Group group(const GroupSpec& spec);

  c10d::Store& store() const { return *store_; }
  const WorldOptions& options() const { return options_; }
  const std::shared_ptr<Recorder>& recorder() const { return recorder_; }
  const std::shared_ptr<ProgressBoard>& progress() const { return progress_; }

 private:
  const std::shared_ptr<Alarm>& alarm_of(const std::vector<int>& part);
  std::shared_ptr<Backend> connect(const std::string& meeting, const Group::State& group) const;

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  WorldOptions options_;
  std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
  std::shared_ptr<ProgressBoard> progress_ = std::make_shared<ProgressBoard>();
  std::map<std::vector<int>, std::shared_ptr<Alarm>> alarms_;  // by part of the World; empty: all of it
  std::map<std::pair<std::string, std::vector<int>>, std::shared_ptr<Backend>> backends_;  // by name and members
  std::map<GroupSpec, Group> groups_;
};

}  // namespace bonfire
