#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "bonfire/shard/schedule_driver.h"

namespace bonfire {

// The weights of one stage as its forwards and backwards see them: brings in the version that is to be used, and writes down
// which one was.
class WeightVersions {
 public:
  struct Options {
    std::string name;   // of the stage, for messages
    bool stash = true;  // otherwise a backward has the newest
  };
  WeightVersions(ScheduleDriver& driver, Options options);

  // Numbers of versions and updates count from here. REQUIRES: nothing is on its way.
  void restart();
  // Around a forward: `version` is the number of the weights to use.
  void begin_forward(int microbatch, int version);
  // Around a backward.
  void begin_backward(int microbatch);
  void end() { driver_.reshard(); }
  // Whether there is more than one version: a stage that trains nothing has the same weights for ever.
  bool changes() const { return driver_.trains(); }
  // Around an update: how many updates lie between the oldest weights of its gradients and those that it changes.
  int staleness() const { return staleness_; }
  void updated();
  int updates() const { return updates_; }
  void forget();

 private:
  std::int64_t generation_of(int version) const;
  void bring_in(std::int64_t generation);

  ScheduleDriver& driver_;
  Options options_;
  std::int64_t first_ = 0;  // generation of version 0: each update makes the next of both
  int updates_ = 0;
  std::map<int, std::int64_t> of_forwards_;  // by microbatch: what its forward has read
  int staleness_ = 0;
};

}  // namespace bonfire
