#include "bonfire/train/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <vector>

#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"

namespace bonfire::metrics_test {
namespace {

namespace fs = std::filesystem;

class Metrics : public ::testing::Test {
 protected:
  Metrics() {
    auto pattern = (fs::temp_directory_path() / "bonfire-metrics-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~Metrics() override { fs::remove_all(folder_); }

  std::vector<std::int64_t> steps() const {
    std::vector<std::int64_t> found;
    std::ifstream file(path());
    for (std::string line; std::getline(file, line);) found.push_back(nlohmann::json::parse(line).at("step"));
    return found;
  }
  fs::path path() const { return folder_ / "metrics.jsonl"; }

  fs::path folder_;
};

TEST_F(Metrics, ALineHoldsEveryKeyAndEveryBit) {
  const StepMetrics metrics{.step = 12,
                            .loss = 0.1 + 0.2,
                            .grad_norm = 1.0 / 3,
                            .lr = 3e-4,
                            .tokens_per_second = 12345.678901234567,
                            .memory_bytes = 1LL << 40,
                            .skipped = 2};
  const auto line = nlohmann::json::parse(to_json(metrics));
  EXPECT_EQ(line.size(), 7);
  EXPECT_EQ(line.at("step"), 12);
  EXPECT_EQ(line.at("loss").get<double>(), 0.1 + 0.2);
  EXPECT_EQ(line.at("grad_norm").get<double>(), 1.0 / 3);
  EXPECT_EQ(line.at("lr").get<double>(), 3e-4);
  EXPECT_EQ(line.at("tokens_per_second").get<double>(), 12345.678901234567);
  EXPECT_EQ(line.at("memory_bytes"), 1LL << 40);
  EXPECT_EQ(line.at("skipped"), 2);

  auto more = metrics;
  more.staleness = 3;
  more.eval_loss = 1.5;
  more.loss = std::numeric_limits<double>::quiet_NaN();
  const auto longer = nlohmann::json::parse(to_json(more));
  EXPECT_EQ(longer.at("staleness"), 3);
  EXPECT_EQ(longer.at("eval_loss"), 1.5);
  EXPECT_TRUE(longer.at("loss").is_null());
}

TEST_F(Metrics, AResumedRunWritesLaterStepsAgain) {
  {
    MetricsFile file(path());
    for (std::int64_t step = 1; step <= 7; ++step) {
      file.write({.step = step});
      EXPECT_EQ(steps().back(), step);  // there while the file is still open
    }
  }
  std::ofstream(path(), std::ios::app) << R"({"step":8,"los)";
  {
    MetricsFile file(path(), 5);
    file.write({.step = 5});
  }
  EXPECT_EQ(steps(), (std::vector<std::int64_t>{1, 2, 3, 4, 5}));
  MetricsFile fresh(path());
  EXPECT_TRUE(steps().empty());
}

TEST_F(Metrics, SaysWhichFileCannotBeWritten) {
  try {
    MetricsFile file(folder_ / "none" / "metrics.jsonl");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("none/metrics.jsonl"), std::string::npos);
  }
}

TEST_F(Metrics, TheLastStepOfAFileIsThatOfItsLastWholeLine) {
  EXPECT_FALSE(last_step(path()));
  {
    MetricsFile file(path());
    EXPECT_FALSE(last_step(path()));
    for (const std::int64_t step : {1, 2, 3}) file.write({.step = step});
  }
  EXPECT_EQ(last_step(path()), 3);
  std::ofstream(path(), std::ios::app) << "{\"step\":4,\"lo";
  EXPECT_EQ(last_step(path()), 3);
}

}  // namespace
}  // namespace bonfire::metrics_test
