#include "bonfire/schedule/text.h"

#include <gtest/gtest.h>

#include "bonfire/base/error.h"
#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/lowering.h"

namespace bonfire::schedule::text_test {
namespace {

TEST(Text, EveryFormIsReadAsItWasWritten) {
  for (const auto& name : schedule_names()) {
    const Schedule plain = generate(name, {.ranks = 4, .microbatches = 8, .chunks = natural_chunks(name)});
    const Schedule full = lower(plain, {.sharded_parameters = true, .reductions = true, .tied = {{0, plain.stages - 1}}});
    for (const Schedule& schedule : {plain, full}) {
      EXPECT_EQ(parse_table(table_text(schedule), "t"), schedule) << name;
      const Timeline timeline = simulate(schedule);
      EXPECT_EQ(parse_table(table_text(schedule, timeline), "t"), schedule) << name;
      EXPECT_EQ(parse_table(table_text(schedule, timeline, {.width = 80}), "t"), schedule) << name;
    }
  }
}

TEST(Text, NoLineIsWiderThanAsked) {
  const Schedule schedule = interleaved({.ranks = 4, .microbatches = 16, .chunks = 2});
  const std::string text = table_text(schedule, simulate(schedule), {.width = 72});
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    EXPECT_LE(end - begin, 72);
    begin = end + 1;
  }
}

TEST(Text, PeopleMayLeaveOutRanksAndWriteComments) {
  const Schedule expected = parse_table("rank 0: 0F0 0B0 0U\nrank 1: 1F0 1B0 1U\n", "t");
  EXPECT_EQ(parse_table("# mine\n0F0 . . . 0B0 - 0U   # the first\n\n\t1F0 1B0 -- 1U", "t"), expected);
  EXPECT_EQ(parse_table("rank 1: 1F0\nrank 0: 0F0\r\nrank 1: 1B0 1U\nrank 0 : 0B0 0U", "t"), expected);
  EXPECT_EQ(expected.stages, 2);
  EXPECT_EQ(expected.microbatches, 1);
}

void expect_refused(const std::string& text, const std::string& message) {
  try {
    parse_table(text, "my.txt");
    FAIL() << text;
  } catch (const ConfigError& error) {
    EXPECT_EQ(std::string(error.what()).substr(0, message.size()), message);
  }
}

TEST(Text, MistakesAreNamedWithTheirLine) {
  expect_refused("0F0 0B0\n1F0 1X0", "my.txt:2: '1X0' is no action; allowed: 2F0 2B0 2I0 2W0 2U, ");
  expect_refused("rank 0: 0F0\n1F0", "my.txt:2: some lines begin with 'rank N:' and some do not; allowed: all or none");
  expect_refused("rank zero: 0F0", "my.txt:1: rank 'zero'; allowed: 0 to 65535");
  expect_refused("rank 70000: 0F0", "my.txt:1: rank '70000'; allowed: 0 to 65535");
  expect_refused("rank 0 0F0", "my.txt:1: 'rank' without a number and a colon");
  expect_refused("rank 2: 0F0", "my.txt: rank 0 of 3 does nothing");
  expect_refused("0F99999999", "my.txt:1: '0F99999999': numbers must be below");
  expect_refused("# nothing\n", "my.txt: no rank does anything");
  EXPECT_THROW(read_table("/nowhere/at/all.txt"), ConfigError);
  EXPECT_THROW(read_table("/"), ConfigError);
}

TEST(Text, TheMarkedCellStandsInBrackets) {
  const Schedule small = one_f_one_b({.ranks = 2, .microbatches = 1});
  EXPECT_EQ(marked_table(small, {1, 1}),
            "rank 0: 0F0 0B0   0U\n"
            "rank 1: 1F0 [1B0] 1U\n");
  const Schedule large = one_f_one_b({.ranks = 64, .microbatches = 256});
  const std::string text = marked_table(large, {40, 200});
  EXPECT_NE(text.find("[" + to_text(large.at({40, 200})) + "]"), std::string::npos);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 9);
  EXPECT_LT(text.size(), 9 * 130u);
}

}  // namespace
}  // namespace bonfire::schedule::text_test
