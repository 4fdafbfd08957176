#include <type_traits>

#include "bonfire/cuda/cross_entropy.h"
#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/drawn_shares.cuh"
#include "bonfire/cuda/drawn_shares.h"
#include "bonfire/cuda/hopper.cuh"
#include "bonfire/cuda/launch.cuh"

namespace bonfire::cuda {
namespace {

constexpr int most_warps = 31;  // that compute; one more asks for rows
constexpr int most_slots = 64;  // of the ring that rows come through
constexpr int most_ranks = 4;   // blocks that share a row
constexpr int width = 8;        // elements of a pack

template <class T>
struct Streamed {
  T* logits;
  const std::int64_t* target;
  double* losses;
  std::int64_t rows, classes, ignore;
  int ranks, part, chunk, slots;  // a block has `part` packs of a row, in chunks of `chunk`
  hopper::Shares shared_rows;     // a row each
};

// In the ring: which chunk, and which time round.
struct Place {
  int slot;
  unsigned phase;
  __device__ void go_on(int slots) {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

struct Softmax {
  float top, sum;
};

// The largest of a pack, exactly.
__device__ float top_of(const Pack<__nv_bfloat16, 8>& x) {
  const auto* two = reinterpret_cast<const __nv_bfloat162*>(&x);
  const auto top = __hmax2(__hmax2(two[0], two[1]), __hmax2(two[2], two[3]));
  return fmaxf(__low2float(top), __high2float(top));
}
__device__ float top_of(const Pack<__half, 8>& x) {
  const auto* two = reinterpret_cast<const __half2*>(&x);
  const auto top = __hmax2(__hmax2(two[0], two[1]), __hmax2(two[2], two[3]));
  return fmaxf(__low2float(top), __high2float(top));
}

constexpr unsigned barrier_bytes = 8;

// Two numbers to where `to` is in another block of the cluster, whose `barrier` counts their bytes.
__device__ void send(std::uint32_t to, float2 value, std::uint32_t barrier, unsigned block) {
  asm volatile(
      "{\n"
      ".reg .b32 there, counts;\n"
      "mapa.shared::cluster.u32 there, %0, %4;\n"
      "mapa.shared::cluster.u32 counts, %3, %4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%1, %2}, [counts];\n"
      "}" ::"r"(to),
      "f"(value.x), "f"(value.y), "r"(barrier), "r"(block)
      : "memory");
}

__device__ uint4 read_shared(std::uint32_t from) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(from)
               : "memory");
  return words;
}

// Of the lanes' tops the largest, and of their sums relative to it the sum: the same in all lanes.
template <class T>
__device__ Softmax of_warp(Softmax own) {
  float top = own.top;
  for (int distance = 16; distance > 0; distance /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
  return {top, sum_of_warp(own.sum * power_of_two<T>(own.top - top))};
}

// Lower than any element times log2e that is finite, but no infinity: a difference of two of those is no number.
constexpr float lowest = -3.4e38f;

// `ranks` blocks, a cluster, go through the rows that they draw, each through its own part of it, chunk by chunk: a chunk
// has one pack for each thread but those of the last warp, which keeps filling a ring of chunks in shared memory. So the
// next row is on its way while this one is worked on and written. A chunk stays where it is until it has been written.
template <class T>
__global__ void __launch_bounds__(32 * (most_warps + 1), 1) streamed_kernel(Streamed<T> a) {
  wait_for_kernels_before();
  using P = Pack<T, width>;
  extern __shared__ double2 dynamic[];  // 16 bytes aligned
  __shared__ std::uint64_t barriers[2 * most_slots + 2];
  __shared__ float2 table[2][most_ranks][32];
  __shared__ hopper::ToldShares told;
  std::uint32_t ring = hopper::shared_address(dynamic), full = hopper::shared_address(barriers);
  // Found once: in a cluster it takes several instructions, which the compiler would do again every time.
  asm volatile("" : "+r"(ring), "+r"(full));
  const std::uint32_t empty = full + most_slots * barrier_bytes, known = empty + most_slots * barrier_bytes;
  const unsigned chunk_bytes = static_cast<unsigned>(a.chunk) * sizeof(P);
  const int warps = a.chunk / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned rank = hopper::block_in_cluster();
  const int begin = static_cast<int>(rank) * a.part;
  const int packs = max(0, min(a.part, static_cast<int>(a.classes / width) - begin));  // of this block's part
  const int chunks = (packs + a.chunk - 1) / a.chunk, last = packs - (chunks - 1) * a.chunk;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < a.slots; ++slot) {
      hopper::make_barrier(full + slot * barrier_bytes, 1);
      hopper::make_barrier(empty + slot * barrier_bytes, warps);
    }
    for (int turn = 0; turn < 2; ++turn) hopper::make_barrier(known + turn * barrier_bytes, warps);
    hopper::prepare(told, static_cast<unsigned>(a.ranks), static_cast<unsigned>(warps));
    hopper::show_barriers();
  }
  const int first_row = hopper::first_draw(a.shared_rows, warp == warps && lane == 0);
  hopper::meet_cluster();
  Place place{0, 0};
  if (warp == warps) {
    if (lane == 0) {
      hopper::ShareDrawer drawer(a.shared_rows, told, static_cast<unsigned>(a.ranks), first_row);
      for (std::int64_t row = drawer.next(); row < a.rows; row = drawer.next()) {
        const T* from = a.logits + row * a.classes + begin * width;
        for (int k = 0; k < chunks; ++k, place.go_on(a.slots)) {
          hopper::wait(empty + place.slot * barrier_bytes, place.phase ^ 1);
          const auto bytes = static_cast<std::uint32_t>((k + 1 < chunks ? a.chunk : last) * sizeof(P));
          hopper::arrive_and_expect(full + place.slot * barrier_bytes, bytes);
          hopper::load_bytes(ring + place.slot * chunk_bytes, from + k * a.chunk * width, static_cast<int>(bytes),
                             full + place.slot * barrier_bytes);
        }
      }
    }
    __syncwarp();
  } else {
    const std::uint32_t own_ring = ring + threadIdx.x * static_cast<unsigned>(sizeof(P));
    const auto read = [&](int slot) {
      const uint4 words = read_shared(own_ring + slot * chunk_bytes);
      P pack;
      memcpy(&pack, &words, sizeof(pack));
      return pack;
    };
    const bool in_last = static_cast<int>(threadIdx.x) < last;
    unsigned turn = 0, known_phase = 0;
    hopper::ShareReader reader(a.shared_rows, told, static_cast<unsigned>(a.ranks));
    for (std::int64_t row = reader.next(); row < a.rows; row = reader.next()) {
      const std::int64_t wanted = a.target[row];
      T* const at = a.logits + row * a.classes;
      const bool ignored = wanted == a.ignore, is_class = !ignored && wanted >= 0 && wanted < a.classes;
      const int in_part = is_class ? static_cast<int>(wanted / width) - begin : -1;
      const bool has_wanted = in_part >= 0 && in_part < packs && in_part % a.chunk == static_cast<int>(threadIdx.x);
      const float chosen = has_wanted ? load(at[wanted]) : 0.0f;

      Softmax sums{lowest, 0};
      const auto include = [&](const P& x) {
        const float top = top_of(x) * log2e<float>;
        if (sums.top < top) {
          sums.sum *= power_of_two<T>(sums.top - top);
          sums.top = top;
        }
        float e[width];
#pragma unroll
        for (int j = 0; j < width; ++j) e[j] = power_of_two<T>(fmaf(element(x, j), log2e<float>, -sums.top));
#pragma unroll
        for (int half = width / 2; half > 0; half /= 2)
#pragma unroll
          for (int j = 0; j < half; ++j) e[j] += e[j + half];
        sums.sum += e[0];
      };
      Place here = place;
      for (int k = 0; k + 1 < chunks; ++k, here.go_on(a.slots)) {
        hopper::wait(full + here.slot * barrier_bytes, here.phase);
        include(read(here.slot));
      }
      hopper::wait(full + here.slot * barrier_bytes, here.phase);
      if (in_last) include(read(here.slot));

      // Every warp tells all of them, its own block's and the others', what it has; whoever has heard of all goes on.
      sums = of_warp<T>(sums);
      const std::uint32_t heard = known + turn * barrier_bytes;
      if (lane < a.ranks) {
        const float2 value = make_float2(sums.top, sums.sum);
        float2* to = &table[turn][rank][warp];
        if (lane == rank)
          *to = value;
        else
          send(hopper::shared_address(to), value, heard, lane);
      }
      __syncwarp();
      if (lane == 0) {
        if (warp == 0)
          hopper::arrive_and_expect(heard, static_cast<std::uint32_t>((a.ranks - 1) * warps * sizeof(float2)));
        else
          hopper::arrive(heard);
      }
      hopper::wait(heard, known_phase);
      Softmax all{lowest, 0};
      if (lane < warps)
        for (int other = 0; other < a.ranks; ++other) {
          const float2 value = table[turn][other][lane];
          const float top = fmaxf(all.top, value.x);
          all = {top, all.sum * power_of_two<T>(all.top - top) + value.y * power_of_two<T>(value.x - top)};
        }
      all = of_warp<T>(all);
      turn ^= 1;
      known_phase ^= turn == 0;

      // One exponential does it all: its rounding does not show in two bytes.
      const float shift = -all.top - log2f(all.sum);
      const auto softmax = [&](float x) { return power_of_two<T>(fmaf(x, log2e<float>, shift)); };
      T* to = at + (begin + static_cast<int>(threadIdx.x)) * width;
      const auto replace = [&](const P& x) {
        P out;
#pragma unroll
        for (int j = 0; j < width; ++j) out.at[j] = store<T>(softmax(element(x, j)));
        pack_at<T, width>(to, 0) = out;
      };
      const auto release = [&] {
        __syncwarp();
        if (lane == 0) hopper::arrive(empty + place.slot * barrier_bytes);
        place.go_on(a.slots);
        to += a.chunk * width;
      };
      if (!is_class) {
        // A target that is no class is found without asking the host: the loss of the step is no number, and whoever reads
        // it stops.
        if (rank == 0 && threadIdx.x == 0) a.losses[row] = ignored ? 0.0 : static_cast<double>(NAN);
        for (int k = 0; k < chunks; ++k, release())
          if (ignored && (k + 1 < chunks || in_last)) write_once<T, width>(to, 0, P{});
        continue;
      }
      for (int k = 0; k + 1 < chunks; ++k, release()) replace(read(place.slot));
      if (in_last) replace(read(place.slot));
      release();
      if (has_wanted) {
        at[wanted] = store<T>(softmax(chosen) - 1.0f);
        int exponent;
        const float mantissa = frexpf(all.sum, &exponent);  // whose logarithm is as exact as the sum itself
        a.losses[row] = (static_cast<double>(log2f(mantissa)) + exponent + static_cast<double>(all.top)) *
                        (1 / log2e<double>)-static_cast<double>(chosen);
      }
    }
  }
  __syncwarp();
  hopper::meet_cluster();  // nobody is sent anything after it has ended
}

}  // namespace

