#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/dropout.h"
#include "bonfire/kernels/gradient_sink.h"

namespace bonfire {

// What a low-rank adapter adds to some columns of a product's result: scale * dropout(x) a^T b^T.
struct LowRank {
  at::Tensor a{};          // [rank, in]
  at::Tensor b{};          // [columns, rank]
  std::int64_t begin = 0;  // the first of these columns
  std::shared_ptr<GradientSink> a_sink{}, b_sink{};
  DropoutOptions dropout{};  // of what it reads
};

// y plus what each of them makes of x. Of x [..., in], which is kept for backward once, whatever their number; y
// [..., columns] is written in place, so it must be nobody else's, and what comes back stands for it.
BONFIRE_API at::Tensor add_low_rank(const at::Tensor& y, const at::Tensor& x, const std::vector<LowRank>& adapters,
                                    double scale);

}  // namespace bonfire
