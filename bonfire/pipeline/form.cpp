#include "bonfire/pipeline/form.h"

#include "bonfire/base/error.h"

namespace bonfire {

Form form_of(const Microbatch& microbatch) {
  require(!microbatch.input.empty() && microbatch.input.front().dim() > 0,
          "a microbatch without an input whose first dimension counts samples");
  const auto samples = microbatch.samples();
  Form form;
  for (const auto& tensor : microbatch.input) {
    form.push_back(static_cast<std::int64_t>(tensor.scalar_type()));
    form.push_back(tensor.dim());
    if (tensor.dim() == 0) continue;
    // Rows that do not go with the samples are what they are.
    const bool counts_samples = samples > 0 && tensor.size(0) % samples == 0;
    form.push_back(counts_samples ? tensor.size(0) / samples : -tensor.size(0));
    form.insert(form.end(), tensor.sizes().begin() + 1, tensor.sizes().end());
  }
  return form;
}

}  // namespace bonfire
