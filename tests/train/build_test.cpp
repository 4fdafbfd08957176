#include "bonfire/train/build.h"

#include <gtest/gtest.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

TEST(Build, RefusesBf16OnAGpuWithoutIt) {
  const Config bf16 = parse_config("[train]\nprecision = \"bf16\"\n", "a.toml");
  const GpuInfo old_gpu{.name = "Tesla V100", .memory_bytes = 0, .major = 7, .minor = 0};
  try {
    require_precision(bf16, old_gpu);
    FAIL();
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    for (const char* words :
         {"a.toml:2", "train.precision = \"bf16\"", "Tesla V100 has compute capability 7.0", "allowed on it: fp32 | fp16"})
      EXPECT_NE(message.find(words), std::string::npos) << message;
  }
  require_precision(bf16, {.name = "H200", .memory_bytes = 0, .major = 9, .minor = 0});
  require_precision(parse_config("[train]\nprecision = \"fp16\"\n", "a.toml"), old_gpu);
}

}  // namespace
}  // namespace bonfire
