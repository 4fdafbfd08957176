#include "bonfire/shard/course.h"

#include <gtest/gtest.h>

#include <string>

namespace bonfire::course_test {
namespace {

using Entries = std::vector<Course::Entry>;

// "g0" gathers, "u0" uses, "f0" lets go in forward, "b0" in backward.
Entries course_of(const std::vector<std::string>& notes) {
  CourseNotes pass;
  for (const auto& note : notes) {
    const auto unit = static_cast<std::size_t>(note[1] - '0');
    switch (note[0]) {
      case 'g': pass.gathered(unit); break;
      case 'u': pass.used(unit); break;
      case 'f': pass.released(unit, /*forward=*/true); break;
      default: pass.released(unit, /*forward=*/false); break;
    }
  }
  return pass.course().entries;
}

TEST(Course, OfNothingIsEmpty) { EXPECT_EQ(course_of({}), Entries{}); }

// The last Unit of forward is the first of backward: it stays, and its one gather serves both.
TEST(Course, OfAStepKeepsTheLastUnit) {
  EXPECT_EQ(course_of({"g0", "u0", "f0", "g1", "u1", "f1", "g2", "u2", "f2",  //
                       "g2", "u2", "b2", "g1", "u1", "b1", "g0", "u0", "b0"}),
            (Entries{{.unit = 0, .uses = 1},
                     {.unit = 1, .uses = 1},
                     {.unit = 2, .uses = 2},
                     {.unit = 1, .uses = 1, .from_kept = true},
                     {.unit = 0, .uses = 1, .from_kept = true}}));
}

// Two versions of a Unit are two gathers, also where nothing else lies between them.
TEST(Course, OfTwoVersionsGathersBoth) {
  CourseNotes pass;
  for (const int behind : {0, 1, 1}) {
    pass.gathered(0, behind);
    pass.used(0);
    pass.released(0, /*forward=*/false);
  }
  EXPECT_EQ(pass.course().entries, (Entries{{.unit = 0, .uses = 1}, {.unit = 0, .uses = 2, .behind = 1}}));
}

TEST(Course, OfAnEvaluationGathersOnce) {
  EXPECT_EQ(course_of({"g0", "u0", "b0", "g1", "u1", "b1"}), (Entries{{.unit = 0, .uses = 1}, {.unit = 1, .uses = 1}}));
}

// A Unit that runs twice in a row is gathered once; one with another between is gathered twice.
TEST(Course, OfUnitsThatRunTwice) {
  EXPECT_EQ(course_of({"g0", "u0", "f0", "g0", "u0", "f0"}), (Entries{{.unit = 0, .uses = 2}}));
  EXPECT_EQ(course_of({"g0", "u0", "f0", "g1", "u1", "f1", "g0", "u0", "f0"}),
            (Entries{{.unit = 0, .uses = 1}, {.unit = 1, .uses = 1}, {.unit = 0, .uses = 1, .from_kept = true}}));
}

// A Unit that stays while another is gathered needs no gather of its own in between.
TEST(Course, OfNestedUnitsCountsTheirUses) {
  EXPECT_EQ(course_of({"g0", "u0", "g1", "u1", "f1", "u0", "b0"}),
            (Entries{{.unit = 0, .uses = 2}, {.unit = 1, .uses = 1}}));
}

// Cancelling is repeated: what lies between two gathers of a Unit may have gone itself.
TEST(Course, OfAPairThatTurnsBackAtOnce) {
  // 1 stays over the turn; 0 was let go before it was gathered, so it comes in again.
  EXPECT_EQ(course_of({"g0", "u0", "f0", "g1", "u1", "f1", "g1", "u1", "b1", "g0", "u0", "b0"}),
            (Entries{{.unit = 0, .uses = 1}, {.unit = 1, .uses = 2}, {.unit = 0, .uses = 1, .from_kept = true}}));
}

// Whether a gather comes from what was kept follows from where the Unit was let go last.
TEST(Course, GathersFromWhatWasKeptInForwardOnly) {
  const auto entries = course_of({"g0", "u0", "f0", "g1", "u1", "f1", "g0", "u0", "b0", "g1", "u1", "b1", "g0", "u0", "b0"});
  ASSERT_EQ(entries.size(), 5u);
  EXPECT_TRUE(entries[2].from_kept);
  EXPECT_TRUE(entries[3].from_kept);
  EXPECT_FALSE(entries[4].from_kept) << "after backward nothing was kept";
}

TEST(Course, EveryUseHasItsGather) {
  const auto entries = course_of({"g3", "u3", "u3", "u3", "f3", "g1", "u1", "b1"});
  EXPECT_EQ(entries, (Entries{{.unit = 3, .uses = 3}, {.unit = 1, .uses = 1}}));
}

// A Unit that stays for the next computation is gathered in the one before.
TEST(Course, KnowsWhereComputationsEnd) {
  CourseNotes pass;
  for (const auto unit : {std::size_t{0}, std::size_t{1}})
    pass.gathered(unit), pass.used(unit), pass.released(unit, /*forward=*/true);
  pass.computation_ended();
  for (const auto unit : {std::size_t{1}, std::size_t{0}})
    pass.gathered(unit), pass.used(unit), pass.released(unit, /*forward=*/false);
  pass.computation_ended();
  const auto course = pass.course();
  EXPECT_EQ(course.entries.size(), 3u);
  EXPECT_EQ(course.ends, (std::vector<std::size_t>{2, 3}));
}

}  // namespace
}  // namespace bonfire::course_test
