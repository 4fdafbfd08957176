#include "tests/random/own_options.h"

#include "bonfire/base/random.h"

namespace bonfire::cases {

std::function<UnitOptions(const std::string& path, torch::nn::Module& module)> own_options(std::uint64_t seed) {
  return [seed](const std::string& path, torch::nn::Module&) {
    const auto random = Random(seed).fork("own options").fork(path);
    UnitOptions own;
    if (random.below(0, 3) == 0) own.parameters = at::kDouble;
    if (random.below(1, 2) == 0) own.reshard_after_forward = random.below(2, 2) == 0;
    return own;
  };
}

}  // namespace bonfire::cases
