#include "bonfire/nn/save_scope.h"

#include <mutex>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

thread_local const SaveScope* innermost_scope = nullptr;

// Torch's engine, which is also who is asked for hooks on what is saved. There is no other way to give them from C++.
class EngineThatAsks final : public torch::autograd::Engine {
 public:
  // Torch starts the threads of GPUs once in a process, for the engine that runs first, and no other engine would have any.
  EngineThatAsks() {
    get_base_engine().initialize_device_threads_pool();
    start_device_threads();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return innermost_scope ? innermost_scope->listener().hooks() : nullptr;
  }
};

torch::autograd::Engine& engine_that_asks() {
  // Never destroyed, as its threads may outlive what is static.
  static auto* const engine = new EngineThatAsks();
  return *engine;
}

void install_engine() {
  using torch::autograd::Engine;
  static std::once_flag once;
  std::call_once(once, [] {
    require(torch::autograd::get_current_graph_task_id() == -1,
            "the first recomputation of a process is inside of a backward; allowed: in a forward");
    // Python has one of its own, and would not be asked any more.
    if (&Engine::get_default_engine() == &Engine::get_base_engine())
      torch::autograd::set_default_engine_stub(engine_that_asks);
  });
  require(&Engine::get_default_engine() == &engine_that_asks(),
          "recomputation needs autograd's engine, which somebody else has replaced in this process (Python's torch does)");
}

}  // namespace

SaveScope::SaveScope(SaveListener& listener) : listener_(listener), outer_(innermost_scope) {
  install_engine();
  innermost_scope = this;
}

SaveScope::~SaveScope() { innermost_scope = outer_; }

const SaveScope* SaveScope::innermost() { return innermost_scope; }

OutsideOfScope::OutsideOfScope(const SaveScope& scope) : before_(innermost_scope) { innermost_scope = scope.outer(); }

OutsideOfScope::~OutsideOfScope() { innermost_scope = before_; }

}  // namespace bonfire
