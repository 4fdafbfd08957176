#include "bonfire/cuda/matmul.h"

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <mutex>
#include <vector>

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "bonfire/base/error.h"
#include "bonfire/cuda/checksum.h"
#include "bonfire/cuda/gpu.h"
#include "bonfire/cuda/trial_operand.h"

namespace bonfire::cuda {
namespace {

using at::Tensor;

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;  // what cuBLAS asks for on Hopper
constexpr int kMostWays = 8;                                    // more than it offers for one product
constexpr int kRounds = 9;                                      // long enough for the clock to be what it is under load
constexpr double kWorthTrying = 2e9;                            // operations: some microseconds

void check(cublasStatus_t status, const char* what) {
  require(status == CUBLAS_STATUS_SUCCESS, "{} failed: {}", what, cublasLtGetStatusString(status));
}

// What is made and destroyed by functions of its own.
template <class Handle, auto destroy>
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
using Event = Descriptor<cudaEvent_t, cudaEventDestroy>;

cudaDataType_t data_type(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return CUDA_R_32F;
    case at::kDouble: return CUDA_R_64F;
    case at::kBFloat16: return CUDA_R_16BF;
    case at::kHalf: return CUDA_R_16F;
    case at::kFloat8_e4m3fn: return CUDA_R_8F_E4M3;
    case at::kFloat8_e5m2: return CUDA_R_8F_E5M2;
    default: fail("a product knows fp32, fp64, bf16, fp16 and fp8, not {}", c10::toString(x.scalar_type()));
  }
}

TrialElement trial_element(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kDouble: return TrialElement::f64;
    case at::kBFloat16: return TrialElement::bf16;
    case at::kHalf: return TrialElement::f16;
    case at::kFloat8_e4m3fn: return TrialElement::e4m3;
    case at::kFloat8_e5m2: return TrialElement::e5m2;
    default: return TrialElement::f32;
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

std::int64_t alignment(const Operand& x) {
  const auto address = reinterpret_cast<std::uintptr_t>(x.matrix.const_data_ptr()) | 256;
  return std::int64_t{1} << std::countr_zero(address);
}

// From the first of its elements to the last.
std::int64_t elements_spanned(const Operand& x) {
  const std::int64_t lines = x.matrix.size(x.by_columns ? 1 : 0), each = x.matrix.size(x.by_columns ? 0 : 1);
  return (lines - 1) * x.stride + each;
}

// What stands in for an operand while ways are tried, where that is needed.
class TrialOperand {
 public:
  TrialOperand(const Operand& x, cudaStream_t stream) : data_(x.matrix.const_data_ptr()) {
    const std::int64_t elements = elements_spanned(x), bytes = elements * static_cast<std::int64_t>(x.matrix.element_size());
    const auto address = reinterpret_cast<std::uintptr_t>(data_), first = (address + 3) / 4 * 4;
    const std::int64_t words = (static_cast<std::int64_t>(address - first) + bytes) / 4;
    const Tensor repeats = at::zeros({1}, x.matrix.options().dtype(at::kLong));
    launch_count_repeats(reinterpret_cast<const std::uint32_t*>(first), words,
                         reinterpret_cast<std::uint64_t*>(repeats.data_ptr<std::int64_t>()), stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (10 * repeats.item<std::int64_t>() < words) return;
    try {
      memory_ = at::empty({bytes + 256}, x.matrix.options().dtype(at::kByte));
    } catch (const c10::OutOfMemoryError&) {
      return;  // a choice that may be slower is better than none
    }
    void* const to = static_cast<char*>(memory_.data_ptr()) + address % 256;  // as aligned as the operand
    launch_random_elements(to, elements, trial_element(x.matrix), stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    data_ = to;
  }
  const void* data() const { return data_; }

 private:
  const void* data_;
  Tensor memory_;
};

struct Way {
  cublasLtMatmulAlgo_t algorithm{};
  std::size_t workspace = 0;
};

// All that a choice depends on.
using Key = std::array<std::int64_t, 24>;

// Operators of the dispatcher carry nothing from call to call, so what was found out is the plug-in's.
class Found {
 public:
  const Way* of(const Key& key) {
    const std::lock_guard guard(mutex_);
    const auto place = ways_.find(key);
    return place == ways_.end() ? nullptr : &place->second;
  }
  void add(const Key& key, const Way& way) {
    const std::lock_guard guard(mutex_);
    ways_.emplace(key, way);
  }

 private:
  std::mutex mutex_;
  std::map<Key, Way> ways_;  // whose elements stay where they are
};
Found& found() {
  static Found all;
  return all;
}

class Call {
 public:
  explicit Call(const Matmul& product)
      : product_(product),
        a_(operand(product.a)),
        b_(operand(product.b)),
        d_(operand(product.out)),
        c_(product.addend.defined() ? operand(product.addend) : d_),
        wide_(product.out.scalar_type() == at::kDouble),
        stream_(c10::cuda::getCurrentCUDAStream()) {}

  bool run() {
    if (d_.by_columns || c_.by_columns) return false;
    describe_operation();
    const Key key = this->key();
    if (const Way* known = found().of(key)) {
      check(multiply(*known), "cublasLtMatmul");
      return true;
    }
    const auto ways = offered();
    if (ways.empty()) return false;
    if (!can_try() || ways.size() == 1) {
      // In place there is nothing to try on: another call may still find the fastest.
      if (!in_place()) found().add(key, ways[0]);
      check(multiply(ways[0]), "cublasLtMatmul");
      return true;
    }
    const Way way = fastest(ways);
    found().add(key, way);
    check(multiply(way), "cublasLtMatmul");
    return true;
  }

 private:
  bool in_place() const {
    return product_.addend.defined() && product_.addend.const_data_ptr() == product_.out.const_data_ptr();
  }

  bool can_try() const {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(stream_, &capture));
    const double operations = 2.0 * static_cast<double>(product_.out.numel()) * static_cast<double>(product_.a.size(1));
    return !in_place() && capture == cudaStreamCaptureStatusNone && operations >= kWorthTrying &&
           product_.out.is_contiguous() && product_.out.numel() * product_.out.element_size() % 4 == 0;
  }

  bool tf32() const { return a_.matrix.scalar_type() == at::kFloat && at::globalContext().allowTF32CuBLAS(); }
  bool scaled_by_row() const { return product_.scale_a.defined() && product_.scale_a.numel() > 1; }

  void describe_operation() {
    check(cublasLtMatmulDescCreate(operation_.out(),
                                   wide_    ? CUBLAS_COMPUTE_64F
                                   : tf32() ? CUBLAS_COMPUTE_32F_FAST_TF32
                                            : CUBLAS_COMPUTE_32F,
                                   wide_ ? CUDA_R_64F : CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    // Its kernels divide their work among as many multiprocessors as they think they have.
    if (remaining_ > 0) set(operation_, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, std::int32_t{remaining_});
    // Of the transposes: the right matrix comes first.
    set(operation_, CUBLASLT_MATMUL_DESC_TRANSA, b_.by_columns ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(operation_, CUBLASLT_MATMUL_DESC_TRANSB, a_.by_columns ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (product_.bias.defined()) {
      set(operation_, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, product_.bias.const_data_ptr());
      set(operation_, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(product_.bias));
    }
    if (product_.scale_a.defined()) {
      set(operation_, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, product_.scale_b.const_data_ptr());
      set(operation_, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, product_.scale_a.const_data_ptr());
      set(operation_, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<std::int8_t>(product_.short_sums));
      if (scaled_by_row()) {
        set(operation_, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, std::int32_t{CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F});
        set(operation_, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, std::int32_t{CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F});
      }
    }
    describe(layout_a_, a_);
    describe(layout_b_, b_);
    describe(layout_c_, c_);
    describe(layout_d_, d_);
  }

  Key key() const {
    return {product_.out.size(0),
            product_.out.size(1),
            product_.a.size(1),
            a_.by_columns,
            b_.by_columns,
            a_.stride,
            b_.stride,
            c_.stride,
            d_.stride,
            alignment(a_),
            alignment(b_),
            alignment(c_),
            alignment(d_),
            data_type(product_.a),
            data_type(product_.b),
            data_type(product_.out),
            product_.bias.defined(),
            product_.scale_a.defined(),
            scaled_by_row(),
            product_.short_sums,
            tf32(),
            remaining_,
            product_.out.device().index()};
  }

  // Best first, by cuBLASLt's own estimate, which is a function of the shapes.
  std::vector<Way> offered() const {
    Preference preference;
    check(cublasLtMatmulPreferenceCreate(preference.out()), "cublasLtMatmulPreferenceCreate");
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    // Parts of a long sum are added before they are rounded.
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<std::uint32_t>(alignment(b_)));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<std::uint32_t>(alignment(a_)));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<std::uint32_t>(alignment(c_)));
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<std::uint32_t>(alignment(d_)));
    std::array<cublasLtMatmulHeuristicResult_t, kMostWays> results{};
    int count = 0;
    const auto status =
        cublasLtMatmulAlgoGetHeuristic(at::cuda::getCurrentCUDABlasLtHandle(), operation_, layout_b_, layout_a_, layout_c_,
                                       layout_d_, preference, kMostWays, results.data(), &count);
    std::vector<Way> ways;
    if (status != CUBLAS_STATUS_SUCCESS) return ways;
    for (int i = 0; i < count; ++i) ways.push_back({results[i].algo, results[i].workspaceSize});
    return ways;
  }

  cublasStatus_t multiply(const Way& way) const {
    return multiply(way, a_.matrix.const_data_ptr(), b_.matrix.const_data_ptr());
  }

  cublasStatus_t multiply(const Way& way, const void* a, const void* b) const {
    const Tensor workspace = at::empty({static_cast<std::int64_t>(way.workspace)}, product_.out.options().dtype(at::kByte));
    const double one64 = 1, beta64 = product_.addend.defined() ? 1 : 0;
    const float one32 = 1, beta32 = product_.addend.defined() ? 1 : 0;
    return cublasLtMatmul(at::cuda::getCurrentCUDABlasLtHandle(), operation_,
                          wide_ ? static_cast<const void*>(&one64) : &one32, b, layout_b_, a, layout_a_,
                          wide_ ? static_cast<const void*>(&beta64) : &beta32, c_.matrix.const_data_ptr(), layout_c_,
                          product_.out.data_ptr(), layout_d_, &way.algorithm, workspace.data_ptr(), way.workspace, stream_);
  }

  // Those that work and give the bits of the first.
  std::vector<Way> equal_ways(const std::vector<Way>& ways, const TrialOperand& a, const TrialOperand& b) const {
    const auto bytes = product_.out.numel() * product_.out.element_size();
    const Tensor sums = at::zeros({static_cast<std::int64_t>(ways.size())}, product_.out.options().dtype(at::kLong));
    std::vector<bool> worked(ways.size());
    for (std::size_t i = 0; i < ways.size(); ++i) {
      worked[i] = multiply(ways[i], a.data(), b.data()) == CUBLAS_STATUS_SUCCESS;
      launch_checksum(static_cast<const std::uint32_t*>(product_.out.const_data_ptr()), bytes / 4,
                      reinterpret_cast<std::uint64_t*>(sums.data_ptr<std::int64_t>()) + i, stream_);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
    check(worked[0] ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED, "cublasLtMatmul");
    const Tensor read = sums.cpu();
    const auto* sum = read.const_data_ptr<std::int64_t>();
    std::vector<Way> equal;
    for (std::size_t i = 0; i < ways.size(); ++i)
      if (worked[i] && sum[i] == sum[0]) equal.push_back(ways[i]);
    return equal;
  }

  // Leaves anything in the output. What is tried on differs from element to element: on an operand of zeros, as new adapters
  // and heads have it, all ways would give equal bits, and none would draw the power that slows it down on other numbers.
  Way fastest(const std::vector<Way>& all) const {
    const TrialOperand a(a_, stream_), b(b_, stream_);
    const auto ways = equal_ways(all, a, b);
    std::vector<Event> marks(ways.size() * kRounds + 1);
    for (auto& mark : marks) C10_CUDA_CHECK(cudaEventCreate(mark.out()));
    // In turns, so that whatever else changes the clock meets all of them.
    C10_CUDA_CHECK(cudaEventRecord(marks[0], stream_));
    for (std::size_t i = 0; i + 1 < marks.size(); ++i) {
      check(multiply(ways[i % ways.size()], a.data(), b.data()), "cublasLtMatmul");
      C10_CUDA_CHECK(cudaEventRecord(marks[i + 1], stream_));
    }
    C10_CUDA_CHECK(cudaEventSynchronize(marks.back()));
    std::size_t best = 0;
    float shortest = 0;
    for (std::size_t i = 0; i < ways.size(); ++i) {
      std::array<float, kRounds> times{};
      for (std::size_t round = 0; round < kRounds; ++round) {
        const auto at = round * ways.size() + i;
        C10_CUDA_CHECK(cudaEventElapsedTime(&times[round], marks[at], marks[at + 1]));
      }
      std::sort(times.begin(), times.end());
      const float time = times[kRounds / 2];
      if (i == 0 || time < shortest) {
        best = i;
        shortest = time;
      }
    }
    return ways[best];
  }

  const Matmul& product_;
  Operand a_, b_, d_, c_;
  bool wide_;
  int remaining_ = multiprocessors_beside_others();
  cudaStream_t stream_;
  Operation operation_;
  Layout layout_a_, layout_b_, layout_c_, layout_d_;
};

}  // namespace

bool multiply(const Matmul& product) { return Call(product).run(); }

}  // namespace bonfire::cuda
