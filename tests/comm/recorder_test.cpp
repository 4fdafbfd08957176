#include "bonfire/comm/recorder.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tests/support/ranks.h"

namespace bonfire {
namespace {

TEST(Recorder, ListsEveryCollectiveWithItsBytesAndTimes) {
  testing::run_ranks(2, [](World& world) {
    const Mesh mesh = world.mesh({.shard = 2});
    world.group().all_reduce(at::zeros({1})).wait();  // not recorded yet
    Recorder& recorder = world.recorder();
    recorder.start();
    auto output = at::empty({20});
    mesh.group(Axis::shard).all_gather(output, at::zeros({10})).wait();
    auto part = at::empty({5}, at::kDouble);
    mesh.group(Axis::shard).reduce_scatter(part, at::zeros({10}, at::kDouble)).wait();
    mesh.group(Axis::replicate).all_reduce(at::zeros({10})).wait();  // a group of one moves nothing
    world.group().all_reduce(at::zeros({3}, at::kHalf)).wait();
    recorder.stop();
    world.group().barrier().wait();

    const std::vector<Collective> want{{CollectiveKind::all_gather, Axis::shard, 80},
                                       {CollectiveKind::reduce_scatter, Axis::shard, 80},
                                       {CollectiveKind::all_reduce, Axis::world, 6}};
    EXPECT_EQ(recorder.collectives(), want);
    for (const auto& record : recorder.records()) {
      EXPECT_GT(record.start, 0);
      EXPECT_GE(record.end, record.start);
      EXPECT_EQ(record.stream, "gloo");
    }
    recorder.clear();
    EXPECT_TRUE(recorder.records().empty());
  });
}

}  // namespace
}  // namespace bonfire
