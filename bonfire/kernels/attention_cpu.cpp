#include <cmath>
#include <limits>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/attention.h"
#include "bonfire/kernels/gemm_tile.h"
#include "bonfire/kernels/vectorize.h"

// Causal attention of one head, a strip of query rows at a time: a strip meets only the keys up to its last row, and its
// scores never leave the first caches. See gemm_tile.h for strips, panels and tiles.
namespace bonfire::cpu {
namespace {

using at::Tensor;

constexpr std::int64_t kGroupRows = 4 * kHeight;  // query rows whose scores wait for the gradients of keys and values

std::int64_t panels_of(std::int64_t columns) { return (columns + kWidth - 1) / kWidth; }

// One head. Rows of `out` and `d_out` are `row` elements apart, all other rows `size`.
struct Head {
  std::int64_t sequence, size, row;
  float scale;
  const float *q, *k, *v;
  float *out, *log_sums;
  const float* d_out;
  float *dq, *dk, *dv;

  std::int64_t width() const { return panels_of(sequence) * kWidth; }
  std::int64_t size_panels() const { return panels_of(size); }
};

// Panels of x^T: [panel of rows][size][kWidth].
BONFIRE_AVX512 void pack_rows_as_columns(const Head& h, const float* x, float* out) {
  for (std::int64_t at = 0; at < h.sequence; at += kWidth, out += h.size * kWidth)
    pack_turned<kWidth>(x + at * h.size, h.size, std::min(kWidth, h.sequence - at), h.size, out);
}

// Panels of `rows` rows of x: [panel of columns][rows][kWidth].
BONFIRE_AVX512 void pack_columns(const Head& h, const float* x, std::int64_t stride, std::int64_t rows, float* out) {
  for (std::int64_t at = 0; at < h.size; at += kWidth, out += rows * kWidth)
    pack_straight<kWidth>(x + at, stride, std::min(kWidth, h.size - at), rows, out);
}

// scores [kHeight, width] = strip times the panels that cover `keys` columns.
BONFIRE_AVX512 void score(const Head& h, const float* strip, const float* panels, std::int64_t keys, float* scores) {
  for (std::int64_t at = 0; at < keys; at += kWidth)
    make_tile(
        strip, panels + at * h.size, h.size,
        {.c = scores + at, .stride = h.width(), .rows = kHeight, .columns = kWidth, .addend = nullptr, .addend_stride = 0});
}

// `strip` [depth, kHeight] times the packed columns, into `rows` rows of out. `panel_rows` is how many rows each panel has,
// `first` the row that the strip starts at.
struct Product {
  float* out;
  std::int64_t stride, rows, panel_rows, first;
  bool accumulate;
};
BONFIRE_AVX512 void multiply_columns(const Head& h, const float* strip, const float* panels, std::int64_t depth,
                                     const Product& p) {
  for (std::int64_t at = 0; at < h.size; at += kWidth)
    make_tile(strip, panels + at * p.panel_rows + p.first * kWidth, depth,
              {.c = p.out + at,
               .stride = p.stride,
               .rows = p.rows,
               .columns = std::min(kWidth, h.size - at),
               .addend = p.accumulate ? p.out + at : nullptr,
               .addend_stride = p.stride});
}

// Turns the scores of a row into exponentials, zeros behind the valid ones. Returns their sum; `top` is the largest score.
BONFIRE_AVX512 float exponentials(float* __restrict row, std::int64_t valid, std::int64_t keys, float scale, float& top) {
  float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < valid; ++i) largest = largest < row[i] ? row[i] : largest;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < valid; ++i) {
    const float e = exponential(scale * (row[i] - largest));
    row[i] = e;
    sum += e;
  }
  for (std::int64_t i = valid; i < keys; ++i) row[i] = 0;
  top = largest;
  return sum;
}

BONFIRE_AVX512 void forward_head(const Head& h, const float* key_panels, const float* value_panels, float* scores,
                                 float* strip) {
  for (std::int64_t first = 0; first < h.sequence; first += kHeight) {
    const std::int64_t rows = std::min(kHeight, h.sequence - first), keys = first + rows;
    pack_turned<kHeight>(h.q + first * h.size, h.size, rows, h.size, strip);
    score(h, strip, key_panels, keys, scores);
    float inverse[kHeight];
    for (std::int64_t r = 0; r < rows; ++r) {
      float top = 0;
      const float sum = exponentials(scores + r * h.width(), first + r + 1, keys, h.scale, top);
      inverse[r] = 1 / sum;
      h.log_sums[first + r] = h.scale * top + std::log(sum);
    }
    pack_turned<kHeight>(scores, h.width(), rows, keys, strip);
    float* out = h.out + first * h.row;
    multiply_columns(h, strip, value_panels, keys,
                     {.out = out, .stride = h.row, .rows = rows, .panel_rows = h.sequence, .first = 0, .accumulate = false});
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t i = 0; i < h.size; ++i) out[r * h.row + i] *= inverse[r];
  }
}

