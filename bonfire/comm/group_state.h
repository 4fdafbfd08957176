#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "bonfire/comm/alarm.h"
#include "bonfire/comm/backend.h"
#include "bonfire/comm/emulated_link.h"
#include "bonfire/comm/fingerprint.h"
#include "bonfire/comm/group.h"
#include "bonfire/comm/progress.h"
#include "bonfire/comm/recorder.h"

namespace bonfire {

class Communicators;

// What all copies of a Group handle share.
struct Group::State {
  Axis axis = Axis::world;
  std::string name = "alone";
  std::vector<int> world_ranks{0};
  int rank = 0;
  c10::Device device = c10::Device(c10::kCPU);
  std::shared_ptr<Backend> backend;                // null in a group of one
  std::shared_ptr<Recorder> recorder;              // null in a group of one
  std::shared_ptr<EmulatedLink> link;              // null: as fast as it is
  std::shared_ptr<FingerprintBoard> fingerprints;  // null: no debug mode
  std::shared_ptr<ProgressBoard> progress;         // null in a group of one
  ProgressBoard::Lane* lane = nullptr;             // of `progress`
  std::shared_ptr<Alarm> alarm;                    // null in a group that no World has made
  std::weak_ptr<Communicators> maker;              // of it and of groups of some of its ranks
  std::vector<int> part;                           // see GroupSpec
  // Collectives are counted alike by all members; messages are not, so they have a count of their own. From 1.
  struct Counts {
    std::atomic<std::int64_t> collectives = 0;
    std::atomic<std::int64_t> messages = 0;
  };
  std::shared_ptr<Counts> counts = std::make_shared<Counts>();

  int size() const { return static_cast<int>(world_ranks.size()); }
};

}  // namespace bonfire
