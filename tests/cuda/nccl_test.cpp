#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "bonfire/base/clock.h"
#include "bonfire/comm/device.h"
#include "bonfire/comm/recorder.h"
#include "tests/support/gpu_ranks.h"

namespace bonfire::nccl_test {
namespace {

using testing::run_gpu_ranks;

void expect_equal(const at::Tensor& got, const at::Tensor& want) {
  EXPECT_TRUE(at::equal(got.cpu(), want.cpu())) << "got " << got << "\nwant " << want;
}

void wait_for_gpu(c10::Device device) { c10::impl::VirtualGuardImpl(c10::kCUDA).synchronizeDevice(device.index()); }

class Nccl : public ::testing::TestWithParam<int> {
 protected:
  int ranks() const { return GetParam(); }
};

// Small whole numbers, which every dtype and every sum of them holds exactly.
at::Tensor value(int rank, std::int64_t elements, at::TensorOptions options) {
  return (at::arange(elements) % 5 + rank + 1).to(at::kDouble).to(options.device(), options.dtype().toScalarType());
}

TEST_P(Nccl, EveryCollectiveInEveryDtype) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(ranks(), [&](World& world) {
    const Group& group = world.group();
    const int rank = group.rank(), size = group.size();
    const std::int64_t part = 6, whole = part * size;
    for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kByte}) {
      SCOPED_TRACE(c10::toString(dtype));
      const auto options = at::TensorOptions().dtype(dtype).device(world.device());
      const auto mine = [&](std::int64_t elements) { return value(rank, elements, options); };
      auto sum = at::zeros({whole}, at::kDouble), most = value(size - 1, whole, at::TensorOptions().dtype(at::kDouble));
      std::vector<at::Tensor> each;
      for (int other = 0; other < size; ++other) {
        sum += value(other, whole, at::TensorOptions().dtype(at::kDouble));
        each.push_back(value(other, part, options));
      }
      if (dtype != at::kByte) {
        auto all = mine(whole);
        group.all_reduce(all).wait();
        expect_equal(all, sum.to(dtype));
        all = mine(whole);
        group.all_reduce(all, Reduce::max).wait();
        expect_equal(all, most.to(dtype));
        if (dtype != at::kLong) {
          all = mine(whole);
          group.all_reduce(all, Reduce::average).wait();
          EXPECT_TRUE(at::allclose(all.cpu().to(at::kDouble), sum / size, 1e-2));
        }
        auto scattered = at::empty({part}, options);
        group.reduce_scatter(scattered, mine(whole)).wait();
        expect_equal(scattered, sum.narrow(0, rank * part, part).to(dtype));
        auto rooted = mine(whole);
        group.reduce(rooted, size - 1).wait();
        if (rank == size - 1) expect_equal(rooted, sum.to(dtype));
      }
      auto gathered = at::empty({whole}, options);
      group.all_gather(gathered, mine(part)).wait();
      expect_equal(gathered, at::cat(each));

      auto sent = mine(part);
      group.broadcast(sent, size / 2).wait();
      expect_equal(sent, each[static_cast<std::size_t>(size / 2)]);

      auto at_root = rank == 0 ? at::empty({whole}, options) : at::Tensor();
      group.gather(at_root, mine(part), 0).wait();
      if (rank == 0) expect_equal(at_root, at::cat(each));
      auto back = at::empty({part}, options);
      group.scatter(back, rank == 0 ? at::cat(each) : at::Tensor(), 0).wait();
      expect_equal(back, each[static_cast<std::size_t>(rank)]);

      auto exchanged = at::empty({whole}, options);
      group.all_to_all(exchanged, mine(whole)).wait();
      std::vector<at::Tensor> want;
      for (int other = 0; other < size; ++other) want.push_back(value(other, whole, options).narrow(0, rank * part, part));
      expect_equal(exchanged, at::cat(want));

      const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
      auto received = at::empty({part}, options);
      const std::vector<Message> ring{{Message::Way::send, mine(part), next}, {Message::Way::receive, received, previous}};
      group.batch(ring).wait();
      expect_equal(received, each[static_cast<std::size_t>(previous)]);
    }
    group.barrier().wait();
    EXPECT_EQ(group.sum(rank), size * (size - 1) / 2.0);
    EXPECT_EQ(group.max(rank), size - 1.0);
  });
}

