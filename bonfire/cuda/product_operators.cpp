// CUDA's side of the products that bonfire/kernels/product.cpp declares: one call of cuBLASLt each, which adds bias and
// residual or what the output holds already, and writes fp32 from narrower inputs.
#include <bit>
#include <optional>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "bonfire/base/error.h"

namespace bonfire::cuda {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;  // what cuBLAS asks for on Hopper

void check(cublasStatus_t status, const char* what) {
  require(status == CUBLAS_STATUS_SUCCESS, "{} failed: {}", what, cublasLtGetStatusString(status));
}

// cuBLASLt's descriptors, each with its own create and destroy.
template <class Handle, cublasStatus_t (*destroy)(Handle)>
class Descriptor {
 public:
  Descriptor() = default;
  ~Descriptor() {
    if (handle_) destroy(handle_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  Handle* out() { return &handle_; }
  operator Handle() const { return handle_; }  // NOLINT: as cuBLASLt takes it

 private:
  Handle handle_ = nullptr;
};
using Layout = Descriptor<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Operation = Descriptor<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Descriptor<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

cudaDataType_t data_type(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return CUDA_R_32F;
    case at::kDouble: return CUDA_R_64F;
    case at::kBFloat16: return CUDA_R_16BF;
    case at::kHalf: return CUDA_R_16F;
    default: fail("a product knows fp32, fp64, bf16 and fp16, not {}", c10::toString(x.scalar_type()));
  }
}

// A matrix whose rows, or else whose columns, lie at one distance and without gaps in them.
struct Operand {
  Tensor matrix;
  bool by_columns = false;
  std::int64_t stride = 0;
};

bool lies_by_rows(const Tensor& x) {
  return (x.stride(1) == 1 || x.size(1) == 1) && (x.stride(0) >= x.size(1) || x.size(0) == 1);
}

Operand operand(const Tensor& x) {
  if (lies_by_rows(x)) return {x, false, std::max(x.size(0) == 1 ? 1 : x.stride(0), x.size(1))};
  if (lies_by_rows(x.t())) return {x, true, std::max(x.size(1) == 1 ? 1 : x.stride(1), x.size(0))};
  return {x.contiguous(), false, x.size(1)};
}

// cuBLASLt counts by columns: a matrix by rows is its own transpose there.
void describe(Layout& layout, const Operand& x) {
  const std::int64_t rows = x.by_columns ? x.matrix.size(0) : x.matrix.size(1);
  const std::int64_t columns = x.by_columns ? x.matrix.size(1) : x.matrix.size(0);
  check(cublasLtMatrixLayoutCreate(layout.out(), data_type(x.matrix), static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(columns), x.stride),
        "cublasLtMatrixLayoutCreate");
}

template <class T>
void set(const Operation& operation, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
}
template <class T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
        "cublasLtMatmulPreferenceSetAttribute");
}

std::uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer) | 256;
  return std::uint32_t{1} << std::countr_zero(address);
}

struct Addends {
  Tensor bias;    // [columns], of the output's type
  Tensor matrix;  // of the output's shape and type, by rows; may be the output
};

