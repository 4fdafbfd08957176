#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/clock.h"
#include "bonfire/base/collective.h"

namespace bonfire {

// A collective that was performed: what the plan predicts of it, and when and where it ran.
struct Record {
  Collective what;
  std::string group;
  std::int64_t sequence = 0;  // within its group
  Nanoseconds start = 0;      // issued (CPU), or begun on the stream (GPU)
  Nanoseconds end = 0;        // 0 while it is under way
  std::string stream;         // where it ran: "gloo", "nccl replicate", ...
};

// Lists every collective of a rank, in the order in which they were issued. Off until asked for; a collective then only asks
// whether it is on. While on, each takes a lock and stays in the list until clear(). Safe to use from any thread.
class BONFIRE_API Recorder {
 public:
  Recorder();
  ~Recorder();

  void start();
  void stop();
  bool recording() const;
  void clear();

  // Those that began since start() or clear(), in order of issue.
  std::vector<Record> records() const;
  // Only what the plan speaks of.
  std::vector<Collective> collectives() const;

  // For Group: notes that something began, and gives the ticket that ends it.
  std::int64_t begin(Record record);
  void end(std::int64_t ticket, Nanoseconds start, Nanoseconds end);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace bonfire
