#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/plan/layout.h"

namespace bonfire {

// Several parameters as one padded, contiguous buffer. The module's own tensors stay what they are to the user (names,
// shapes, identity): they become views of the buffer. Trained segments come first and have a gradient and, where the
// optimizer works in a higher precision than forward, a master copy.
class BONFIRE_API FlatParameter {
 public:
  // `parameters` in the order of the layout's segments. Their values move into the flat buffer, in `compute` dtype; masters
  // keep the parameters' own dtype where that is another.
  FlatParameter(plan::FlatLayout layout, std::vector<at::Tensor> parameters, at::ScalarType compute);
  // The same parameters laid out anew: master values and gradients come from where they were.
  FlatParameter(plan::FlatLayout layout, std::vector<at::Tensor> parameters, std::span<const FlatParameter* const> before);

  const plan::FlatLayout& layout() const { return layout_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  // What forward reads: 1-D, every segment.
  const at::Tensor& compute() const { return compute_; }
  // What the optimizer updates: 1-D, the trained part. The same memory as compute() where the dtypes agree.
  const at::Tensor& master() const { return master_; }
  // The trained part of compute() where it is a rounded copy of the master; otherwise undefined.
  at::Tensor low_precision() const;
  // 1-D, the trained part, in the master's dtype; padding is always zero.
  const at::Tensor& gradient() const { return gradient_; }

  // The part of `flat` (master or gradient) that belongs to a segment, in the parameter's shape.
  at::Tensor view(const at::Tensor& flat, std::size_t segment) const;
  std::size_t segment(const std::string& name) const;

  // Whether a segment's gradient holds something since it was last spent.
  bool written(std::size_t segment) const { return written_[segment]; }
  void set_written(std::size_t segment, bool written) { written_[segment] = written; }

  // Counts the changes of the values: noted at forward and compared at backward by whoever can.
  std::int64_t generation() const { return generation_; }
  void values_changed() { ++generation_; }

 private:
  void adopt(std::size_t segment, const at::Tensor& value);

  plan::FlatLayout layout_;
  std::vector<at::Tensor> parameters_;
  at::Tensor compute_, master_, gradient_;
  std::vector<char> written_;
  std::int64_t generation_ = 0;
};

}  // namespace bonfire
