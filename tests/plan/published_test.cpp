#include "bonfire/plan/published_activations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

// Published figures against the closed forms: tests/plan/megatron_2205.05198.csv says where they are from.
namespace bonfire::plan::published_test {
namespace {

TEST(Published, ActivationsOfMegatron) {
  std::ifstream in(BONFIRE_SOURCE_DIR "/tests/plan/megatron_2205.05198.csv");
  int rows = 0;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#' || line.starts_with("model")) continue;
    std::string cells = line;
    std::replace(cells.begin(), cells.end(), ',', ' ');
    std::istringstream row(cells);
    std::string model, kept, unit;
    double layers = 0, pipeline = 0, chunks = 0, value = 0;
    PublishedLayer layer;
    row >> model >> layers >> layer.dim >> layer.heads >> layer.sequence >> layer.samples >> layer.tensor >> pipeline >>
        chunks >> kept >> value >> unit;
    ASSERT_TRUE(row) << line;
    ++rows;
    auto of = layer;
    of.sequence_parallel = kept.find("sequence") != std::string::npos;
    const auto recomputed = kept.ends_with("attention") ? Recomputed::attention
                            : kept.ends_with("layer")   ? Recomputed::layer
                                                        : Recomputed::nothing;
    const double bytes = published_bytes(of, recomputed);
    if (unit == "GiB")
      EXPECT_NEAR(bytes * published_layers_held(layers, pipeline, chunks) / (1 << 30), value, 1e-9 * value) << line;
    else
      // Read from a picture.
      EXPECT_NEAR(100 * bytes / published_bytes(layer, Recomputed::nothing), value, 0.15) << line;
  }
  EXPECT_EQ(rows, 28);
  // Of one rank alone: 34 sbh + 5 a s^2 b.
  EXPECT_EQ(published_bytes({.sequence = 8, .samples = 3, .dim = 16, .heads = 4}, Recomputed::nothing),
            34 * 8 * 3 * 16 + 5 * 4 * 8 * 8 * 3);
}

}  // namespace
}  // namespace bonfire::plan::published_test
