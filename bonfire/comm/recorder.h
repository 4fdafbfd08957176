#pragma once

#include <cstdint>
#include <functional>
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

// A collective that was issued while work was captured, and has not run. Called whenever that work is begun again, it notes
// that the collective is under way, as if it had been issued; `ended` tells whether the work has ended.
using CapturedCollective = std::function<void(const std::function<bool()>& ended)>;

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

  // Between the two, collectives are not performed but captured: end_capture returns them, in order of issue. Times of
  // collectives that are done again are not known one by one: each is noted to begin and end when the work is begun.
  void begin_capture();
  std::vector<CapturedCollective> end_capture();
  bool capturing() const;
  // For Group, while capturing.
  void add_captured(CapturedCollective collective);

  // For Group: notes that something began, and gives the ticket that ends it.
  std::int64_t begin(Record record);
  void end(std::int64_t ticket, Nanoseconds start, Nanoseconds end);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace bonfire