// From scores and the gradients of the probabilities: the probabilities in `p`, the gradients of the scores in `d`.
BONFIRE_AVX512 void probabilities(float* __restrict p, float* __restrict d, std::int64_t valid, std::int64_t keys,
                                  float scale, float log_sum, float delta) {
#pragma omp simd
  for (std::int64_t i = 0; i < valid; ++i) {
    const float probability = exponential(scale * p[i] - log_sum);
    p[i] = probability;
    d[i] = scale * probability * (d[i] - delta);
  }
  for (std::int64_t i = valid; i < keys; ++i) p[i] = d[i] = 0;
}

BONFIRE_AVX512 float dot(const float* __restrict a, const float* __restrict b, std::int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

struct BackwardScratch {
  const float *key_rows, *key_columns, *value_columns;  // k as panels of rows; k^T and v^T as panels of columns
  float *p, *d;                                         // [kGroupRows, width]
  float *query_rows, *d_out_rows, *strip;
};

// Adds this group's part to the gradients of keys and values: for 12 keys, the group's probabilities turned around.
BONFIRE_AVX512 void add_key_gradients(const Head& h, const BackwardScratch& s, std::int64_t group, std::int64_t rows) {
  pack_columns(h, h.q + group * h.size, h.size, rows, s.query_rows);
  pack_columns(h, h.d_out + group * h.row, h.row, rows, s.d_out_rows);
  for (std::int64_t key = 0; key < group + rows; key += kHeight) {
    const std::int64_t count = std::min(kHeight, group + rows - key);
    const std::int64_t skip = std::max<std::int64_t>(0, key - group), depth = rows - skip;  // earlier queries do not see it
    const Product product{
        .out = nullptr, .stride = h.size, .rows = count, .panel_rows = rows, .first = skip, .accumulate = true};
    const auto add = [&](const float* scores, const float* panels, float* to) BONFIRE_AVX512 {
      pack_straight<kHeight>(scores + skip * h.width() + key, h.width(), count, depth, s.strip);
      Product into = product;
      into.out = to + key * h.size;
      multiply_columns(h, s.strip, panels, depth, into);
    };
    add(s.p, s.d_out_rows, h.dv);
    add(s.d, s.query_rows, h.dk);
  }
}

BONFIRE_AVX512 void backward_head(const Head& h, const BackwardScratch& s) {
  for (std::int64_t group = 0; group < h.sequence; group += kGroupRows) {
    const std::int64_t group_rows = std::min(kGroupRows, h.sequence - group);
    for (std::int64_t first = group; first < group + group_rows; first += kHeight) {
      const std::int64_t rows = std::min(kHeight, h.sequence - first), keys = first + rows;
      float *p = s.p + (first - group) * h.width(), *d = s.d + (first - group) * h.width();
      pack_turned<kHeight>(h.q + first * h.size, h.size, rows, h.size, s.strip);
      score(h, s.strip, s.key_columns, keys, p);
      pack_turned<kHeight>(h.d_out + first * h.row, h.row, rows, h.size, s.strip);
      score(h, s.strip, s.value_columns, keys, d);
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t row = first + r;
        probabilities(p + r * h.width(), d + r * h.width(), row + 1, group + group_rows, h.scale, h.log_sums[row],
                      dot(h.d_out + row * h.row, h.out + row * h.row, h.size));
      }
      pack_turned<kHeight>(d, h.width(), rows, keys, s.strip);
      multiply_columns(h, s.strip, s.key_rows, keys,
                       {.out = h.dq + first * h.size,
                        .stride = h.size,
                        .rows = rows,
                        .panel_rows = h.sequence,
                        .first = 0,
                        .accumulate = false});
    }
    add_key_gradients(h, s, group, group_rows);
  }
}

struct Sizes {
  std::int64_t batch, heads, kv_heads, sequence, size;
  explicit Sizes(const Tensor& q, const Tensor& k)
      : batch(q.size(0)), heads(q.size(1)), kv_heads(k.size(1)), sequence(q.size(2)), size(q.size(3)) {}
  std::int64_t head_elements() const { return sequence * size; }
  float scale() const { return static_cast<float>(1 / std::sqrt(static_cast<double>(size))); }
  // Where head h of sample b starts in [batch, sequence, heads, size].
  std::int64_t interleaved(std::int64_t b, std::int64_t h) const { return b * sequence * heads * size + h * size; }
};

constexpr const char* kOperator = "causal_attention";

void require_heads(const Tensor& q, const Tensor& k, const Tensor& v) {
  require_sizes({kOperator, "q", q}, {any_size, any_size, any_size, any_size}, q);
  require_sizes({kOperator, "k", k}, {q.size(0), any_size, q.size(2), q.size(3)}, q);
  require_alike({kOperator, "v", v}, k);
  require(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "{}: {} heads of queries, {} of keys", kOperator, q.size(1),
          k.size(1));
  for (const auto& [name, x] : {std::pair("q", q), std::pair("k", k), std::pair("v", v)})
    require_contiguous({kOperator, name, x});
}

}  // namespace

