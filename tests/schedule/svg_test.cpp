#include "bonfire/schedule/svg.h"

#include <gtest/gtest.h>

#include <regex>
#include <string>

#include "bonfire/schedule/generate.h"
#include "bonfire/schedule/lowering.h"

namespace bonfire::schedule::svg_test {
namespace {

struct Box {
  double left, top, width;
};

// Of the elements with a fill that matches.
std::vector<Box> boxes(const std::string& svg, const std::string& fill) {
  const std::regex pattern(R"re(<rect x="([0-9.]+)" y="([0-9.]+)" width="([0-9.]+)" height="26" fill=")re" + fill + "\"");
  std::vector<Box> result;
  for (auto it = std::sregex_iterator(svg.begin(), svg.end(), pattern); it != std::sregex_iterator(); ++it)
    result.push_back({std::stod((*it)[1]), std::stod((*it)[2]), std::stod((*it)[3])});
  return result;
}

// Every element that is opened is closed, in order.
bool well_formed(const std::string& svg) {
  std::vector<std::string> open;
  const std::regex tag(R"re(<(/?)([a-z]+)((?:[^<>"]|"[^"<]*")*?)(/?)>)re");
  std::string rest = std::regex_replace(svg, tag, "");
  if (rest.find('<') != std::string::npos || rest.find('>') != std::string::npos) return false;
  for (auto it = std::sregex_iterator(svg.begin(), svg.end(), tag); it != std::sregex_iterator(); ++it) {
    if ((*it)[1].length() > 0) {
      if (open.empty() || open.back() != (*it)[2]) return false;
      open.pop_back();
    } else if ((*it)[4].length() == 0) {
      open.push_back((*it)[2]);
    }
  }
  return open.empty();
}

TEST(Svg, HasABoxForEveryComputationAndABubbleBehindThem) {
  for (const auto& name : schedule_names()) {
    const Schedule plain = generate(name, {.ranks = 4, .microbatches = 8, .chunks = natural_chunks(name)});
    for (const Schedule& schedule : {plain, lower(plain)}) {
      const Timeline timeline = simulate(schedule, StageCosts{.update = 1});
      const std::string svg = svg_picture(schedule, timeline, {.title = name});
      EXPECT_TRUE(well_formed(svg)) << name;
      std::size_t computations = 0;
      for (const auto& row : plain.rows) computations += row.size();
      const auto cells = boxes(svg, "#[0-9a-f]{6}"), bubbles = boxes(svg, R"(url\(#bubble\))");
      EXPECT_EQ(cells.size(), computations) << name;
      ASSERT_EQ(bubbles.size(), 4) << name;
      // Ink and paper: what is not covered by boxes is the bubble.
      double covered = 0;
      for (const Box& box : cells) covered += box.width;
      EXPECT_NEAR(1 - covered / (4 * bubbles[0].width), timeline.bubble, 1e-3) << name;
    }
  }
}

TEST(Svg, TitlesMayHoldAnything) {
  const Schedule schedule = one_f_one_b({.ranks = 1, .microbatches = 1});
  const std::string svg = svg_picture(schedule, simulate(schedule), {.title = "<my> & \"yours\""});
  EXPECT_TRUE(well_formed(svg));
  EXPECT_NE(svg.find("&lt;my&gt; &amp; &quot;yours&quot;"), std::string::npos);
}

TEST(Svg, AStepThatTakesNoTimeIsAPictureToo) {
  const Schedule schedule = one_f_one_b({.ranks = 2, .microbatches = 1});
  const std::string svg = svg_picture(schedule, simulate(schedule, StageCosts{.forward = 0, .backward = 0}));
  EXPECT_TRUE(well_formed(svg));
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

}  // namespace
}  // namespace bonfire::schedule::svg_test
