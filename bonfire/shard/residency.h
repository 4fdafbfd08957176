#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "bonfire/base/log.h"
#include "bonfire/comm/group.h"
#include "bonfire/comm/side_stream.h"
#include "bonfire/shard/buffer_pool.h"
#include "bonfire/shard/course.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/gate.h"
#include "bonfire/shard/hooked_units.h"
#include "bonfire/shard/host_clock.h"

namespace bonfire {

struct ResidencyOptions {
  Group gathers{};
  Group meetings{};             // the same ranks, over another communicator
  std::optional<Group> kept{};  // among whom a Unit is gathered again in backward, where that is a smaller group
  int prefetch = 2;
  bool prefetch_before_reduction = true;
  bool negotiate = false;
  std::int64_t first_place = 0;  // in the pool
  // Evaluations end with the outermost Unit; otherwise whoever runs the Units says when.
  bool ends_evaluations = true;
  Log log{};
  std::function<void(bool differentiates)> before_pass{};
  // The backward of every use of a Unit has ended: what has not come of its gradients will not come.
  std::function<void(const FlatParameter& flat)> backward_ended{};
};

// Which Units' memory is in, and when: brings it in before a Unit runs, forward or backward, ahead of time where the order
// is known, and lets it go afterwards. What a Unit's backward needs is known from gates around its forward, not from
// gradients of parameters.
//
// All ranks issue the same gathers in the same order. In a pass without a course they agree on every gather before it
// begins; from then on they follow the course, each as fast as it gets there. A rank that runs Units in another order issues
// what lies before the one it needs as well, and keeps it for its turn; one that leaves out some takes part in the gathers
// of the others. A rank that needs a Unit more often than the course has it ends the course, and agrees with the others
// again: all of them must need more then, or nobody answers.
class Residency final : public EngineHook, public std::enable_shared_from_this<Residency> {
 public:
  struct Home {
    UnitSeam* unit = nullptr;
    FlatParameter* flat = nullptr;  // null: the Unit has no parameters of its own
    std::string name{};
    bool free_after_forward = true;
  };

  Residency(BufferPool& pool, HostClock& host, ResidencyOptions options)
      : pool_(pool), host_(host), options_(std::move(options)), from_host_(pool.device()) {}

  // The Units, after they were laid out (anew). REQUIRES: no pass is under way.
  void set_units(const std::vector<Home>& homes);

  void before_forward(UnitSeam& seam, std::vector<at::Tensor>& inputs) override;
  void after_forward(UnitSeam& seam, std::vector<at::Tensor>& outputs) override;
  void forward_failed(UnitSeam& seam) override;

  // A pass begins with the first forward or backward that needs something, or here.
  void begin_pass(bool differentiates);
  bool pass_under_way() const { return pass_ != Pass::none; }
  // A backward begins, after whose end other backwards through the same forwards may come.
  void begin_backward(bool retain_graph);
  // The backward that ran has ended, but the pass has not: others will come.
  void end_backward();
  // So has a forward, or a backward, of several in the pass: takes part in what other ranks gather in it, because what this
  // one does next may wait for them elsewhere. Collective among ranks that do the same computations.
  void end_computation();
  // Whether a backward through a Unit with these parameters can still come.
  bool expects_backward(const FlatParameter& flat) const;
  // This rank has no more use for these parameters in this pass. Others may have, and need its part of their gathers before
  // they can reduce what this rank is about to.
  void leave_out(const FlatParameter& flat);
  // Backward has ended, or a rank has nothing to run: takes part in what other ranks still gather in this pass.
  void end_pass();
  // All ranks come to the same place outside of their passes: takes part in what others gather on their way there. Returns
  // whether a pass is under way, so that they may hold different Units. Collective.
  bool meet();
  // The parameters are about to change: what was gathered of them goes, and so does a pass that is under way, because nobody
  // differentiates its forwards. Collective.
  void before_update();
  // Something threw: the pass is over on this rank.
  void abandon_pass();
  // Ranks were seen to run different Units at the same time: those that are ahead must not wait for the others.
  bool ranks_differ() const { return differ_; }
  // Whether gathers need no agreement.
  bool follows_course() const { return following(); }
  // The Units will be used in another way from now on: the next pass agrees on a course anew.
  void forget_courses();

 private:
  struct Unit {
    Home home;
    int active = 0;       // runs, forward or backward, that have begun and not ended
    int outstanding = 0;  // forwards whose backward has not ended
    std::ptrdiff_t entry = -1;
    int uses_left = 0;  // of those that the course's gathers so far are for
  };
  // One forward of a Unit and its backward.
  struct Use {
    std::size_t unit;
    std::int64_t generation = 0;
    bool running_backward = false;
    bool over = false;               // its graph is gone
    std::vector<Replaced> inputs{};  // while its forward runs
  };
  enum class Pass { none, training, evaluation };

  std::size_t index_of(const UnitSeam& seam) const { return index_.at(&seam); }
  static bool differentiates();
  void require_same_values(std::size_t unit) const;
  bool following() const { return course_ && !negotiating_; }
  void before(std::size_t unit, std::vector<at::Tensor>& inputs, const std::shared_ptr<Use>& use);
  void after(std::size_t unit, std::vector<at::Tensor>& outputs, const std::shared_ptr<Use>& use);
  bool gate_outputs(std::vector<at::Tensor>& outputs, const std::shared_ptr<Use>& use);
  void end_forward_early();
  void enter(const Use& use, bool look_ahead);
  void leave(std::size_t unit, bool forward);
  void enter_backward(const std::shared_ptr<Use>& use);
  void leave_backward(Use& use);
  void release(std::size_t unit, bool backward_comes);
  void let_go(std::size_t unit);
  void look_ahead();
  void issue_next();
  void pass_by_next();
  void catch_up(std::size_t end);
  void need(std::size_t unit, int behind);
  void warn_of_order(std::size_t needed, std::size_t turn);
  void negotiate(std::ptrdiff_t wanted);
  std::vector<std::int64_t> everyones(std::int64_t mine) const;
  void learn_course();
  void spare(std::size_t unit);
  bool gather_comes_from_kept(std::size_t unit) const;
  void clear_pass();

  BufferPool& pool_;
  HostClock& host_;
  ResidencyOptions options_;
  SideStream from_host_;  // copies of what is offloaded, beside the Units that run
  std::vector<Unit> units_;
  bool gathers_ = false;  // whether any Unit has memory that comes and goes
  std::unordered_map<const UnitSeam*, std::size_t> index_;
  std::optional<Course> courses_[3];  // by kind of pass

  // Of the pass that is under way.
  Pass pass_ = Pass::none;
  const Course* course_ = nullptr;
  bool negotiating_ = false, disagreed_ = false, differ_ = false, retain_graph_ = false;
  std::ptrdiff_t current_ = -1;   // the last entry whose use has begun
  std::size_t next_ = 0;          // the first entry that was not issued
  std::size_t computations_ = 0;  // that have ended
  CourseNotes notes_;
  int depth_ = 0;
  std::vector<std::shared_ptr<Use>> forwards_;  // that have begun and not ended
  std::vector<std::shared_ptr<Use>> uses_;      // that may have a backward
  std::deque<std::size_t> spares_;              // gathered because others needed them, not used yet

  bool warned_of_more_ = false, warned_of_disagreement_ = false, warned_of_order_ = false;
  std::vector<std::vector<std::weak_ptr<Use>>> graphs_;  // by Unit: uses whose backward may come, in this pass or later
};

}  // namespace bonfire
