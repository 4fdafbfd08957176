#include "bonfire/schedule/action.h"

#include <gtest/gtest.h>

namespace bonfire::schedule::action_test {
namespace {

TEST(Action, ReadsAsItIsWritten) {
  for (int kind = 0; kind < kKinds; ++kind) {
    for (const int stage : {0, 7, 123}) {
      for (const int microbatch : {0, 41}) {
        Action action{stage, static_cast<Kind>(kind), microbatch};
        if (!has_microbatch(action.kind)) action.microbatch = -1;
        const auto read = parse_action(to_text(action));
        ASSERT_TRUE(read) << to_text(action);
        EXPECT_EQ(*read, action);
      }
    }
  }
}

TEST(Action, HasTheFormThatPeopleWrite) {
  EXPECT_EQ(to_text({2, Kind::forward, 0}), "2F0");
  EXPECT_EQ(to_text({2, Kind::backward, 0}), "2B0");
  EXPECT_EQ(to_text({2, Kind::input_gradient, 0}), "2I0");
  EXPECT_EQ(to_text({2, Kind::weight_gradient, 0}), "2W0");
  EXPECT_EQ(to_text({2, Kind::update}), "2U");
  EXPECT_EQ(to_text({10, Kind::send_forward, 31}), "10SF31");
  EXPECT_EQ(to_text({2, Kind::unshard}), "2UNSHARD");
}

TEST(Action, WhatIsNoActionIsNotRead) {
  for (const char* text : {"", "F0", "2", "2F", "2f0", "2F0x", "2F-1", "-2F0", "2X0", "2U0", "2UNSHARD1", "2TIE", "2SF",
                           "2 F0", "99999999999F0", "2F99999999999"}) {
    EXPECT_FALSE(parse_action(text)) << text;
  }
}

}  // namespace
}  // namespace bonfire::schedule::action_test
