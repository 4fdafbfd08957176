#include "bonfire/cuda/activated_product.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include <cuda_bf16.h>

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/drawn_shares.cuh"
#include "bonfire/cuda/drawn_shares.h"
#include "bonfire/cuda/gpu.h"
#include "bonfire/cuda/hopper.cuh"
#include "bonfire/cuda/parts.cuh"
#include "bonfire/cuda/tensor_map.h"
#include "bonfire/kernels/agreed_math.h"

// A block makes tiles of 128 by 256 of the product, one after another, as it draws them. One thread copies operands into a
// ring of places in shared memory; two warpgroups multiply 64 rows each and leave their rounded sums in a tray; three or
// seven warps take them from there, apply the activation, and read and write what belongs to it, while the next tile is
// multiplied. Two blocks, one above the other, share their columns' operand: each copies half of it for both.
namespace bonfire::cuda {
namespace {

using namespace hopper;
using Element16 = __nv_bfloat16;

constexpr int tile_rows = 128, tile_columns = 256, step = 64, width = 64;
constexpr int row_bytes = 128;  // of every tile in shared memory: 64 elements
constexpr int left_bytes = tile_rows * row_bytes, right_bytes = tile_columns * row_bytes;
constexpr int place_bytes = left_bytes + right_bytes;
constexpr int places = 3;
constexpr int multipliers = 2, group_rows = tile_rows / multipliers, group_threads = 128;
constexpr int tray_bytes = group_rows * tile_columns * 2;  // of one multiplier
// Warps. With three of them a multiplier has the registers for products of 256 columns at once, with seven only of 128.
constexpr int most_finishers = 7;
template <int finishers>
constexpr int threads_of = multipliers* group_threads + (finishers + 1) * 32;
constexpr int cluster = 2;
constexpr int pairs_together = 8;  // of blocks, one above the other: so many share what the L2 cache holds

constexpr int finishers_meet = 1, multipliers_meet = 2;  // barriers of the block; the second of each multiplier

enum class Way { forward, backward };

// Columns of the activation that a tile makes: SwiGLU's forward has gates on the left and ups on the right.
template <Edge edge, Way way>
constexpr int covered = edge == Edge::swiglu&& way == Way::forward ? tile_columns / 2 : tile_columns;

// Rows that a finisher works on in one go; in backward, so many are on their way to it.
template <Edge edge, Way way, int finishers>
constexpr int rows_under_way = way == Way::forward ? (edge == Edge::swiglu ? 2 : 4)
                               : finishers == 3    ? 8
                                                   : 4;

struct Work {
  CUtensorMap left, right;
  CUtensorMap fetched;  // of backward: wide
  const Element16* bias;
  Element16 *wide, *active, *d_wide;
  float* parts;
  int rows, columns, steps;
  int pairs, tiles_across;
  Shares tiles;  // of a cluster: one above the other
};

struct Shared {
  alignas(1024) char ring[places][place_bytes];
  char trays[multipliers][tray_bytes];
  Element16 bias[places][tile_columns];
  float sums[most_finishers][tile_columns];
  std::uint64_t full[places], empty[places];
  std::uint64_t laid[multipliers], taken[multipliers];  // of the trays
  ToldShares told;
};

struct Tile {
  int row, column;
};
template <class Drawn, class Body>
__device__ void for_each_tile(const Work& work, Drawn drawn, int covers, const Body& body) {
  for (int index = drawn.next(); index < work.tiles.count; index = drawn.next()) {
    // Pairs of blocks that run together lie in a compact rectangle.
    const int per_group = pairs_together * work.tiles_across, group = index / per_group, first = group * pairs_together;
    const int high = min(pairs_together, work.pairs - first), rest = index - group * per_group;
    const int pair = first + rest % high;
    body(Tile{(pair * cluster + static_cast<int>(block_in_cluster())) * tile_rows, rest / high * covers});
  }
}

// Where in the ring somebody is.
struct Position {
  int place = 0;
  std::uint32_t parity = 0;
  __device__ void go_on() {
    if (++place == places) {
      place = 0;
      parity ^= 1;
    }
  }
  __device__ int before() const { return place == 0 ? places - 1 : place - 1; }
};

template <Edge edge, Way way>
__device__ void copy_operands(const Work& work, Shared& shared, int first_tile) {
  const auto rank = static_cast<int>(block_in_cluster());
  Position p;
  for_each_tile(work, ShareDrawer(work.tiles, shared.told, cluster, first_tile), covered<edge, way>, [&](const Tile& tile) {
    for (int k = 0; k < work.steps; ++k, p.go_on()) {
      const std::uint32_t full = shared_address(&shared.full[p.place]), left = shared_address(shared.ring[p.place]);
      const bool with_bias = work.bias && k == work.steps - 1;
      const int bias_bytes = with_bias ? min(tile_columns, work.columns - tile.column) * 2 : 0;
      wait(shared_address(&shared.empty[p.place]), p.parity ^ 1);
      arrive_and_expect(full, place_bytes + bias_bytes);
      load_tile(left, work.left, k * step, tile.row, full);
      const std::uint32_t right = left + left_bytes + rank * (right_bytes / cluster);
      constexpr std::uint16_t both = 3;
      if constexpr (way == Way::forward) {
        // SwiGLU: one block copies the gates' rows, the other the ups'.
        const int row = tile.column + rank * (edge == Edge::swiglu ? work.columns : tile_columns / cluster);
        load_tile_for(both, right, work.right, k * step, row, full);
      } else {
        for (int piece = 0; piece < 2; ++piece)
          load_tile_for(both, right + piece * step * row_bytes, work.right, tile.column + (rank * 2 + piece) * width,
                        k * step, full);
      }
      if constexpr (way == Way::backward) {
        // On its way from memory while the tile is multiplied.
        constexpr int pieces = edge == Edge::swiglu ? 8 : 4;
        if (k < pieces) fetch_tile(work.fetched, tile.column + k % 4 * width + (k < 4 ? 0 : work.columns), tile.row);
      }
      if (with_bias) load_bytes(shared_address(shared.bias[p.place]), work.bias + tile.column, bias_bytes, full);
    }
  });
}

__device__ std::uint32_t rounded(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}

__device__ float low_of(std::uint32_t both) { return __uint_as_float(both << 16); }
__device__ float high_of(std::uint32_t both) { return __uint_as_float(both & 0xffff0000u); }

// One warpgroup.
template <Edge edge, Way way, int finishers>
__device__ void multiply_tiles(const Work& work, Shared& shared, int group) {
  constexpr bool across = way == Way::backward;
  const int own = threadIdx.x % group_threads, lane = own % 32;
  // Of store_blocks: a lane's row, and which of two blocks of 8 columns: rows 0 to 7, 8 to 15, and so once more.
  const int row = own / 32 * 16 + lane % 16, further = lane / 16;
  const std::uint32_t begin = shared_address(&shared);
  const std::uint32_t full = begin + offsetof(Shared, full), empty = begin + offsetof(Shared, empty);
  const std::uint32_t laid = begin + offsetof(Shared, laid) + group * 8, taken = begin + offsetof(Shared, taken) + group * 8;
  const std::uint32_t tray = begin + offsetof(Shared, trays) + group * tray_bytes + row * row_bytes;
  const std::uint64_t lefts = tile_descriptor(begin + group * (left_bytes / multipliers));
  const std::uint64_t rights = tile_descriptor(begin + left_bytes, across ? step * row_bytes : 16);
  const auto release = [&](int place) {
    if (own < cluster) arrive_in_block(empty + place * 8, own);
  };
  float sums[128];
  Position p;
  std::uint32_t parity = 1;
  for_each_tile(work, ShareReader(work.tiles, shared.told, cluster), covered<edge, way>, [&](const Tile&) {
#pragma unroll 1
    for (int k = 0; k < work.steps; ++k, p.go_on()) {
      wait(full + p.place * 8, p.parity);
      // Descriptors count in 16 bytes.
      const std::uint64_t left = lefts + p.place * (place_bytes / 16), right = rights + p.place * (place_bytes / 16);
      constexpr int onward = (across ? 16 * row_bytes : 32) / 16, half = right_bytes / 2 / 16;
      begin_products();
#pragma unroll
      for (int part = 0; part < step / 16; ++part) {
        if constexpr (finishers == 3) {
          multiply<across>(sums, left + part * 2, right + part * onward, k + part);
        } else {
          multiply_half<across, 0>(sums, left + part * 2, right + part * onward, k + part);
          multiply_half<across, 64>(sums, left + part * 2, right + part * onward + half, k + part);
        }
      }
      end_products();
      if (k > 0) {
        wait_for_products<1>();
        release(p.before());
      }
    }
    wait_for_products<0>();
    if constexpr (edge == Edge::gelu && way == Way::forward) {
      if (work.bias) {
        const std::uint32_t bias = begin + offsetof(Shared, bias) + p.before() * (tile_columns * 2) + lane % 4 * 4;
#pragma unroll
        for (int block = 0; block < tile_columns / 8; ++block) {
          const std::uint32_t both = load_word(bias + block * 16);
          const float low = low_of(both), high = high_of(both);
          sums[block * 4] += low;
          sums[block * 4 + 1] += high;
          sums[block * 4 + 2] += low;
          sums[block * 4 + 3] += high;
        }
        // One thread releases the place for all, and with it their biases.
        meet<group_threads>(multipliers_meet + group);
      }
    }
    release(p.before());
    wait(taken, parity);
    parity ^= 1;
#pragma unroll
    for (int pair = 0; pair < tile_columns / 16; ++pair) {
      std::uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = rounded(sums[pair * 8 + i * 2], sums[pair * 8 + i * 2 + 1]);
      const int piece = (pair * 2 + further) % 8 ^ row % 8;
      store_blocks(tray + pair / 4 * (group_rows * row_bytes) + piece * 16, x);
    }
    arrive(laid);
  });
}

using Eight = Pack<std::uint32_t, 4>;  // four pairs of neighbours

__device__ Eight read_eight(const Element16* from) {
  return read_once<std::uint32_t, 4>(reinterpret_cast<const std::uint32_t*>(from), 0);
}
__device__ void write_eight(Element16* to, const Eight& x) {
  write_once<std::uint32_t, 4>(reinterpret_cast<std::uint32_t*>(to), 0, x);
}

// One element of an activation's backward.
template <Edge edge>
struct Slope {
  float first, second, value;
  __device__ Slope(float x, float up, float d) {
    if constexpr (edge == Edge::swiglu) {
      const float s = sigmoid<Element16>(x), silu = x * s;
      first = silu_slope(x, s) * up * d;
      second = silu * d;
      value = silu * up;
    } else {
      const Gelu<Element16> gelu(x);
      first = d * gelu.slope;
      second = 0;
      value = gelu.value;
    }
  }
};
template <Edge edge>
__device__ float activated(float x, float up) {
  if constexpr (edge == Edge::swiglu) return x * sigmoid<Element16>(x) * up;
  return Gelu<Element16>(x).value;
}

// A warp of those that apply the activation. It has every so manieth row of a tile, or two where half the lanes have a row.
template <Edge edge, Way way, bool again, int finishers>
class Finisher {
 public:
  __device__ Finisher(const Work& work, Shared& shared, int warp)
      : work_(work),
        shared_(shared),
        begin_(shared_address(&shared)),
        warp_(warp),
        lane_(threadIdx.x % 32),
        piece_(lane_ % lanes),
        first_row_(warp * rows_of_warp + lane_ / lanes) {}

