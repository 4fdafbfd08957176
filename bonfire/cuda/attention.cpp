// Attention of packed queries, keys and values by cuDNN's graphs, which read them where they lie and write their gradients
// into one packed tensor.
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/cudnn/Handle.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <cudnn_frontend.h>
#include <torch/library.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/attention.h"
#include "bonfire/kernels/qkv.h"

namespace bonfire::cuda {
namespace {

namespace fe = cudnn_frontend;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

enum class Direction : std::int64_t { forward, backward };

struct Shape {
  std::int64_t batch, sequence, heads, kv_heads, head_dim;
  bool causal;
  at::ScalarType type;
  c10::DeviceIndex device;

  std::int64_t all_heads() const { return heads + 2 * kv_heads; }
};

Shape shape_of(const Tensor& qkv, std::int64_t heads, std::int64_t kv_heads, bool causal) {
  const std::int64_t head_dim = qkv.size(2) / (heads + 2 * kv_heads);
  return {qkv.size(0), qkv.size(1), heads, kv_heads, head_dim, causal, qkv.scalar_type(), qkv.get_device()};
}

// The tensors of a graph.
enum Name : std::int64_t { query = 1, key, value, result, log_sum, d_result, d_query, d_key, d_value };
using Memory = std::unordered_map<std::int64_t, void*>;

// A graph and cuDNN's plan for it. REQUIRES: its device is the current one whenever it is used.
class Plan {
 public:
  Plan(const Shape& shape, Direction direction) : shape_(shape) {
    graph_.set_io_data_type(shape.type == at::kHalf ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    try {
      if (direction == Direction::backward)
        add_backward();
      else
        add_forward();
      taken_ = graph_.build(at::native::getCudnnHandle(), {fe::HeurMode_t::A}).is_good() &&
               graph_.get_workspace_size(workspace_).is_good();
    } catch (const std::runtime_error&) {
      // A version of cuDNN, or a GPU, for which there is none.
    }
  }

  // Whether cuDNN knows how.
  bool taken() const { return taken_; }

  // Any number of threads may: a handle is a thread's own, and what was built is only read.
  void run(Memory memory, const at::TensorOptions& options) const {
    const Tensor workspace = at::empty({workspace_}, options.dtype(at::kByte));
    auto status = graph_.execute(at::native::getCudnnHandle(), memory, workspace.data_ptr());
    require(status.is_good(), "cuDNN's attention failed: {}", status.get_message());
  }

 private:
  using Attributes = fe::graph::Tensor_attributes;
  using Edge = std::shared_ptr<Attributes>;

  // [batch, heads, sequence, head_dim], of which rows have `row_heads`.
  Attributes& place(Attributes& tensor, std::int64_t heads, std::int64_t row_heads) const {
    const std::int64_t row = row_heads * shape_.head_dim;
    return tensor.set_dim({shape_.batch, heads, shape_.sequence, shape_.head_dim})
        .set_stride({shape_.sequence * row, shape_.head_dim, row, 1});
  }
  Attributes& place_log_sums(Attributes& tensor) const {
    return tensor.set_dim({shape_.batch, shape_.heads, shape_.sequence, 1})
        .set_stride({shape_.heads * shape_.sequence, shape_.sequence, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
  }
  Edge input(Name name, std::int64_t heads, std::int64_t row_heads) {
    Attributes tensor;
    return graph_.tensor(place(tensor, heads, row_heads).set_uid(name));
  }
  Edge packed(Name name) { return input(name, name == query ? shape_.heads : shape_.kv_heads, shape_.all_heads()); }

  float scale() const { return static_cast<float>(1 / std::sqrt(static_cast<double>(shape_.head_dim))); }

  void add_forward() {
    const auto how = fe::graph::SDPA_attributes()
                         .set_name("attention")
                         .set_generate_stats(true)
                         .set_causal_mask(shape_.causal)
                         .set_attn_scale(scale());
    const auto [out, log_sums] = graph_.sdpa(packed(query), packed(key), packed(value), how);
    place(*out, shape_.heads, shape_.heads).set_output(true).set_uid(result);
    place_log_sums(*log_sums).set_output(true).set_uid(log_sum);
  }

  void add_backward() {
    const auto how = fe::graph::SDPA_backward_attributes()
                         .set_name("attention's gradient")
                         .set_causal_mask(shape_.causal)
                         .set_attn_scale(scale());
    Attributes sums;
    const Edge out = input(result, shape_.heads, shape_.heads), d_out = input(d_result, shape_.heads, shape_.heads);
    const Edge log_sums = graph_.tensor(place_log_sums(sums).set_uid(log_sum));
    const auto [dq, dk, dv] = graph_.sdpa_backward(packed(query), packed(key), packed(value), out, d_out, log_sums, how);
    place(*dq, shape_.heads, shape_.all_heads()).set_output(true).set_uid(d_query);
    place(*dk, shape_.kv_heads, shape_.all_heads()).set_output(true).set_uid(d_key);
    place(*dv, shape_.kv_heads, shape_.all_heads()).set_output(true).set_uid(d_value);
  }

  Shape shape_;
  fe::graph::Graph graph_;
  std::int64_t workspace_ = 0;
  bool taken_ = false;
};

// Operators of the dispatcher carry nothing from call to call, so what was made is the plug-in's.
class Plans {
 public:
  const Plan& of(const Shape& shape, Direction direction) {
    const std::lock_guard guard(mutex_);
    auto& plan = plans_[{shape.batch, shape.sequence, shape.heads, shape.kv_heads, shape.head_dim, shape.causal,
                         static_cast<std::int64_t>(shape.type), shape.device, static_cast<std::int64_t>(direction)}];
    if (!plan) plan = std::make_unique<Plan>(shape, direction);
    return *plan;
  }

 private:
  std::mutex mutex_;
  std::map<std::array<std::int64_t, 9>, std::unique_ptr<Plan>> plans_;
};
Plans& plans() {
  // Left to the end of the process: cuDNN may have gone when other things are destroyed.
  static auto* all = new Plans;
  return *all;
}

// As cuDNN reads it: in vectors of 16 bytes.
Tensor readable(const Tensor& given) {
  const Tensor x = given.contiguous();
  return reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0 ? x : x.clone();
}

void* place(const Tensor& x, std::int64_t column = 0) {
  return static_cast<char*>(const_cast<void*>(x.const_data_ptr())) + column * x.element_size();
}

std::vector<Tensor> packed_attention_cuda(Tensor given, const OptionalTensor& cosine, const OptionalTensor& sine,
                                          std::int64_t heads, std::int64_t kv_heads, bool causal, bool in_place) {
  const c10::cuda::CUDAGuard guard(given.device());
  const Shape shape = shape_of(given, heads, kv_heads, causal);
  if (!cudnn_takes_attention(shape.type, shape.head_dim, shape.sequence) || given.numel() == 0 || heads % kv_heads != 0 ||
      !plans().of(shape, Direction::forward).taken() || !plans().of(shape, Direction::backward).taken())
    return {};
  const Tensor packed = turned_qkv(given, {.heads = heads,
                                           .kv_heads = kv_heads,
                                           .rotary = {cosine.value_or(Tensor()), sine.value_or(Tensor())},
                                           .in_place = in_place});
  const Tensor qkv = readable(packed);
  const std::int64_t q = heads * shape.head_dim, k = kv_heads * shape.head_dim;
  Tensor out = at::empty({shape.batch, shape.sequence, q}, qkv.options());
  Tensor log_sums = at::empty({shape.batch, heads, shape.sequence, 1}, qkv.options().dtype(at::kFloat));
  plans()
      .of(shape, Direction::forward)
      .run({{query, place(qkv)},
            {key, place(qkv, q)},
            {value, place(qkv, q + k)},
            {result, place(out)},
            {log_sum, place(log_sums)}},
           qkv.options());
  return {out, packed, log_sums};
}

Tensor packed_attention_backward_cuda(const Tensor& given, const Tensor& given_qkv, const Tensor& given_out,
                                      const Tensor& log_sums, std::int64_t heads, std::int64_t kv_heads, bool causal) {
  const c10::cuda::CUDAGuard guard(given.device());
  const Tensor d_out = readable(given), qkv = readable(given_qkv), out = readable(given_out);
  const Shape shape = shape_of(qkv, heads, kv_heads, causal);
  const std::int64_t q = heads * shape.head_dim, k = kv_heads * shape.head_dim;
  Tensor d_qkv = at::empty(qkv.sizes(), qkv.options());
  plans()
      .of(shape, Direction::backward)
      .run({{query, place(qkv)},
            {key, place(qkv, q)},
            {value, place(qkv, q + k)},
            {result, place(out)},
            {log_sum, place(log_sums)},
            {d_result, place(d_out)},
            {d_query, place(d_qkv)},
            {d_key, place(d_qkv, q)},
            {d_value, place(d_qkv, q + k)}},
           qkv.options());
  return d_qkv;
}

TORCH_LIBRARY_IMPL(bonfire, CUDA, m) {
  m.impl("packed_attention", packed_attention_cuda);
  m.impl("packed_attention_backward", packed_attention_backward_cuda);
}

}  // namespace
}  // namespace bonfire::cuda