// out = a b + addends; `out` lies by rows. False where cuBLASLt has no way to do it: nothing was written then.
bool multiply(const Tensor& out, const Tensor& left, const Tensor& right, const Addends& addends) {
  const Operand a = operand(left), b = operand(right), d = operand(out);
  const Operand c = addends.matrix.defined() ? operand(addends.matrix) : d;
  if (d.by_columns || c.by_columns) return false;

  const bool wide = out.scalar_type() == at::kDouble;
  const bool tf32 = a.matrix.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS();
  Operation operation;
  check(cublasLtMatmulDescCreate(operation.out(),
                                 wide   ? CUBLAS_COMPUTE_64F
                                 : tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                        : CUBLAS_COMPUTE_32F,
                                 wide ? CUDA_R_64F : CUDA_R_32F),
        "cublasLtMatmulDescCreate");
  // Of the transposes: the right matrix comes first.
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, b.by_columns ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, a.by_columns ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (addends.bias.defined()) {
    set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, addends.bias.const_data_ptr());
    set(operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(addends.bias));
  }
  Layout layout_a, layout_b, layout_c, layout_d;
  describe(layout_a, a);
  describe(layout_b, b);
  describe(layout_c, c);
  describe(layout_d, d);

  Preference preference;
  check(cublasLtMatmulPreferenceCreate(preference.out()), "cublasLtMatmulPreferenceCreate");
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
  // Parts of a long sum are added before they are rounded.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(b.matrix.const_data_ptr()));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(a.matrix.const_data_ptr()));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(c.matrix.const_data_ptr()));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(d.matrix.const_data_ptr()));

  const auto handle = at::cuda::getCurrentCUDABlasLtHandle();
  // The first choice of its own estimate, which is a function of the shapes: timing would choose anew in every run.
  cublasLtMatmulHeuristicResult_t choice{};
  int found = 0;
  const auto status = cublasLtMatmulAlgoGetHeuristic(handle, operation, layout_b, layout_a, layout_c, layout_d, preference,
                                                     1, &choice, &found);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0) return false;
  const Tensor workspace = at::empty({static_cast<std::int64_t>(choice.workspaceSize)}, out.options().dtype(at::kByte));
  const double one64 = 1, beta64 = addends.matrix.defined() ? 1 : 0;
  const float one32 = 1, beta32 = addends.matrix.defined() ? 1 : 0;
  check(cublasLtMatmul(handle, operation, wide ? static_cast<const void*>(&one64) : &one32, b.matrix.const_data_ptr(),
                       layout_b, a.matrix.const_data_ptr(), layout_a, wide ? static_cast<const void*>(&beta64) : &beta32,
                       c.matrix.const_data_ptr(), layout_c, out.data_ptr(), layout_d, &choice.algo, workspace.data_ptr(),
                       choice.workspaceSize, c10::cuda::getCurrentCUDAStream()),
        "cublasLtMatmul");
  return true;
}

bool empty(const Tensor& out, const Tensor& a) { return out.numel() == 0 || a.size(1) == 0; }

Tensor product_cuda(const Tensor& a, const Tensor& b, const OptionalTensor& bias, const OptionalTensor& residual) {
  const c10::cuda::CUDAGuard guard(a.device());
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  const auto fits = [&](const OptionalTensor& x) { return !x || x->scalar_type() == out.scalar_type(); };
  if (!empty(out, a) && fits(bias) && fits(residual) && a.scalar_type() == b.scalar_type() &&
      multiply(out, a, b,
               {.bias = bias ? bias->contiguous() : Tensor(), .matrix = residual ? residual->contiguous() : Tensor()}))
    return out;
  if (!residual) return bias ? at::addmm(*bias, a, b) : at::mm(a, b);
  const Tensor sum = at::addmm(*residual, a, b);
  return bias ? sum.add(*bias) : sum;
}

void product_into_cuda(Tensor out, const Tensor& a, const Tensor& b, bool accumulate) {
  const c10::cuda::CUDAGuard guard(out.device());
  const bool known = a.scalar_type() == b.scalar_type() &&
                     (out.scalar_type() == a.scalar_type() || (out.scalar_type() == at::kFloat && a.element_size() == 2));
  if (known && !empty(out, a) && multiply(out, a, b, {.bias = {}, .matrix = accumulate ? out : Tensor()})) return;
  if (accumulate)
    out.add_(at::mm(a, b));
  else
    out.copy_(at::mm(a, b));
}

TORCH_LIBRARY_IMPL(bonfire, CUDA, m) {
  m.impl("product", product_cuda);
  m.impl("product_into_", product_into_cuda);
}

}  // namespace
}  // namespace bonfire::cuda
