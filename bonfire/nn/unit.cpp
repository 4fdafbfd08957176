#include "bonfire/nn/unit.h"

namespace bonfire {

UnitSeam::~UnitSeam() = default;

UnitSeam* unit_of(torch::nn::Module& module) { return dynamic_cast<UnitSeam*>(&module); }

}  // namespace bonfire
