#include "bonfire/comm/fingerprint.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "tests/support/ranks.h"

namespace bonfire {
namespace {

// What rank 0 is told when the ranks disagree.
std::string told(int ranks, const std::function<void(World&)>& body) {
  std::string message;
  testing::run_ranks(ranks,
                     [&](World& world) {
                       try {
                         body(world);
                       } catch (const Error& error) {
                         if (world.rank() == 0) message = error.what();
                       }
                     },
                     {.timeout = std::chrono::seconds(2), .debug = true});
  return message;
}

TEST(Fingerprint, AgreementCostsNothingButTime) {
  EXPECT_EQ(told(3,
                 [](World& world) {
                   for (int i = 0; i < 5; ++i) EXPECT_EQ(world.group().sum(1), 3);
                   world.group().barrier().wait();
                   auto got = at::empty({4});
                   if (world.rank() == 0) world.group().send(at::ones({4}), 1).wait();
                   if (world.rank() == 1) world.group().receive(got, 0).wait();
                 }),
            "");
}

// Whoever asks for the same ranks along the same axis gets the same group, with one count of its collectives.
TEST(Fingerprint, TwoMeshesDoNotConfuseEachOther) {
  EXPECT_EQ(told(2,
                 [](World& world) {
                   const Mesh first = world.mesh({.replicate = 2}), second = world.mesh({.replicate = 2});
                   EXPECT_EQ(first.group(Axis::world).sum(1), 2);
                   EXPECT_EQ(world.group().sum(2), 4);
                   EXPECT_EQ(second.group(Axis::replicate).max(3), 3);
                   EXPECT_EQ(first.group(Axis::replicate).sum(1), 2);
                   EXPECT_EQ(second.group(Axis::world).sum(1), 2);
                 }),
            "");
  const auto message = told(2, [](World& world) {
    const Mesh first = world.mesh({.replicate = 2}), second = world.mesh({.replicate = 2});
    first.group(Axis::replicate).sum(1);
    second.group(Axis::replicate).all_reduce(at::zeros({world.rank() + 1})).wait();
  });
  EXPECT_NE(message.find("collective #2: rank 0 calls all_reduce of Float [1]"), std::string::npos) << message;
}

TEST(Fingerprint, NamesBothSidesOfAnotherShape) {
  EXPECT_EQ(told(2, [](World& world) { world.group().all_reduce(at::zeros({world.rank() == 0 ? 4 : 5})).wait(); }),
            "group 'world 0,1', collective #1: rank 0 calls all_reduce of Float [4], sum, but rank 1 calls all_reduce of "
            "Float [5], sum");
}

TEST(Fingerprint, NamesBothSidesOfAnotherDtypeKindOrOperation) {
  const auto dtype = told(
      2, [](World& world) { world.group().all_reduce(at::zeros({4}, world.rank() == 0 ? at::kFloat : at::kHalf)).wait(); });
  EXPECT_NE(dtype.find("Float [4], sum, but rank 1 calls all_reduce of Half [4]"), std::string::npos) << dtype;
  const auto kind = told(2, [](World& world) {
    auto tensor = at::zeros({4});
    (world.rank() == 0 ? world.group().all_reduce(tensor) : world.group().broadcast(tensor, 0)).wait();
  });
  EXPECT_NE(kind.find("rank 0 calls all_reduce of Float [4], sum, but rank 1 calls broadcast of Float [4], from 0"),
            std::string::npos)
      << kind;
}

TEST(Fingerprint, NamesTheRankThatDoesNotCome) {
  const auto message = told(3, [](World& world) {
    world.group().barrier().wait();
    if (world.rank() != 1) world.group().all_reduce(at::zeros({4})).wait();
  });
  EXPECT_NE(
      message.find("rank 0 is in collective #2 (all_reduce of Float [4], sum), but rank 1 did not come to it within 2 s"),
      std::string::npos)
      << message;
}

TEST(Fingerprint, NamesAMessageOfAnotherShape) {
  const auto message = told(2, [](World& world) {
    auto tensor = at::zeros({world.rank() == 0 ? 4 : 5});
    const Work work = world.rank() == 0 ? world.group().receive(tensor, 1) : world.group().send(tensor, 0);
    if (world.rank() == 0) Work(work).wait();
  });
  EXPECT_NE(message.find("message #0 from rank 1 to rank 0: sent is Float [5], but expected is Float [4]"),
            std::string::npos)
      << message;
}

}  // namespace
}  // namespace bonfire
