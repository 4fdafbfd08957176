#pragma once

#include <memory>

#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace bonfire {

struct DropoutState;

// Hears of what autograd saves while a scope of it is open.
class SaveListener {
 public:
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
  // A forward inside of the scope depends on this.
  virtual void repeat_with(const std::shared_ptr<DropoutState>& /*state*/) {}
  virtual bool runs_again() const { return false; }

 protected:
  ~SaveListener() = default;
};

// For its lifetime, `listener` hears of what the calling thread's operations save for backward; one scope inside another
// hides the outer. Thread-local, because autograd asks without saying for whom.
class SaveScope {
 public:
  explicit SaveScope(SaveListener& listener);
  ~SaveScope();
  SaveScope(const SaveScope&) = delete;
  SaveScope& operator=(const SaveScope&) = delete;

  static const SaveScope* innermost();
  SaveListener& listener() const { return listener_; }
  const SaveScope* outer() const { return outer_; }

 private:
  SaveListener& listener_;
  const SaveScope* outer_;
};

// For its lifetime, only the scopes around `scope` are there.
class OutsideOfScope {
 public:
  explicit OutsideOfScope(const SaveScope& scope);
  ~OutsideOfScope();
  OutsideOfScope(const OutsideOfScope&) = delete;
  OutsideOfScope& operator=(const OutsideOfScope&) = delete;

 private:
  const SaveScope* before_;
};

}  // namespace bonfire
