#include "bonfire/comm/fingerprint.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "tests/support/ranks.h"

namespace bonfire::fingerprint_test {
namespace {

// What each rank is told when they disagree; empty: nothing. What is no Error of ours fails the test.
// `timeout` is the limit of connecting, too.
std::vector<std::string> told(int ranks, const std::function<void(World&)>& body,
                              std::chrono::seconds timeout = std::chrono::seconds(30)) {
  std::vector<std::string> messages(static_cast<std::size_t>(ranks));
  testing::run_ranks(ranks,
                     [&](World& world) {
                       try {
                         body(world);
                       } catch (const Error& error) {
                         messages[static_cast<std::size_t>(world.rank())] = error.what();
                       }
                     },
                     {.timeout = timeout, .debug = true});
  return messages;
}

using Messages = std::vector<std::string>;

void expect_contains(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << "'" << message << "' does not say '" << part << "'";
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
            Messages(3));
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
            Messages(2));
  const auto messages = told(2, [](World& world) {
    const Mesh first = world.mesh({.replicate = 2}), second = world.mesh({.replicate = 2});
    first.group(Axis::replicate).sum(1);
    second.group(Axis::replicate).all_reduce(at::zeros({world.rank() + 1})).wait();
  });
  expect_contains(messages[0], "collective #2: rank 0 calls all_reduce of Float [1]");
  expect_contains(messages[1], "collective #2: rank 1 calls all_reduce of Float [2]");
}

TEST(Fingerprint, NamesBothSidesOfAnotherShape) {
  EXPECT_EQ(told(2, [](World& world) { world.group().all_reduce(at::zeros({world.rank() == 0 ? 4 : 5})).wait(); }),
            (Messages{"group 'world 0,1', collective #1: rank 0 calls all_reduce of Float [4], sum, but rank 1 calls "
                      "all_reduce of Float [5], sum",
                      "group 'world 0,1', collective #1: rank 1 calls all_reduce of Float [5], sum, but rank 0 calls "
                      "all_reduce of Float [4], sum"}));
}

TEST(Fingerprint, NamesBothSidesOfAnotherDtypeKindOrOperation) {
  const auto dtype = told(
      2, [](World& world) { world.group().all_reduce(at::zeros({4}, world.rank() == 0 ? at::kFloat : at::kHalf)).wait(); });
  expect_contains(dtype[0], "Float [4], sum, but rank 1 calls all_reduce of Half [4]");
  expect_contains(dtype[1], "Half [4], sum, but rank 0 calls all_reduce of Float [4]");
  const auto kind = told(2, [](World& world) {
    auto tensor = at::zeros({4});
    (world.rank() == 0 ? world.group().all_reduce(tensor) : world.group().broadcast(tensor, 0)).wait();
  });
  expect_contains(kind[0], "rank 0 calls all_reduce of Float [4], sum, but rank 1 calls broadcast of Float [4], from 0");
  expect_contains(kind[1], "rank 1 calls broadcast of Float [4], from 0, but rank 0 calls all_reduce of Float [4], sum");
}

TEST(Fingerprint, NamesTheRankThatDoesNotCome) {
  const auto messages = told(
      3,
      [](World& world) {
        world.group().barrier().wait();
        if (world.rank() != 1) world.group().all_reduce(at::zeros({4})).wait();
      },
      std::chrono::seconds(2));
  EXPECT_EQ(messages[1], "");
  for (const int rank : {0, 2})
    expect_contains(messages[static_cast<std::size_t>(rank)],
                    fmt::format("rank {} is in collective #2 (all_reduce of Float [4], sum), but rank 1 did not come to it "
                                "within 2 s",
                                rank));
}

TEST(Fingerprint, NamesAMessageOfAnotherShape) {
  const auto messages = told(2, [](World& world) {
    auto tensor = at::zeros({world.rank() == 0 ? 4 : 5});
    const Work work = world.rank() == 0 ? world.group().receive(tensor, 1) : world.group().send(tensor, 0);
    if (world.rank() == 0) Work(work).wait();
  });
  expect_contains(messages[0], "message #0 from rank 1 to rank 0: sent is Float [5], but expected is Float [4]");
  EXPECT_EQ(messages[1], "");
}

}  // namespace
}  // namespace bonfire::fingerprint_test
