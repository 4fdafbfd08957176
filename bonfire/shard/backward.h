#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "bonfire/shard/parameter_layout.h"

namespace bonfire {

// What kind of a backward it is: what becomes of its gradients.
struct BackwardKind {
  bool reduces = true;      // these are the last gradients before a reduction, which begins with whatever is complete
  bool last = true;         // and that is the last one of the step
  bool in_company = false;  // others reduce over the same ranks at the same time
};

// One backward: which gradients are missing, which flat parameter is to be reduced next, and the order in which groups were
// complete. Knows nothing of how gradients are kept or sent.
class Backward {
 public:
  // Every trained parameter is missing.
  void begin(const ParameterLayout& layout, const BackwardKind& how);
  // Gradients come no more; what is not complete stays so.
  void end() { running_ = false; }

  bool running() const { return running_; }
  const BackwardKind& how() const { return how_; }

  // A use of a parameter has got its gradient; each of the tensors that share it has one. Returns whether its flat parameter
  // is complete now.
  bool arrived(std::size_t parameter, const LaidParameter& at);
  // No gradient of a flat parameter, or of any, will come any more: what has not come counts as nothing.
  void complete(std::size_t flat) { missing_[flat] = 0; }
  void complete_all() { missing_.assign(missing_.size(), 0); }
  // The same where its Unit's backward has ended: the group is finished at this place. Returns whether anything was missing.
  bool finish(std::size_t flat, std::size_t group);
  // Flat parameters are reduced in one order on all ranks, whatever the order in which they get complete here: the next one,
  // where that is complete.
  std::optional<std::size_t> take_ready();
  std::size_t next() const { return next_; }  // the first that was not taken
  bool all_taken() const { return next_ == missing_.size(); }

  const std::vector<std::size_t>& finished_groups() const { return finished_groups_; }  // in order of arrival

 private:
  bool running_ = false;
  BackwardKind how_{.reduces = false, .last = false};
  std::vector<std::size_t> arrived_;           // per parameter: how many of its tensors
  std::vector<std::size_t> missing_;           // per flat: trained parameters whose gradient has not come yet
  std::vector<std::size_t> missing_in_group_;  // per group
  std::vector<std::size_t> finished_groups_;
  std::size_t next_ = 0;
};

}  // namespace bonfire
