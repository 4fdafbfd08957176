#pragma once

#include <cstdint>

#include <cuda.h>

#include "bonfire/cuda/device.cuh"

// Hopper's own instructions: copies of tiles between global and shared memory that run by themselves (the tensor memory
// accelerator), barriers in shared memory that count their bytes, products of a warpgroup whose operands stay in shared
// memory. A tile there has rows of 128 bytes, in which pieces of 16 are exchanged so that columns meet no bank twice.
namespace bonfire::cuda::hopper {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Barriers.

__device__ inline void make_barrier(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// For the copies and for the other block of the cluster.
__device__ inline void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void arrive_and_expect(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// At the barrier of the same address in another block of the cluster, or in this one.
__device__ inline void arrive_in_block(std::uint32_t barrier, std::uint32_t block) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(block)
      : "memory");
}

__device__ inline std::uint32_t block_in_cluster() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Of some warps of a block. Barrier 0 is that of all.
template <int threads>
__device__ inline void meet(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}

// Copies of tiles: `column` and `row` of the first element.

__device__ inline void load_tile(std::uint32_t to, const CUtensorMap& from, int column, int row, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(&from), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}
// Into the same place of every block of the cluster whose bit is set, whose barriers hear of it.
__device__ inline void load_tile_for(std::uint16_t blocks, std::uint32_t to, const CUtensorMap& from, int column, int row,
                                     std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&from), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}
// Into the L2 cache.
__device__ inline void fetch_tile(const CUtensorMap& from, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&from), "r"(column), "r"(row)
               : "memory");
}
// Bytes and addresses are multiples of 16.
__device__ inline void load_bytes(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// Four blocks of 8 by 8 elements of two bytes; a lane names the place of one row of one of them.

__device__ inline void store_blocks(std::uint32_t to, const std::uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3])
               : "memory");
}
__device__ inline std::uint32_t load_word(std::uint32_t from) {
  std::uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
__device__ inline void store_word(std::uint32_t to, int word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ inline Pack<std::uint32_t, 4> load_words(std::uint32_t from) {
  Pack<std::uint32_t, 4> x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.at[0]), "=r"(x.at[1]), "=r"(x.at[2]), "=r"(x.at[3])
               : "r"(from)
               : "memory");
  return x;
}

// Products of a warpgroup.

// Of a tile in shared memory whose rows go along the sum; or, where they go across it, as `leading` bytes apart pieces of 64
// columns. Groups of eight rows follow one another.
__device__ inline std::uint64_t tile_descriptor(std::uint32_t address, std::uint32_t leading = 16) {
  constexpr std::uint64_t group = 1024, swizzled_128 = 1;
  return (address & 0x3ffff) >> 4 | static_cast<std::uint64_t>(leading >> 4) << 16 | (group >> 4) << 32 | swizzled_128 << 62;
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int still_running>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(still_running) : "memory");
}

// d [64, 256] += a [64, 16] b [16, 256] in bf16 with sums in fp32, where `adds`; otherwise d = a b.
template <bool b_across>
__device__ inline void multiply(float (&d)[128], std::uint64_t a, std::uint64_t b, int adds) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, 0, %131;\n"
      "}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]),
        "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]),
        "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
        "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
        "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]),
        "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]),
        "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), "+f"(d[98]),
        "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]),
        "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]),
        "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]),
        "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(adds), "n"(b_across ? 1 : 0));
}
// The same for 128 columns, whose sums begin at `first`.
template <bool b_across, int first>
__device__ inline void multiply_half(float (&d)[128], std::uint64_t a, std::uint64_t b, int adds) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, 0, %67;\n"
      "}"
      : "+f"(d[first + 0]), "+f"(d[first + 1]), "+f"(d[first + 2]), "+f"(d[first + 3]), "+f"(d[first + 4]),
        "+f"(d[first + 5]), "+f"(d[first + 6]), "+f"(d[first + 7]), "+f"(d[first + 8]), "+f"(d[first + 9]),
        "+f"(d[first + 10]), "+f"(d[first + 11]), "+f"(d[first + 12]), "+f"(d[first + 13]), "+f"(d[first + 14]),
        "+f"(d[first + 15]), "+f"(d[first + 16]), "+f"(d[first + 17]), "+f"(d[first + 18]), "+f"(d[first + 19]),
        "+f"(d[first + 20]), "+f"(d[first + 21]), "+f"(d[first + 22]), "+f"(d[first + 23]), "+f"(d[first + 24]),
        "+f"(d[first + 25]), "+f"(d[first + 26]), "+f"(d[first + 27]), "+f"(d[first + 28]), "+f"(d[first + 29]),
        "+f"(d[first + 30]), "+f"(d[first + 31]), "+f"(d[first + 32]), "+f"(d[first + 33]), "+f"(d[first + 34]),
        "+f"(d[first + 35]), "+f"(d[first + 36]), "+f"(d[first + 37]), "+f"(d[first + 38]), "+f"(d[first + 39]),
        "+f"(d[first + 40]), "+f"(d[first + 41]), "+f"(d[first + 42]), "+f"(d[first + 43]), "+f"(d[first + 44]),
        "+f"(d[first + 45]), "+f"(d[first + 46]), "+f"(d[first + 47]), "+f"(d[first + 48]), "+f"(d[first + 49]),
        "+f"(d[first + 50]), "+f"(d[first + 51]), "+f"(d[first + 52]), "+f"(d[first + 53]), "+f"(d[first + 54]),
        "+f"(d[first + 55]), "+f"(d[first + 56]), "+f"(d[first + 57]), "+f"(d[first + 58]), "+f"(d[first + 59]),
        "+f"(d[first + 60]), "+f"(d[first + 61]), "+f"(d[first + 62]), "+f"(d[first + 63])
      : "l"(a), "l"(b), "r"(adds), "n"(b_across ? 1 : 0));
}

template <int registers>
__device__ inline void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace bonfire::cuda::hopper
