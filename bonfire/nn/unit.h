#pragma once

#include "bonfire/base/api.h"

namespace bonfire {

// What every module marked as a Unit also is: found with a dynamic_cast from a torch::nn::Module.
class BONFIRE_API UnitSeam {
 public:
  virtual ~UnitSeam() = default;
};

}  // namespace bonfire
