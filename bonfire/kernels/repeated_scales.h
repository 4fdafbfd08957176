#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace bonfire {

// What products in fp8 went by in a forward that may run again: the second run rounds as the first did, and counts no
// magnitude twice.
class BONFIRE_API RepeatedScales {
 public:
  // One tensor that was scaled.
  struct Call {
    at::Tensor history;  // as it was before
    std::int64_t position = 0;
    bool measured = false;  // by its own magnitude
  };
  enum class Run { first, again };

  // For its lifetime, the calling thread is in this run of the forward. Scopes may be inside each other: what is scaled goes
  // by the innermost second run, and first runs inside of that note it.
  class BONFIRE_API Scope {
   public:
    Scope(RepeatedScales& scales, Run run);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend class RepeatedScales;
    RepeatedScales& scales_;
    Run run_;
    Scope* outer_;
  };

  // What the first run went by where the second one is now. Nothing where this is no second run.
  static std::optional<Call> repeated();
  // The same, without going on.
  static const Call* next_repeated();
  // Before the history changes.
  static void note(const Call& call);

 private:
  static Scope* second_run();

  std::vector<Call> calls_;
  std::size_t next_ = 0;
};

}  // namespace bonfire