  __device__ void finish_tiles() {
    for_each_tile(work_, ShareReader(work_.tiles, shared_.told, cluster), covered<edge, way>, [&](const Tile& tile) {
      const bool whole = tile.row + tile_rows <= work_.rows && tile.column + covered<edge, way> <= work_.columns;
      whole ? finish<true>(tile) : finish<false>(tile);
      __syncwarp();
      if (lane_ == 0) {
        arrive(begin_ + offsetof(Shared, taken));
        arrive(begin_ + offsetof(Shared, taken) + 8);
      }
      parity_ ^= 1;
      if constexpr (!gated && backward)
        if (work_.parts) add_sums(tile);
    });
  }

 private:
  static constexpr bool gated = edge == Edge::swiglu, backward = way == Way::backward;
  static constexpr int lanes = covered<edge, way> / 8, rows_of_warp = 32 / lanes;  // of a row: a lane has eight columns
  static constexpr int stride = finishers * rows_of_warp;
  static constexpr int many = rows_under_way<edge, way, finishers>;

  __device__ Eight from_tray(int row, int at) const {
    return load_words(begin_ + static_cast<std::uint32_t>(offsetof(Shared, trays)) + row / group_rows * tray_bytes +
                      at / 8 * (group_rows * row_bytes) + row % group_rows * row_bytes + ((at ^ row) % 8) * 16);
  }