bool launch_streamed_cross_entropy(const CrossEntropyMemory& memory, cudaStream_t stream) {
  if (memory.type != Element::bf16 && memory.type != Element::f16) return false;
  if (memory.classes % width != 0 || !aligned({memory.logits}, 16) || !kernels_wait()) return false;
  const Gpu gpu = current_gpu();
  const std::int64_t room = (gpu.block_shared - 4096) / 16;  // packs; a third of it is for the row that comes next
  const std::int64_t packs = memory.classes / width;
  // Rows that fit into one multiprocessor go faster without all this, two of them at a time.
  if (packs <= room * 2 / 3) return false;
  const int ranks = packs <= 2 * room * 2 / 3 ? 2 : most_ranks;
  const auto part = static_cast<int>((packs + ranks - 1) / ranks);
  if (part > room * 2 / 3 || memory.rows > 0x7fffff00) return false;
  const int chunks = (part + 32 * most_warps - 1) / (32 * most_warps), chunk = (part + 32 * chunks - 1) / (32 * chunks) * 32;
  const int slots = std::min(static_cast<int>(room / chunk), most_slots);
  const auto shared = static_cast<std::size_t>(slots) * static_cast<std::size_t>(chunk) * 16;
  const auto rows = static_cast<int>(memory.rows), clusters = std::min(rows, gpu.multiprocessors / ranks);
  const hopper::Shares shared_rows{counter_of_draws(stream), rows, clusters};
  const auto run = [&](auto t) {
    using T = decltype(t);
    launch(
        streamed_kernel<T>,
        {static_cast<unsigned>(clusters * ranks), static_cast<unsigned>(chunk) + 32, shared, static_cast<unsigned>(ranks)},
        stream,
        Streamed<T>{static_cast<T*>(memory.logits), memory.target, memory.losses, memory.rows, memory.classes, memory.ignore,
                    ranks, part, chunk, slots, shared_rows});
  };
  memory.type == Element::bf16 ? run(__nv_bfloat16{}) : run(__half{});
  return true;
}

}  // namespace bonfire::cuda
