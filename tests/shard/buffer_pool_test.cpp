#include "bonfire/shard/buffer_pool.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "bonfire/base/error.h"

namespace bonfire::buffer_pool_test {
namespace {

TEST(BufferPool, HoldsWhatWasLentAtOnce) {
  BufferPool pool(at::kCPU);
  EXPECT_EQ(pool.bytes(), 0);
  {
    const auto a = pool.borrow(1024), b = pool.borrow(1024);
    EXPECT_NE(a->data(), b->data());
    EXPECT_EQ(pool.lent(), 2u);
    EXPECT_EQ(pool.bytes(), 2048);
  }
  EXPECT_EQ(pool.lent(), 0u);
  for (int round = 0; round < 3; ++round) {
    const auto a = pool.borrow(1024), b = pool.borrow(1000);
    EXPECT_EQ(pool.bytes(), 2048) << "what was given back is lent again";
  }
}

TEST(BufferPool, ALoanEndsWithItsLastHolder) {
  BufferPool pool(at::kCPU);
  auto a = pool.borrow(100);
  auto also = a;
  a.reset();
  EXPECT_EQ(pool.lent(), 1u);
  EXPECT_NE(pool.borrow(100)->data(), also->data());
  also.reset();
  EXPECT_EQ(pool.lent(), 0u);
}

TEST(BufferPool, TakesTheSmallestThatIsLargeEnough) {
  BufferPool pool(at::kCPU);
  const void *large, *small;
  {
    const auto a = pool.borrow(4096), b = pool.borrow(1024);
    large = a->data(), small = b->data();
  }
  EXPECT_EQ(pool.borrow(600)->data(), small);
  EXPECT_EQ(pool.borrow(1025)->data(), large);
  const auto first = pool.borrow(600), second = pool.borrow(600);
  EXPECT_EQ(first->data(), small);
  EXPECT_EQ(second->data(), large) << "rather a larger one than a new one";
  EXPECT_EQ(pool.bytes(), 5120);
}

TEST(BufferPool, SizesOfOneClassShareBuffers) {
  BufferPool pool(at::kCPU);
  const void* const one = pool.borrow(1)->data();
  EXPECT_EQ(pool.bytes(), 512);
  EXPECT_EQ(pool.borrow(512)->data(), one);
  pool.borrow(513);
  EXPECT_EQ(pool.bytes(), 512 + 1024);
}

// A graph of captured work freezes addresses, and caches are warm: the same place of a step gets the same memory.
TEST(BufferPool, APlaceGetsItsBufferAgain) {
  BufferPool pool(at::kCPU);
  std::vector<std::shared_ptr<PoolBuffer>> loans;
  for (int place = 0; place < 3; ++place) loans.push_back(pool.borrow(1024, place));
  std::vector<const void*> first;
  for (const auto& loan : loans) first.push_back(loan->data());
  for (const std::vector<int>& order : {std::vector{2, 0, 1}, {1, 2, 0}, {0, 1, 2}}) {
    loans.clear();
    for (const int place : order) {
      loans.push_back(pool.borrow(1024, place));
      EXPECT_EQ(loans.back()->data(), first[static_cast<std::size_t>(place)]);
    }
  }
  // Where it is lent, another one does; from then on that one.
  loans.clear();
  const auto holds = pool.borrow(1024, 1);
  const void* const other = pool.borrow(1024, 1)->data();
  EXPECT_NE(other, first[1]);
  EXPECT_EQ(pool.borrow(1024, 1)->data(), other);
  EXPECT_EQ(pool.bytes(), 3072);
  // A place knows its buffer by the size of the loan too.
  EXPECT_NE(pool.borrow(2048, 1)->data(), other);
}

TEST(BufferPool, BytesAreTheLoans) {
  BufferPool pool(at::kCPU);
  const auto loan = pool.borrow(100);
  const auto bytes = loan->bytes(100);
  EXPECT_EQ(bytes.data_ptr(), loan->data());
  EXPECT_EQ(bytes.numel(), 100);
  EXPECT_EQ(bytes.scalar_type(), at::kByte);
  EXPECT_THROW(pool.borrow(0), Error);
}

}  // namespace
}  // namespace bonfire::buffer_pool_test