  // `whole`: nothing of the tile lies outside.
  template <bool whole>
  __device__ __forceinline__ void finish(const Tile& tile) {
    const int column = tile.column + piece_ * 8, wide_columns = (gated ? 2 : 1) * work_.columns;
    const int rows = whole ? tile_rows : column < work_.columns ? min(tile_rows, work_.rows - tile.row) : 0;
    const std::int64_t corner = static_cast<std::int64_t>(tile.row) * wide_columns + column;
    const Element16* wide = work_.wide + corner;
    Element16* result = (backward ? work_.d_wide : work_.wide) + corner;
    Element16* active_at = work_.active + static_cast<std::int64_t>(tile.row) * work_.columns + column;
    const auto mine = [&](int row) { return whole || row < rows; };

    // Rows of wide on their way.
    Eight firsts[backward ? many : 1], seconds[backward && gated ? many : 1];
    const auto fetch = [&](int slot, int row) {
      if (row >= rows) return;
      firsts[slot] = read_eight(wide + row * wide_columns);
      if constexpr (gated) seconds[slot] = read_eight(wide + row * wide_columns + work_.columns);
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) sums_[i] = 0;
    if constexpr (backward)
#pragma unroll
      for (int r = 0; r < many; ++r) fetch(r, first_row_ + r * stride);
    wait(begin_ + offsetof(Shared, laid), parity_);
    bool in_second = false;
#pragma unroll 1
    for (int base = first_row_; base < tile_rows; base += stride * many) {
      if (!in_second && base + stride * (many - 1) >= group_rows) {
        wait(begin_ + offsetof(Shared, laid) + 8, parity_);
        in_second = true;
      }
#pragma unroll
      for (int r = 0; r < many; ++r) {
        const int row = base + r * stride;
        if (row >= tile_rows) break;
        Eight first = from_tray(row, piece_), second{}, active;
        if constexpr (backward) {
          const Eight d = first;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const std::uint32_t x = firsts[r].at[j], up = gated ? seconds[gated ? r : 0].at[j] : 0;
            const Slope<edge> low(low_of(x), low_of(up), low_of(d.at[j])), high(high_of(x), high_of(up), high_of(d.at[j]));
            first.at[j] = rounded(low.first, high.first);
            if constexpr (gated) second.at[j] = rounded(low.second, high.second);
            if constexpr (again) active.at[j] = rounded(low.value, high.value);
            if constexpr (!gated) {
              sums_[j * 2] += mine(row) ? low_of(first.at[j]) : 0.0f;
              sums_[j * 2 + 1] += mine(row) ? high_of(first.at[j]) : 0.0f;
            }
          }
          fetch(r, row + stride * many);
        } else {
          if constexpr (gated) second = from_tray(row, lanes + piece_);
#pragma unroll
          for (int j = 0; j < 4; ++j)
            active.at[j] = rounded(activated<edge>(low_of(first.at[j]), low_of(second.at[j])),
                                   activated<edge>(high_of(first.at[j]), high_of(second.at[j])));
        }
        if (!mine(row)) continue;
        write_eight(result + row * wide_columns, first);
        if constexpr (gated) write_eight(result + row * wide_columns + work_.columns, second);
        if constexpr (!backward || again) write_eight(active_at + row * work_.columns, active);
      }
    }
  }