// Several transfers of different dtypes are one collective; parts may be slices of their wholes.
TEST_P(Nccl, TransfersAreOneCollectiveAlsoInPlace) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(ranks(), [&](World& world) {
    const Group& group = world.group();
    const int rank = group.rank(), size = group.size();
    const std::vector<std::pair<std::int64_t, at::ScalarType>> kinds{
        {7, at::kFloat}, {300, at::kBFloat16}, {0, at::kFloat}, {1, at::kDouble}, {100'000, at::kHalf}};
    for (const bool in_place : {false, true}) {
      SCOPED_TRACE(in_place);
      std::vector<Transfer> gathers, reductions;
      std::int64_t bytes = 0;
      for (const auto& [part, dtype] : kinds) {
        const auto options = at::TensorOptions().dtype(dtype).device(world.device());
        const auto part_of = [&, part = part](const at::Tensor& whole) {
          return in_place ? whole.narrow(0, rank * part, part) : at::empty({part}, whole.options());
        };
        auto whole = at::zeros({part * size}, options);
        gathers.push_back({whole, part_of(whole)});
        gathers.back().part.copy_(value(rank, part, options));
        whole = value(rank, part * size, options);
        reductions.push_back({whole, part_of(whole)});
        bytes += static_cast<std::int64_t>(whole.nbytes());
      }
      world.recorder().clear();
      world.recorder().start();
      Work gather = group.all_gather(gathers), reduction = group.reduce_scatter(reductions);
      gather.wait();
      reduction.wait();
      wait_for_gpu(world.device());
      world.recorder().stop();
      for (std::size_t at = 0; at < kinds.size(); ++at) {
        const auto& [part, dtype] = kinds[at];
        SCOPED_TRACE(c10::toString(dtype));
        const auto options = at::TensorOptions().dtype(dtype);
        std::vector<at::Tensor> each;
        auto sum = at::zeros({part * size}, at::kDouble);
        for (int other = 0; other < size; ++other) {
          each.push_back(value(other, part, options));
          sum += value(other, part * size, options).to(at::kDouble);
        }
        expect_equal(gathers[at].whole, at::cat(each));
        expect_equal(reductions[at].part, sum.narrow(0, rank * part, part).to(dtype));
      }
      const std::vector<Collective> want{{CollectiveKind::all_gather, Axis::world, bytes},
                                         {CollectiveKind::reduce_scatter, Axis::world, bytes}};
      EXPECT_EQ(world.recorder().collectives(), want);
    }
  });
}

TEST_P(Nccl, GathersAndSubgroupsHaveTheirOwnCommunicators) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(ranks(), [&](World& world) {
    const Mesh mesh = world.mesh({.shard = ranks()});
    const auto options = at::TensorOptions().device(world.device());
    auto whole = at::zeros({ranks() * 100}, options), sum = at::ones({50}, options);
    const auto part = at::full({100}, world.rank() + 1.0, options);
    // NCCL connects the ranks at the first collective of a kind, on the host, where all must come in one order.
    Work gather = mesh.gathers().all_gather(whole, part), reduction = mesh.group(Axis::shard).all_reduce(sum);
    gather.wait();
    reduction.wait();
    sum.fill_(1);
    // Every other rank issues them in the other order.
    if (world.rank() % 2 == 0) gather = mesh.gathers().all_gather(whole, part);
    reduction = mesh.group(Axis::shard).all_reduce(sum);
    if (world.rank() % 2 == 1) gather = mesh.gathers().all_gather(whole, part);
    gather.wait();
    reduction.wait();
    EXPECT_EQ(whole.sum().item<float>(), 100 * ranks() * (ranks() + 1) / 2);
    EXPECT_EQ(sum[0].item<float>(), ranks());
    const int first = world.rank() / 2 * 2;
    EXPECT_EQ(mesh.group(Axis::shard).neighbours(2).sum(world.rank()), first + first + 1);
  });
}

