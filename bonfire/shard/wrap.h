#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace bonfire {

// Parameters of one module that stay together in one flat buffer.
struct ModuleGroup {
  struct Member {
    std::string name;
    at::Tensor parameter;
  };
  std::string name;
  std::vector<Member> members;
};

// The floating-point parameters of `module`, grouped by the Unit they belong to (the nearest one above them) and by dtype,
// in the order in which the groups are first met; without Units, each parameter is a group of its own. A parameter that is
// registered twice appears where it was met first.
std::vector<ModuleGroup> groups_of(const torch::nn::Module& module);

}  // namespace bonfire