  __device__ void add_sums(const Tile& tile) {
    for (int j = 0; j < 8; ++j) shared_.sums[warp_][piece_ * 8 + j] = sums_[j];
    meet<finishers * 32>(finishers_meet);
    for (int at = warp_ * 32 + lane_; at < tile_columns && tile.column + at < work_.columns; at += finishers * 32) {
      float sum = 0;
      for (int other = 0; other < finishers; ++other) sum += shared_.sums[other][at];
      work_.parts[static_cast<std::int64_t>(tile.row / tile_rows) * work_.columns + tile.column + at] = sum;
    }
    meet<finishers * 32>(finishers_meet);
  }

  const Work& work_;
  Shared& shared_;
  std::uint32_t begin_;
  int warp_, lane_, piece_, first_row_;
  std::uint32_t parity_ = 0;
  float sums_[8];  // of this lane's columns
};

template <Edge edge, Way way, bool again, int finishers>
__global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads_of<finishers>, 1)
    edge_kernel(const __grid_constant__ Work work) {
  extern __shared__ char raw[];
  auto& shared = *reinterpret_cast<Shared*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  if (threadIdx.x == 0) {
    for (int place = 0; place < places; ++place) {
      make_barrier(shared_address(&shared.full[place]), 1);
      make_barrier(shared_address(&shared.empty[place]), multipliers * cluster);
    }
    for (int group = 0; group < multipliers; ++group) {
      make_barrier(shared_address(&shared.laid[group]), group_threads);
      make_barrier(shared_address(&shared.taken[group]), finishers);
    }
    prepare(shared.told, cluster, multipliers * group_threads / 32 + finishers);
    show_barriers();
  }
  const int first_tile = first_draw(work.tiles, threadIdx.x == threads_of<finishers> - 32);
  meet_cluster();
  // The same in all lanes, which the compiler cannot know.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / group_threads, 0);
  if (group < multipliers) {
    take_registers<finishers == 3 ? 184 : 168>();
    multiply_tiles<edge, way, finishers>(work, shared, group);
    meet_cluster();
  } else {
    give_registers_back<finishers == 3 ? 136 : 88>();
    const int warp = threadIdx.x / 32 - multipliers * group_threads / 32;
    if (warp < finishers)
      Finisher<edge, way, again, finishers>(work, shared, warp).finish_tiles();
    else if (threadIdx.x % 32 == 0)
      copy_operands<edge, way>(work, shared, first_tile);
    __syncwarp();
    meet_cluster();
  }
}

