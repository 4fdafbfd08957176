#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace torch::nn {
class Module;
}

namespace bonfire {

class UnitSeam;

// Which Units gather and free their parameters by themselves. What remains belongs to the Unit around it, at last to the
// root.
struct Wrapping {
  std::vector<std::string> types{};  // as users write them, without namespace and Impl: "Block"; empty: every Unit
  std::int64_t min_parameters = 0;   // a Unit with fewer of its own joins the one around it
  // Instead of both: whether the Unit at this path does.
  std::function<bool(const std::string& path, torch::nn::Module& module)> predicate{};
  bool all_in_one = false;  // instead of all three: only the root does
  // By path: stay the user's own; not sharded, not reduced, not touched.
  std::vector<std::string> ignored_modules{}, ignored_parameters{};
  std::function<bool(const std::string& path)> ignored{};  // more of them: asked for every module and every parameter
};

// Parameters of one module that stay together in one flat buffer.
struct ModuleGroup {
  // Another place where a member is used: the same tensor under another name, or another tensor over the same memory.
  struct Tied {
    std::string name;
    at::Tensor parameter;
  };
  struct Member {
    std::string name;
    at::Tensor parameter;
    std::vector<Tied> tied{};
  };
  std::string name;  // the path of the Unit, where it was met first; the root's is empty
  std::vector<Member> members;
  UnitSeam* unit = nullptr;  // nullptr: of a root that is not marked, or of a module without Units
};

// The floating-point parameters of `module` that have elements, grouped by the Unit they belong to, in the order in which
// the Units are met; dtypes are mixed, and no group is empty. A parameter that is used in several Units belongs to the
// innermost one that contains all its uses, so that it is there whenever one of them runs. Without Units, each parameter is
// a group of its own. Throws ConfigError for a wrapping that cannot be, and for parameters that share a part of their
// memory.
BONFIRE_API std::vector<ModuleGroup> groups_of(torch::nn::Module& module, const Wrapping& wrapping = {});

// The buffers of `module` that no ignored module holds, each once, under the first of its names.
struct ModuleBuffer {
  std::string name;
  at::Tensor tensor;
};
BONFIRE_API std::vector<ModuleBuffer> buffers_of(torch::nn::Module& module, const Wrapping& wrapping = {});

// Throws ConfigError unless `module` is a Unit: nothing else tells when the root's parameters are needed.
BONFIRE_API void require_marked_root(torch::nn::Module& module);

}  // namespace bonfire
