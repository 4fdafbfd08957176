// The books of a server, without tensors or threads.
#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/server/ledger.h"
#include "tests/support/thrown.h"

namespace bonfire::ledger_test {
namespace {

using Workers = std::vector<int>;

Push push(int worker, std::int64_t step, std::int64_t version) {
  return {.worker = worker, .step = step, .versions = {version, version}};
}

TEST(Ledger, SynchronousUpdatesTakeAllWorkersInTheirOrder) {
  Ledger ledger({.workers = 3});
  ledger.add(push(2, 1, 0));
  ledger.add(push(0, 1, 0));
  EXPECT_FALSE(ledger.next());
  ledger.add(push(1, 1, 0));
  ASSERT_EQ(ledger.next(), (Workers{0, 1, 2}));
  EXPECT_FALSE(ledger.outcome(0));
  const auto taken = ledger.commit(*ledger.next());
  EXPECT_EQ(taken[2].worker, 2);
  EXPECT_EQ(ledger.version(), 1);
  EXPECT_TRUE(ledger.outcome(0)->used);
  EXPECT_FALSE(ledger.next());
}

TEST(Ledger, BackupWorkersGradientsThatAreLateAreDropped) {
  Ledger ledger({.workers = 3, .backup = 1});
  ledger.add(push(2, 1, 0));
  ledger.add(push(1, 1, 0));
  ASSERT_EQ(ledger.next(), (Workers{1, 2}));
  ledger.commit({1, 2});
  ledger.add(push(0, 1, 0));  // of weights that are gone
  ASSERT_TRUE(ledger.outcome(0));
  EXPECT_FALSE(ledger.outcome(0)->used);
  EXPECT_EQ(ledger.outcome(0)->version, 1);
  EXPECT_EQ(ledger.steps(0), 1);
  // One that had come, but not among the first.
  ledger.add(push(0, 2, 1));
  ledger.add(push(1, 2, 1));
  ledger.add(push(2, 2, 1));
  ASSERT_EQ(ledger.next(), (Workers{0, 1}));
  ledger.commit({0, 1});
  EXPECT_FALSE(ledger.outcome(2)->used);
  ASSERT_EQ(ledger.dropped().size(), 2u);
  EXPECT_EQ(ledger.dropped()[1].worker, 2);
  EXPECT_EQ(ledger.dropped()[1].step, 2);
}

// The servers answer a worker that was late each at its own moment: some may have gone on meanwhile, and others not.
TEST(Ledger, GradientsOfWeightsOfSeveralVersionsAreLateEverywhere) {
  Ledger ledger({.workers = 2, .backup = 1}), asynchronous({.mode = ServerMode::asynchronous, .workers = 2});
  auto mixed = push(1, 1, 0);
  mixed.mixed = true;
  ledger.add(mixed);
  EXPECT_FALSE(ledger.has(1));
  EXPECT_FALSE(ledger.outcome(1)->used);
  asynchronous.add(mixed);
  EXPECT_TRUE(asynchronous.has(1));
}

TEST(Ledger, AsynchronousUpdatesTakeOneAfterTheOther) {
  Ledger ledger({.mode = ServerMode::asynchronous, .workers = 2});
  ledger.add(push(1, 1, 0));
  ledger.add(push(0, 1, 0));
  ASSERT_EQ(ledger.next(), (Workers{1}));
  ledger.commit({1});
  ASSERT_EQ(ledger.next(), (Workers{0}));
  ledger.commit({0});
  EXPECT_EQ(ledger.version(), 2);
  EXPECT_TRUE(ledger.dropped().empty());
}

TEST(Ledger, ABoundHoldsTheFastestAndNobodyElse) {
  Ledger ledger({.mode = ServerMode::bounded, .workers = 2, .staleness = 2});
  for (int step = 1; step <= 3; ++step) {
    EXPECT_TRUE(ledger.may_go_on(1));
    ledger.add(push(1, step, step - 1));
    ledger.commit({1});
  }
  EXPECT_EQ(ledger.lead(1), 3);
  EXPECT_FALSE(ledger.may_go_on(1));
  EXPECT_TRUE(ledger.may_go_on(0));
  ledger.add(push(0, 1, 0));
  ledger.commit({0});
  EXPECT_TRUE(ledger.may_go_on(1));
  ledger.leave(0);
  EXPECT_EQ(ledger.lead(1), 0);
}

TEST(Ledger, AWorkerThatIsLostIsLeftOutOrWaitedFor) {
  Ledger drops({.workers = 2}), waits({.workers = 2});
  for (auto* ledger : {&drops, &waits}) {
    ledger->add(push(0, 1, 0));
    ledger->add(push(1, 1, 0));
  }
  drops.lose(1, false);
  EXPECT_EQ(drops.next(), (Workers{0}));
  waits.lose(1, true);
  EXPECT_FALSE(waits.next());
  EXPECT_FALSE(waits.has(1));
  waits.come_back(1);
  waits.add(push(1, 1, 0));
  EXPECT_EQ(waits.next(), (Workers{0, 1}));
}

TEST(Ledger, WhatAnUpdateHasClaimedOutlivesItsWorker) {
  Ledger ledger({.workers = 2});
  ledger.add(push(0, 1, 0));
  ledger.add(push(1, 1, 0));
  EXPECT_TRUE(ledger.claim(0));
  EXPECT_TRUE(ledger.claim(1));
  ledger.lose(1, false);
  EXPECT_TRUE(ledger.has(1));
  ledger.release();
  EXPECT_FALSE(ledger.has(1));
  EXPECT_TRUE(ledger.has(0));
}

// Of several servers one may have had all of a step when its worker was lost, and the others not: it is taken again.
TEST(Ledger, AStepIsUsedOnce) {
  for (const auto mode : {ServerMode::synchronous, ServerMode::asynchronous}) {
    Ledger ledger({.mode = mode, .workers = 2, .backup = mode == ServerMode::synchronous ? 1 : 0});
    ledger.add(push(1, 1, 0));
    ledger.commit({1});
    ledger.lose(1, true);
    ledger.come_back(1);
    ledger.add(push(1, 1, 1));
    EXPECT_FALSE(ledger.next());
    ASSERT_TRUE(ledger.outcome(1));
    EXPECT_TRUE(ledger.outcome(1)->used);
    EXPECT_EQ(ledger.steps(1), 1);
    EXPECT_EQ(ledger.last_update(1), 1);
    EXPECT_TRUE(ledger.dropped().empty());
    ledger.add(push(1, 2, 1));
    EXPECT_EQ(ledger.next(), (Workers{1}));
  }
}

TEST(Ledger, AWorkerSendsOneStepAtATime) {
  Ledger ledger({.workers = 2});
  ledger.add(push(0, 1, 0));
  testing::expect_part(testing::thrown<Error>([&] { ledger.add(push(0, 2, 0)); }),
                       "gradients of step 2 while those of step 1");
}

}  // namespace
}  // namespace bonfire::ledger_test
