#include "bonfire/shard/memory_check.h"

#include "bonfire/base/error.h"

namespace bonfire {

void MemoryCheck::check(const UnitSeam& unit, const std::vector<at::Tensor>& tensors) const {
  for (const auto& tensor : tensors)
    for (const auto& flat : layout_.flats()) {
      if (flat->present()) continue;
      const auto name = flat->parameter_in(tensor);
      require(
          name.empty(),
          "a tensor that goes into Unit '{}' or comes out of it lies in parameter '{}', whose memory is freed: it may be "
          "read only while its Unit runs, or inside Engine::full_parameters",
          units_.name_of(unit), name);
    }
}

}  // namespace bonfire
