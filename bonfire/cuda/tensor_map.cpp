#include "bonfire/cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include "bonfire/base/error.h"

namespace bonfire::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);
// The driver's, which the runtime finds: nothing of ours links the driver.
Encode encoder() {
  static const Encode found = [] {
    void* address = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const auto error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(address) : nullptr;
  }();
  return found;
}

}  // namespace

bool has_tensor_maps() { return encoder() != nullptr; }

CUtensorMap tensor_map(const Boxes& boxes) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(boxes.columns), static_cast<cuuint64_t>(boxes.rows)};
  const cuuint64_t strides[1] = {sizes[0] * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(boxes.box_rows)}, steps[2] = {1, 1};
  CUtensorMap map{};
  const CUresult result = encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(boxes.data), sizes, strides,
                                    box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(result == CUDA_SUCCESS, "the driver refuses to map a matrix of {} by {} for copies of tiles: error {}", boxes.rows,
          boxes.columns, static_cast<int>(result));
  return map;
}

}  // namespace bonfire::cuda