constexpr int kernel_bytes = sizeof(Shared) + 1024;  // it begins at a multiple of that

std::int64_t above(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

template <Edge edge, Way way, bool again, int finishers>
void run(Work& work, cudaStream_t stream) {
  work.pairs = static_cast<int>(above(work.rows, tile_rows * cluster));
  work.tiles_across = static_cast<int>(above(work.columns, covered<edge, way>));
  work.tiles.counter = counter_of_draws(stream);
  work.tiles.count = work.pairs * work.tiles_across;
  work.tiles.clusters = std::min(current_gpu().multiprocessors / cluster, work.tiles.count);
  const auto kernel = edge_kernel<edge, way, again, finishers>;
  allow_shared(reinterpret_cast<const void*>(kernel), kernel_bytes);
  kernel<<<static_cast<unsigned>(work.tiles.clusters * cluster), threads_of<finishers>, kernel_bytes, stream>>>(work);
}

}  // namespace

std::int64_t sum_parts_of(std::int64_t rows) { return above(rows, tile_rows * cluster) * cluster; }

void launch_activated_product(const ActivatedProduct& p, cudaStream_t stream) {
  const bool gated = p.edge == Edge::swiglu;
  const std::int64_t wide = gated ? 2 * p.columns : p.columns;
  Work work{};
  work.left = tensor_map({p.x, p.rows, p.inner, tile_rows});
  work.right = tensor_map({p.weight, wide, p.inner, tile_columns / cluster});
  work.wide = static_cast<Element16*>(p.wide);
  work.active = static_cast<Element16*>(p.active);
  work.bias = static_cast<const Element16*>(p.bias);
  work.rows = static_cast<int>(p.rows);
  work.columns = static_cast<int>(p.columns);
  work.steps = static_cast<int>(above(p.inner, step));
  gated ? run<Edge::swiglu, Way::forward, false, 3>(work, stream) : run<Edge::gelu, Way::forward, false, 7>(work, stream);
}