AttentionForward causal_attention(const Tensor& q, const Tensor& k, const Tensor& v) {
  require_heads(q, k, v);
  const Sizes z(q, k);
  Tensor out = at::empty({z.batch, z.sequence, z.heads * z.size}, q.options());
  Tensor log_sums = at::empty({z.batch, z.heads, z.sequence}, q.options());
  const std::int64_t group = z.heads / z.kv_heads;
  at::parallel_for(0, z.batch * z.kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    static thread_local Scratch kept;
    for (std::int64_t job = begin; job < end; ++job) {
      const std::int64_t b = job / z.kv_heads, kv = job % z.kv_heads;
      Head h{.sequence = z.sequence, .size = z.size, .row = z.heads * z.size, .scale = z.scale()};
      h.k = k.const_data_ptr<float>() + job * z.head_elements();
      h.v = v.const_data_ptr<float>() + job * z.head_elements();
      const std::int64_t columns = h.width() * h.size, rows = h.size_panels() * kWidth * h.sequence;
      float* memory = kept.get(columns + rows + kHeight * h.width() + kHeight * std::max(h.width(), h.size));
      float *key_panels = memory, *value_panels = key_panels + columns, *scores = value_panels + rows,
            *strip = scores + kHeight * h.width();
      pack_rows_as_columns(h, h.k, key_panels);
      pack_columns(h, h.v, h.size, h.sequence, value_panels);
      for (std::int64_t i = kv * group; i < (kv + 1) * group; ++i) {
        h.q = q.const_data_ptr<float>() + (b * z.heads + i) * z.head_elements();
        h.out = out.data_ptr<float>() + z.interleaved(b, i);
        h.log_sums = log_sums.data_ptr<float>() + (b * z.heads + i) * z.sequence;
        forward_head(h, key_panels, value_panels, scores, strip);
      }
    }
  });
  return {out, log_sums};
}

AttentionGradients causal_attention_backward(const Tensor& d_out, const AttentionSaved& saved) {
  require_heads(saved.q, saved.k, saved.v);
  const Sizes z(saved.q, saved.k);
  for (const auto& [name, x] : {std::pair("d_out", d_out), std::pair("out", saved.out)}) {
    require_sizes({kOperator, name, x}, {z.batch, z.sequence, z.heads * z.size}, saved.q);
    require_contiguous({kOperator, name, x});
  }
  require_sizes({kOperator, "log_sums", saved.log_sums}, {z.batch, z.heads, z.sequence}, saved.q);
  require_contiguous({kOperator, "log_sums", saved.log_sums});
  AttentionGradients d{at::empty_like(saved.q), at::zeros_like(saved.k), at::zeros_like(saved.v)};
  const std::int64_t group = z.heads / z.kv_heads;
  at::parallel_for(0, z.batch * z.kv_heads, 1, [&](std::int64_t begin, std::int64_t end) {
    static thread_local Scratch kept;
    for (std::int64_t job = begin; job < end; ++job) {
      const std::int64_t b = job / z.kv_heads, kv = job % z.kv_heads;
      Head h{.sequence = z.sequence, .size = z.size, .row = z.heads * z.size, .scale = z.scale()};
      h.k = saved.k.const_data_ptr<float>() + job * z.head_elements();
      h.v = saved.v.const_data_ptr<float>() + job * z.head_elements();
      h.dk = d.k.data_ptr<float>() + job * z.head_elements();
      h.dv = d.v.data_ptr<float>() + job * z.head_elements();
      const std::int64_t columns = h.width() * h.size, panel_row = h.size_panels() * kWidth;
      const std::int64_t scores = kGroupRows * h.width();
      float* at = kept.get(2 * columns + panel_row * (h.sequence + 2 * kGroupRows) + 2 * scores +
                           kHeight * std::max({h.width(), h.size, kGroupRows}));
      const auto take = [&](std::int64_t elements) { return std::exchange(at, at + elements); };
      float *key_columns = take(columns), *value_columns = take(columns), *key_rows = take(panel_row * h.sequence);
      const BackwardScratch scratch{.key_rows = key_rows,
                                    .key_columns = key_columns,
                                    .value_columns = value_columns,
                                    .p = take(scores),
                                    .d = take(scores),
                                    .query_rows = take(panel_row * kGroupRows),
                                    .d_out_rows = take(panel_row * kGroupRows),
                                    .strip = at};
      pack_rows_as_columns(h, h.k, key_columns);
      pack_rows_as_columns(h, h.v, value_columns);
      pack_columns(h, h.k, h.size, h.sequence, key_rows);
      for (std::int64_t i = kv * group; i < (kv + 1) * group; ++i) {
        h.q = saved.q.const_data_ptr<float>() + (b * z.heads + i) * z.head_elements();
        h.dq = d.q.data_ptr<float>() + (b * z.heads + i) * z.head_elements();
        h.out = const_cast<float*>(saved.out.const_data_ptr<float>()) + z.interleaved(b, i);
        h.d_out = d_out.const_data_ptr<float>() + z.interleaved(b, i);
        h.log_sums = const_cast<float*>(saved.log_sums.const_data_ptr<float>()) + (b * z.heads + i) * z.sequence;
        backward_head(h, scratch);
      }
    }
  });
  return d;
}

}  // namespace bonfire::cpu
