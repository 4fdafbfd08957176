#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

#include "bonfire/pipeline/form.h"
#include "bonfire/pipeline/links.h"
#include "bonfire/pipeline/stage.h"

namespace bonfire {

// What a rank receives. A receive is posted when its shapes are known: at once but for microbatches of a new form. Values of
// such are announced by a message before the first of them; shapes of gradients are known when their forward has run. A
// message that comes after one whose shapes are not known waits for it, so that all are posted in the order of the table.
class Inbox {
 public:
  using Slot = std::pair<int, int>;  // stage and microbatch

  explicit Inbox(const Links& links) : links_(links) {}

  struct Expected {
    Stage& stage;
    int microbatch = 0;
    bool values = true;  // not gradients
    int from = 0;        // the pipeline rank that sends it
    std::int64_t samples = 1;
    Form form{};
    std::int64_t place = 0;  // where in the step it is
  };
  void expect(Expected expected);
  // What a neighbour stage of this rank has made.
  void put(const Slot& slot, bool values, Tensors tensors);
  // Waits until it has come. Nothing is done where it is not expected.
  void await(const Slot& slot, bool values);
  // REQUIRES: it was expected or put.
  Tensors take(const Slot& slot, bool values);
  // Posts what can be posted by now. Never waits.
  void progress();
  void clear();

 private:
  struct Parcel {
    Tensors tensors;
    Work arrival{};
  };
  struct Waiting {
    Expected expected;
    at::Tensor announcement{};        // that is to come first
    std::optional<Work> announced{};  // its receive, once that is posted
  };
  bool post_front(std::deque<Waiting>& queue, bool wait);
  void post(const Expected& expected, const Crossing& crossing);

  const Links& links_;
  std::map<std::pair<Slot, bool>, Parcel> parcels_;
  std::map<int, std::deque<Waiting>> waiting_;  // by sender; none where all is posted
};

}  // namespace bonfire