// Two groups, two communicators, one link.
TEST_P(Nccl, AllGroupsOfTheShardAxisQueueOnOneLink) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(ranks(), [&](World& world) {
    const auto options = at::TensorOptions().device(world.device());
    const Mesh fast = world.mesh({.shard = ranks()});
    const Mesh mesh = fast.over(Axis::shard, {.latency_seconds = 0.05, .bytes_per_second = 0});
    auto a = at::ones({1000}, options), b = at::ones({1000}, options);
    fast.gathers().barrier().wait();
    wait_for_gpu(world.device());
    const Nanoseconds begin = now_ns();
    Work first = mesh.group(Axis::shard).all_reduce(a), second = mesh.gathers().all_reduce(b);
    second.wait();
    wait_for_gpu(world.device());
    EXPECT_GE(now_ns() - begin, 99'000'000);
    first.wait();
  });
}

TEST_P(Nccl, MeshGroupsReduceAlongTheirAxis) {
  BONFIRE_SKIP_WITHOUT_GPU();
  if (ranks() != 4) GTEST_SKIP() << "needs four ranks";
  run_gpu_ranks(ranks(), [&](World& world) {
    const Mesh mesh = world.mesh({.replicate = 2, .shard = 2});
    const int rank = world.rank();
    EXPECT_EQ(mesh.group(Axis::replicate).sum(rank), rank % 2 == 0 ? 0 + 2 : 1 + 3);
    EXPECT_EQ(mesh.group(Axis::shard).sum(rank), rank < 2 ? 0 + 1 : 2 + 3);
    EXPECT_EQ(mesh.group(Axis::data).sum(rank), 0 + 1 + 2 + 3);
  });
}

// The recorder's times are the GPU's: one collective after the other, each inside the time between issue and the end.
TEST_P(Nccl, TheRecorderListsWhatRanAndWhen) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(ranks(), [&](World& world) {
    const auto options = at::TensorOptions().device(world.device());
    auto a = at::ones({1 << 20}, options), b = at::ones({1 << 18}, options);
    const auto count = [&] { return at::ones({10}, options).sum().item<float>(); };
    count();  // kernels are loaded on first use, which waits for the whole GPU
    world.group().barrier().wait();
    wait_for_gpu(world.device());
    world.recorder().start();
    const Nanoseconds begin = now_ns();
    Work first = world.group().all_reduce(a), second = world.group().all_reduce(b);
    first.wait();
    second.wait();
    wait_for_gpu(world.device());
    const auto records = world.recorder().records();
    ASSERT_EQ(records.size(), 2u);
    EXPECT_EQ(records[0].what, (Collective{CollectiveKind::all_reduce, Axis::world, 4 << 20}));
    EXPECT_EQ(records[1].what, (Collective{CollectiveKind::all_reduce, Axis::world, 4 << 18}));
    EXPECT_EQ(records[0].stream, "nccl world");
    EXPECT_GE(records[0].start, begin);
    EXPECT_GT(records[0].end, records[0].start);
    EXPECT_GE(records[1].start, records[0].end);
    EXPECT_GT(records[1].end, records[1].start);
  });
}

// A lower bound on time is the law of an emulated link, and computing goes on while it is busy.
TEST_P(Nccl, CollectivesQueueOnAnEmulatedLink) {
  BONFIRE_SKIP_WITHOUT_GPU();
  run_gpu_ranks(ranks(), [&](World& world) {
    const auto options = at::TensorOptions().device(world.device());
    const Group slow = world.group().over({.latency_seconds = 0.05, .bytes_per_second = 0});
    auto a = at::ones({1000}, options), b = at::ones({1000}, options);
    const auto count = [&] { return at::ones({10}, options).sum().item<float>(); };
    count();  // kernels are loaded on first use, which waits for the whole GPU
    world.group().barrier().wait();
    wait_for_gpu(world.device());
    world.recorder().start();
    const Nanoseconds begin = now_ns();
    Work first = slow.all_reduce(a), second = slow.all_reduce(b);
    EXPECT_EQ(count(), 10);  // waits for the current stream, not for the link
    EXPECT_FALSE(second.done());
    first.wait();
    second.wait();
    EXPECT_EQ(b[0].item<float>(), static_cast<float>(world.size()));
    EXPECT_GE(now_ns() - begin, 99'000'000);
    wait_for_gpu(world.device());
    const auto records = world.recorder().records();
    ASSERT_EQ(records.size(), 2u);
    EXPECT_GE(records[0].end - records[0].start, 49'000'000);
    EXPECT_GE(records[1].end - records[0].start, 99'000'000);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Nccl, ::testing::Values(2, 4));

}  // namespace
}  // namespace bonfire::nccl_test