void launch_activation_gradient(const ActivationGradientProduct& p, cudaStream_t stream) {
  const bool gated = p.edge == Edge::swiglu;
  Work work{};
  work.left = tensor_map({p.dy, p.rows, p.inner, tile_rows});
  work.right = tensor_map({p.weight, p.inner, p.columns, step});
  work.fetched = tensor_map({p.wide, p.rows, gated ? 2 * p.columns : p.columns, tile_rows});
  work.wide = static_cast<Element16*>(const_cast<void*>(p.wide));
  work.d_wide = static_cast<Element16*>(p.d_wide);
  work.active = static_cast<Element16*>(p.active);
  work.parts = p.parts;
  work.rows = static_cast<int>(p.rows);
  work.columns = static_cast<int>(p.columns);
  work.steps = static_cast<int>(above(p.inner, step));
  const auto go = [&](auto again, auto finishers) {
    constexpr bool once_more = decltype(again)::value;
    constexpr int warps = decltype(finishers)::value;
    gated ? run<Edge::swiglu, Way::backward, once_more, warps>(work, stream)
          : run<Edge::gelu, Way::backward, once_more, warps>(work, stream);
  };
  // A long sum leaves time enough for few finishers.
  using Few = std::integral_constant<int, 3>;
  using Many = std::integral_constant<int, most_finishers>;
  if (work.steps >= 24)
    p.active ? go(std::true_type{}, Few{}) : go(std::false_type{}, Few{});
  else
    p.active ? go(std::true_type{}, Many{}) : go(std::false_type{}, Many{});
  if (p.parts) sum_parts<float>(p.parts, {{p.sums, nullptr, nullptr}}, sum_parts_of(p.rows), p.columns, stream);
}

bool suits_hopper(const EdgeShape& shape) {
  // Rows of 16 bytes at least for the copies; SwiGLU's gates and ups each by whole pieces.
  const std::int64_t covers = shape.edge == Edge::swiglu ? tile_columns / 2 : tile_columns;
  const std::int64_t tiles = above(shape.rows, tile_rows) * above(shape.columns, covers);
  const Gpu gpu = current_gpu();
  return gpu.major == 9 && gpu.block_shared >= kernel_bytes && has_tensor_maps() && shape.inner > 0 &&
         shape.inner % 8 == 0 && shape.columns % width == 0 && tiles >= gpu.multiprocessors && shape.rows <= 0x7fffff00 &&
         shape.columns <= 0x7fffff;
}

}  // namespace bonfire::cuda
