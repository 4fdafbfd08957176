#include "bonfire/train/report.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace bonfire::report_test {
namespace {

bool says(const TrainReport& report, const std::string& words) { return summary(report).find(words) != std::string::npos; }

TEST(Report, CountsInEnglish) {
  TrainReport report{.name = "a", .steps = 1, .skipped = 1, .peak_memory_bytes = 1};
  EXPECT_TRUE(says(report, "after 1 step\n")) << summary(report);
  EXPECT_TRUE(says(report, "1 step without an update")) << summary(report);
  report.steps = report.skipped = 2;
  EXPECT_TRUE(says(report, "after 2 steps\n")) << summary(report);
  EXPECT_TRUE(says(report, "2 steps without an update")) << summary(report);
}

TEST(Report, SaysThatARunWasResumed) {
  TrainReport report{.name = "a", .steps = 8, .loss_first = 1.5, .peak_memory_bytes = 1};
  EXPECT_TRUE(says(report, "1.5000 in the first step, ")) << summary(report);
  EXPECT_FALSE(nlohmann::json::parse(to_json(report)).contains("resumed_after"));
  report.resumed_after = 6;
  EXPECT_TRUE(says(report, "1.5000 in step 7, the first since it was resumed, ")) << summary(report);
  EXPECT_EQ(nlohmann::json::parse(to_json(report)).at("resumed_after"), 6);
}

TEST(Report, ClaimsNothingAboutCommunicationThatWasNotMeasured) {
  TrainReport report{.name = "a", .peak_memory_bytes = 1};
  EXPECT_TRUE(nlohmann::json::parse(to_json(report)).at("exposed_communication").is_null());
  EXPECT_FALSE(says(report, "waiting"));
  report.exposed_communication = 0.125;
  EXPECT_EQ(nlohmann::json::parse(to_json(report)).at("exposed_communication"), 0.125);
  EXPECT_TRUE(says(report, "12.5% of it waiting for other ranks")) << summary(report);
}

}  // namespace
}  // namespace bonfire::report_test
