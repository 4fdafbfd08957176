#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "bonfire/comm/gloo_exchange.h"
#include "bonfire/comm/group.h"
#include "bonfire/comm/reduce_parts.h"
#include "tests/support/ranks.h"

namespace bonfire::exchange_test {
namespace {

using testing::run_ranks;

std::vector<at::Tensor> parts_of(int count, std::int64_t elements, at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  for (int part = 0; part < count; ++part)
    parts.push_back((at::sin(at::arange(elements, at::kDouble) * (part + 1)) * 100).to(dtype));
  return parts;
}

std::vector<const void*> pointers(const std::vector<at::Tensor>& parts) {
  std::vector<const void*> list;
  for (const auto& part : parts) list.push_back(part.const_data_ptr());
  return list;
}

// Sizes around those of vectors, blocks and threads.
const std::vector<std::int64_t> kSizes{1, 7, 1023, 1024, 1025, 16384, 70'001};

// Rank 1 comes when rank 0 has seen that it does not.
TEST(WorkWaitFor, SaysWhetherTheResultIsThere) {
  run_ranks(2, [](World& world) {
    const auto& group = world.group();
    auto whole = at::ones({4}), part = at::empty({2});
    auto sum = at::ones({3});
    const Transfer transfer{whole, part};
    if (world.rank() == 0) {
      auto scattered = group.reduce_scatter(std::span(&transfer, 1), Reduce::sum);
      auto summed = group.all_reduce(sum);
      for (auto* work : {&scattered, &summed}) {
        EXPECT_FALSE(work->wait_for(std::chrono::milliseconds(1)));
        EXPECT_FALSE(work->wait_for(std::chrono::milliseconds(0)));
      }
      world.store().set("seen", std::vector<std::uint8_t>{1});
      for (auto* work : {&scattered, &summed}) EXPECT_TRUE(work->wait_for(std::chrono::minutes(1)));
    } else {
      world.store().wait({"seen"});
      auto scattered = group.reduce_scatter(std::span(&transfer, 1), Reduce::sum);
      auto summed = group.all_reduce(sum);
      scattered.wait();
      summed.wait();
    }
    EXPECT_TRUE(at::equal(part, at::full({2}, 2.0f)));
    EXPECT_TRUE(at::equal(sum, at::full({3}, 2.0f)));
  });
  EXPECT_TRUE(Work().wait_for(std::chrono::milliseconds(0)));
}

// Messages that somebody has waited for in vain arrive all the same, and so do those after them.
TEST(WorkWaitFor, LeavesMessagesUnderWay) {
  run_ranks(2, [](World& world) {
    const auto& group = world.group();
    // A send of this size ends when its receive has begun.
    auto large = at::full({1 << 24}, 3.0f), small = at::full({2}, 4.0f);
    if (world.rank() == 0) {
      auto sent = group.send(large, 1);
      auto received = group.receive(small, 1);
      for (auto* work : {&sent, &received})
        for (int again = 0; again < 3; ++again) {
          EXPECT_FALSE(work->wait_for(std::chrono::milliseconds(1)));
          EXPECT_FALSE(work->done());
        }
      world.store().set("seen", std::vector<std::uint8_t>{1});
      sent.wait();
      EXPECT_TRUE(received.wait_for(std::chrono::minutes(1)));
      EXPECT_TRUE(sent.done() && received.done());
      EXPECT_TRUE(at::equal(small, at::full({2}, 5.0f)));
    } else {
      world.store().wait({"seen"});
      auto place = at::zeros({1 << 24});
      group.receive(place, 0).wait();
      EXPECT_TRUE(at::equal(place, large));
      group.send(at::full({2}, 5.0f), 0).wait();
    }
    group.barrier().wait();
  });
}

// What torch gives when it adds one part after the other, bit for bit.
TEST(ReduceParts, AddsInTheOrderOfTheParts) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kLong})
    for (const std::int64_t elements : kSizes)
      for (const int count : {2, 3, 5}) {
        SCOPED_TRACE(c10::toString(dtype) + std::string(" ") + std::to_string(elements));
        const auto parts = parts_of(count, elements, dtype);
        auto sum = parts[0].clone(), most = parts[0].clone();
        for (int part = 1; part < count; ++part) {
          sum.add_(parts[part]);
          most = at::maximum(most, parts[part]);
        }
        const auto out = at::empty({elements}, dtype);
        reduce_parts(out, pointers(parts), Reduce::sum);
        EXPECT_TRUE(at::equal(out, sum));
        reduce_parts(out, pointers(parts), Reduce::max);
        EXPECT_TRUE(at::equal(out, most));
        if (dtype == at::kLong) continue;
        reduce_parts(out, pointers(parts), Reduce::average);
        EXPECT_TRUE(at::equal(out, sum / count));
      }
}

