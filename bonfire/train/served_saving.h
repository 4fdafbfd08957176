#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <ATen/core/Tensor.h>

#include "bonfire/base/stateful.h"
#include "bonfire/checkpoint/checkpoints.h"
#include "bonfire/comm/world.h"
#include "bonfire/server/server.h"
#include "bonfire/train/config.h"
#include "bonfire/train/loop.h"

namespace bonfire {

// What a parameter server's checkpoint says of the run.
struct ServedPlace {
  std::int64_t steps = 0;    // that all workers have done: samples behind them may have been trained on
  std::int64_t updates = 0;  // that the weights have seen
};

// The checkpoints of parameter servers. Where all of them make the same updates they save together after one of these.
// Where each makes its own, each says when it has made enough of them, and when all have, they save, each between two of
// its updates: a thread of each waits for the others meanwhile, so that workers are served whose answers the others need
// before they get as far.
class ServedSaving {
 public:
  // The World is the servers' alone. Collective.
  ServedSaving(const World& servers, const Config& config, const TrainOptions& options);
  ~ServedSaving();
  ServedSaving(const ServedSaving&) = delete;
  ServedSaving& operator=(const ServedSaving&) = delete;

  // Loads what the options ask for, before Server::serve(). Nothing: the run begins. Collective.
  std::optional<ServedPlace> load(Server& server);
  // Before Server::serve(), of a run that goes on from there.
  void begin(Server& server, const ServedPlace& from);
  // In ServerOptions::after_update. Returns the last update that is on the disk.
  std::int64_t updated(const ServedPlace& now);
  // No other checkpoint begins, and the server is not used any more: what has to happen before its end.
  void abandon();
  // After Server::serve(): saves what is there. The newest checkpoint; empty: there is none. Collective.
  std::string finish(const ServedPlace& own);

 private:
  class Place;
  bool saves() const { return checkpoints_ && every_ > 0; }
  // Whether each server saves when all are due.
  bool apart() const { return !together_ && servers_.size() > 1; }
  std::int64_t next_name() const { return every_ == 0 ? 0 : (named_ / every_ + 1) * every_; }
  void save(std::int64_t name, bool last);
  void take_turns();
  // The least of all servers': what is in every part of a checkpoint. Collective.
  ServedPlace least(const ServedPlace& own);
  at::Tensor largest(at::Tensor numbers);

  World servers_;
  bool together_;
  std::int64_t every_, steps_, workers_;
  std::filesystem::path folder_;
  const TrainOptions& options_;
  std::unique_ptr<Place> place_;
  std::unique_ptr<Checkpoints> checkpoints_;
  Server* server_ = nullptr;
  std::int64_t due_ = 0;                          // the name of the next checkpoint, where updates are each server's own
  std::int64_t named_ = 0;                        // the name of the last
  std::map<std::int64_t, std::int64_t> updates_;  // of each that was saved, by its name

  std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  std::int64_t wanted_ = 0, begun_ = 0;  // checkpoints that this server was due for, and turns that it took for them
  std::int64_t durable_ = 0;
  bool ended_ = false, abandoned_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

}  // namespace bonfire
