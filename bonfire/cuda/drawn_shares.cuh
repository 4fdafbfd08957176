#pragma once

#include <cstdint>

#include "bonfire/cuda/hopper.cuh"

// How the blocks of a cluster draw shares together (drawn_shares.h): a thread of the first block draws, and all are told.
namespace bonfire::cuda::hopper {

// Of a launch: `clusters` of them share `count` shares. Without a counter each has every so manieth.
struct Shares {
  unsigned* counter;
  int count, clusters;
};

// In every block's shared memory. A few are told ahead of those who still work on one before.
struct ToldShares {
  static constexpr int places = 4;
  int share[places];
  std::uint64_t told[places];
  std::uint64_t heard[places];  // of the first block: by whom
};

// One thread of every block, before the cluster first meets. `readers`: warps of a block that ask a ShareReader.
__device__ inline void prepare(ToldShares& told, unsigned blocks, unsigned readers) {
  for (int place = 0; place < ToldShares::places; ++place) {
    make_barrier(shared_address(&told.told[place]), 1);
    make_barrier(shared_address(&told.heard[place]), blocks * readers + blocks - 1);
  }
}

// To where `to` is in another block of the cluster, whose `barrier` counts its bytes.
__device__ inline void send_word(std::uint32_t to, int word, std::uint32_t barrier, unsigned block) {
  asm volatile(
      "{\n"
      ".reg .b32 there, counts;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 counts, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [counts];\n"
      "}" ::"r"(to),
      "r"(word), "r"(barrier), "r"(block)
      : "memory");
}

// Where somebody is among them.
class ShareTurn {
 public:
  __device__ int place() const { return at_ % ToldShares::places; }
  __device__ std::uint32_t parity() const { return static_cast<std::uint32_t>(at_ / ToldShares::places) & 1; }
  __device__ bool is_again() const { return at_ >= ToldShares::places; }
  __device__ int fixed(const Shares& shares, int cluster) const { return cluster + at_ * shares.clusters; }
  __device__ void go_on() { ++at_; }

 private:
  int at_ = 0;
};

// The first share of a cluster, for the thread of its first block that is to be a ShareDrawer: on its way from memory while
// the cluster meets. Others draw nothing.
__device__ inline int first_draw(const Shares& shares, bool draws) {
  return draws && shares.counter && block_in_cluster() == 0 ? static_cast<int>(atomicAdd(shares.counter, 1u)) : 0;
}

// One thread of each block, the same throughout.
class ShareDrawer {
 public:
  __device__ ShareDrawer(const Shares& shares, ToldShares& told, unsigned blocks, int first)
      : shares_(shares), told_(told), blocks_(blocks), rank_(block_in_cluster()), drawn_(first) {}

  // The next share; `count` or more where there is none left: then this was the last call.
  __device__ int next() {
    const int place = turn_.place();
    const std::uint32_t told = shared_address(&told_.told[place]), share_at = shared_address(&told_.share[place]);
    int share;
    if (!shares_.counter) {
      share = turn_.fixed(shares_, static_cast<int>(blockIdx.x / blocks_));
    } else if (rank_ == 0) {
      share = drawn_;
      if (turn_.is_again()) wait(shared_address(&told_.heard[place]), turn_.parity() ^ 1);
      store_word(share_at, share);
      arrive(told);
      for (unsigned block = 1; block < blocks_; ++block) send_word(share_at, share, told, block);
      // Each cluster draws once in vain, and the last of them leaves the counter as it was.
      if (share < shares_.count)
        drawn_ = static_cast<int>(atomicAdd(shares_.counter, 1u));
      else if (share == shares_.count + shares_.clusters - 1)
        *shares_.counter = 0;
    } else {
      arrive_and_expect(told, sizeof(int));
      wait(told, turn_.parity());
      share = static_cast<int>(load_word(share_at));
      arrive_in_block(shared_address(&told_.heard[place]), 0);
    }
    turn_.go_on();
    return share;
  }

 private:
  const Shares& shares_;
  ToldShares& told_;
  unsigned blocks_, rank_;
  int drawn_;  // on its way from memory, until it is needed
  ShareTurn turn_;
};

// Whole warps.
class ShareReader {
 public:
  __device__ ShareReader(const Shares& shares, ToldShares& told, unsigned blocks)
      : shares_(shares), told_(told), blocks_(blocks) {}

  // As ShareDrawer::next answers.
  __device__ int next() {
    const int place = turn_.place();
    int share;
    if (!shares_.counter) {
      share = turn_.fixed(shares_, static_cast<int>(blockIdx.x / blocks_));
    } else {
      wait(shared_address(&told_.told[place]), turn_.parity());
      share = static_cast<int>(load_word(shared_address(&told_.share[place])));
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive_in_block(shared_address(&told_.heard[place]), 0);
    }
    turn_.go_on();
    return share;
  }

 private:
  const Shares& shares_;
  ToldShares& told_;
  unsigned blocks_;
  ShareTurn turn_;
};

}  // namespace bonfire::cuda::hopper
