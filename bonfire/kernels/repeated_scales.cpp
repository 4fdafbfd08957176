#include "bonfire/kernels/repeated_scales.h"

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

thread_local RepeatedScales::Scope* innermost_run = nullptr;

}  // namespace

RepeatedScales::Scope::Scope(RepeatedScales& scales, Run run) : scales_(scales), run_(run), outer_(innermost_run) {
  innermost_run = this;
  if (run == Run::again) scales.next_ = 0;
}

RepeatedScales::Scope::~Scope() { innermost_run = outer_; }

RepeatedScales::Scope* RepeatedScales::second_run() {
  auto* scope = innermost_run;
  while (scope && scope->run_ == Run::first) scope = scope->outer_;
  return scope;
}

const RepeatedScales::Call* RepeatedScales::next_repeated() {
  const auto* const scope = second_run();
  if (!scope) return nullptr;
  const auto& scales = scope->scales_;
  require(scales.next_ < scales.calls_.size(), "a forward that runs again makes more products in fp8 than before: {}",
          scales.calls_.size());
  return &scales.calls_[scales.next_];
}

std::optional<RepeatedScales::Call> RepeatedScales::repeated() {
  const Call* const call = next_repeated();
  if (!call) return std::nullopt;
  ++second_run()->scales_.next_;
  return *call;
}

void RepeatedScales::note(const Call& call) {
  std::optional<Call> copy;
  for (auto* scope = innermost_run; scope && scope->run_ == Run::first; scope = scope->outer_) {
    if (!copy) copy = Call{call.history.clone(), call.position, call.measured};
    scope->scales_.calls_.push_back(*copy);
  }
}

}  // namespace bonfire