TEST(ReduceParts, RoundsShortNumbersOnce) {
  for (const auto dtype : {at::kBFloat16, at::kHalf})
    for (const std::int64_t elements : kSizes)
      for (const int count : {2, 3, 5}) {
        SCOPED_TRACE(c10::toString(dtype) + std::string(" ") + std::to_string(elements));
        const auto parts = parts_of(count, elements, dtype);
        auto sum = parts[0].to(at::kFloat);
        for (int part = 1; part < count; ++part) sum.add_(parts[part].to(at::kFloat));
        const auto out = at::empty({elements}, dtype);
        reduce_parts(out, pointers(parts), Reduce::sum);
        EXPECT_TRUE(at::equal(out, sum.to(dtype)));
        reduce_parts(out, pointers(parts), Reduce::average);
        EXPECT_TRUE(at::equal(out, (sum / count).to(dtype)));
      }
}

TEST(ReduceParts, TheOutputMayBeAPart) {
  const auto parts = parts_of(3, 5000, at::kFloat);
  const auto want = at::empty({5000});
  reduce_parts(want, pointers(parts), Reduce::sum);
  for (int at = 0; at < 3; ++at) {
    auto copies = parts;
    copies[at] = parts[at].clone();
    reduce_parts(copies[at], pointers(copies), Reduce::sum);
    EXPECT_TRUE(at::equal(copies[at], want));
  }
}

TEST(ReduceParts, NaNAndInfinityAreNotLost) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto all = [&](float value) { return at::full({9}, value, dtype); };
    const auto out = at::empty({9}, dtype);
    for (const Reduce op : {Reduce::sum, Reduce::average, Reduce::max}) {
      const std::vector<at::Tensor> first{all(nan), all(1)}, second{all(1), all(nan)}, large{all(1), all(infinity)};
      reduce_parts(out, pointers(first), op);
      EXPECT_TRUE(std::isnan(out[8].item<float>()));
      reduce_parts(out, pointers(second), op);
      EXPECT_TRUE(std::isnan(out[8].item<float>()));
      reduce_parts(out, pointers(large), op);
      EXPECT_EQ(out[8].item<float>(), infinity);
    }
  }
}

TEST(ReceiveBuffers, AreNeverMoreThanWereUsedAtOnce) {
  ReceiveBuffers pool;
  auto small = pool.take(100), large = pool.take(1000);
  const void *first = small.const_data_ptr(), *second = large.const_data_ptr();
  pool.give_back(std::move(small));
  pool.give_back(std::move(large));
  // The next step finds what the first has taken, each where it fits best.
  small = pool.take(90);
  large = pool.take(1000);
  EXPECT_EQ(small.const_data_ptr(), first);
  EXPECT_EQ(large.const_data_ptr(), second);
  pool.give_back(std::move(small));
  // A larger one takes the place of the one that is too small.
  auto larger = pool.take(5000);
  pool.give_back(std::move(larger));
  pool.give_back(std::move(large));
  EXPECT_EQ(pool.take(1).numel(), 1000);
  EXPECT_EQ(pool.take(1).numel(), 5000);
  EXPECT_EQ(pool.take(1).numel(), 1);
}

// Counts what this thread allocates.
class Allocated : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    if (bytes > 0) total += bytes;
  }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t total = 0;
};

TEST(GlooExchange, TheSecondStepAllocatesNothing) {
  run_ranks(3, [](World& world) {
    const Group& group = world.group();
    auto whole = at::ones({30'000}), norms = at::ones({3000}, at::kBFloat16);
    const std::vector<Transfer> transfers{{whole, whole.narrow(0, world.rank() * 10'000, 10'000)},
                                          {norms, norms.narrow(0, world.rank() * 1000, 1000)}};
    for (int step = 0; step < 3; ++step) {
      const auto allocated = std::make_shared<Allocated>();
      {
        const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, allocated);
        Work first = group.reduce_scatter(transfers), second = group.all_gather(whole, transfers[0].part);
        first.wait();
        second.wait();
      }
      // Two of three parts of each come from others; a gather needs nothing.
      EXPECT_EQ(allocated->total, step == 0 ? 2 * (10'000 * 4 + 1000 * 2) : 0);
    }
  });
}

// Messages of a batch and the messages inside a collective do not meet.
TEST(GlooExchange, DoesNotDisturbMessages) {
  run_ranks(2, [](World& world) {
    const Group& group = world.group();
    const int other = 1 - world.rank();
    auto got = at::zeros({5}), whole = at::zeros({10});
    const std::vector<Message> messages{{Message::Way::send, at::full({5}, world.rank() + 1.0), other},
                                        {Message::Way::receive, got, other}};
    Work batch, gather;
    if (world.rank() == 0) batch = group.batch(messages);
    gather = group.all_gather(whole, at::full({5}, 10.0 * (world.rank() + 1)));
    if (world.rank() == 1) batch = group.batch(messages);
    gather.wait();
    batch.wait();
    EXPECT_EQ(got.sum().item<float>(), 5 * (other + 1));
    EXPECT_EQ(whole.sum().item<float>(), 5 * 10 + 5 * 20);
  });
}

// A rank that leaves is told to the one that waits for it.
TEST(GlooExchange, AMissingPeerIsNamedAsSuch) {
  run_ranks(2,
            [](World& world) {
              if (world.rank() == 1) return;
              auto whole = at::zeros({10});
              EXPECT_THROW(world.group().all_gather(whole, whole.narrow(0, 0, 5)).wait(), PeerLost);
            },
            {.timeout = std::chrono::seconds(2)});
}

}  // namespace
}  // namespace bonfire::exchange_test
