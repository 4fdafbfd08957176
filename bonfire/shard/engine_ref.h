#pragma once

#include <memory>

#include "bonfire/base/api.h"

namespace bonfire {

class Engine;

// Stays with an engine where that is moved, and knows when it is gone.
class BONFIRE_API EngineRef {
 public:
  explicit EngineRef(Engine& engine);
  // Throws where the engine is gone.
  Engine& get() const;

 private:
  std::weak_ptr<void> state_;
};

}  // namespace bonfire
