#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <vector>

#include "bonfire/comm/device.h"
#include "tests/cli/command.h"

// Bad input: exit code 2 before anything starts, and one line that names the thing, its value and what is allowed.
namespace bonfire::errors_test {
namespace {

struct Bad {
  const char* name;
  std::string config;
  std::string arguments;  // after `train a.toml`
  std::vector<std::string> parts;
};

constexpr const char* tiny = "[model]\ndim = 16\nlayers = 1\nheads = 2\nvocab = 32\n[data]\nsequence = 8\n";

class BadInput : public ::testing::TestWithParam<Bad> {};

TEST_P(BadInput, EndsWithTwoAndOneLine) {
  const auto& bad = GetParam();
  const bonfire::testing::Scratch scratch;
  scratch.write("a.toml", bad.config);
  // Tokens 0 to 99 in llm.c's format: 256 int32 of header, then uint16.
  std::vector<std::int32_t> header(256);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = 100;
  std::ofstream tokens(scratch.path() / "tokens.bin", std::ios::binary);
  tokens.write(reinterpret_cast<const char*>(header.data()), 1024);
  for (std::uint16_t token = 0; token < 100; ++token) tokens.write(reinterpret_cast<const char*>(&token), 2);
  tokens.close();

  const auto ended = scratch.bonfire("train a.toml " + bad.arguments);
  EXPECT_EQ(ended.code, 2) << ended.err;
  EXPECT_EQ(ended.out, "");
  EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
  for (const auto& part : bad.parts)
    EXPECT_NE(ended.err.find(part), std::string::npos) << part << " is not in: " << ended.err;
  EXPECT_FALSE(std::filesystem::exists(scratch.path() / "runs")) << "something was started";
}

INSTANTIATE_TEST_SUITE_P(
    Train, BadInput,
    ::testing::Values(
        Bad{"unknown_key", "[model]\nlayer = 6\n", "", {"a.toml:2", "model.layer = 6", "did you mean layers?"}},
        Bad{"wrong_type", "[train]\nsteps = \"many\"\n", "", {"a.toml:2", "train.steps = \"many\"", "an integer"}},
        Bad{"negative", "[train]\nbatch = -1\n", "", {"a.toml:2", "train.batch = -1", "at least 1"}},
        Bad{"huge", "[train]\nbatch = 9223372036854775807\n", "", {"a.toml:2", "train.batch", "at most 1000000000"}},
        Bad{"huge_layout", "[layout]\nreplicate = 9223372036854775807\n", "", {"a.toml:2", "layout.replicate", "at most"}},
        Bad{"only_servers",
            "[layout]\nserver = 3\n",
            "--ranks 3",
            {"a.toml:2", "layout.server = 3", "there are 3 ranks", "allowed: 0 to 2"}},
        Bad{"server_staleness",
            "[layout]\nserver = 1\nserver_mode = \"bounded\"\nserver_staleness = -1\n",
            "",
            {"a.toml:4", "layout.server_staleness = -1", "at least 0"}},
        Bad{"sharded_beside_a_server",
            "[layout]\nserver = 1\nshard = 2\n",
            "",
            {"a.toml:3", "layout.shard = 2", "beside a parameter server"}},
        Bad{"server_policy",
            "[layout]\nserver = 1\nserver_lost = \"ignore\"\n",
            "",
            {"a.toml:3", "layout.server_lost = \"ignore\"", "stop | drop | wait"}},
        Bad{"server_without", "[layout]\nserver_mode = \"bounded\"\n", "", {"a.toml:2", "there is no parameter server"}},
        Bad{"product_of_axes",
            "[layout]\nreplicate = 2\n",
            "--ranks 3",
            {"a.toml:2", "layout.replicate = 2", "but there are 3"}},
        Bad{"batch_not_divided",
            "[train]\nbatch = 8\n",
            "--ranks 3",
            {"a.toml:2", "train.batch = 8", "3 data-parallel ranks", "a multiple of 3"}},
        Bad{"missing_token_file",
            "[data]\ntype = \"tokens\"\npaths = [\"nowhere.bin\"]\n",
            "--ranks 2",
            {"a.toml:3", "nowhere.bin", "exist"}},
        Bad{"token_beyond_the_vocabulary",
            std::string(tiny) + "type = \"tokens\"\npaths = [\"tokens.bin\"]\n",
            "--ranks 2",
            {"a.toml:9", "tokens.bin", "32"}},
        Bad{"bad_name", "", "--set run.name=../x", {"--set run.name=../x", "letters"}},
        Bad{"heads", "[model]\nheads = 7\n", "", {"a.toml:2", "model.heads", "7", "256"}},
        Bad{"chunks_of_a_sequence",
            "[layout]\ncontext = 3\n",
            "--ranks 3",
            {"a.toml:2", "layout.context = 3", "data.sequence = 256 cannot be cut into 6 chunks"}},
        Bad{"heads_over_ranks", "[layout]\ntensor = 3\n", "--ranks 3", {"a.toml:2", "layout.tensor = 3", "model.heads"}}),
    [](const auto& info) { return info.param.name; });

TEST(BadDevice, AGpuThatIsNotThereIsRefused) {
  if (gpu_available()) GTEST_SKIP() << "there is a GPU";
  const bonfire::testing::Scratch scratch;
  scratch.write("a.toml", "[run]\ndevice = \"cuda\"\n");
  const auto ended = scratch.bonfire("train a.toml --ranks 2");
  EXPECT_EQ(ended.code, 2) << ended.err;
  EXPECT_NE(ended.err.find("a.toml:2: run.device = \"cuda\": " + gpu_unavailable_reason()), std::string::npos) << ended.err;
  EXPECT_NE(ended.err.find("allowed here: auto | cpu"), std::string::npos) << ended.err;
}

TEST(BadArguments, EndWithTwo) {
  const bonfire::testing::Scratch scratch;
  scratch.write("a.toml", "");
  EXPECT_EQ(scratch.bonfire("train nowhere.toml").code, 2);
  EXPECT_EQ(scratch.bonfire("train a.toml --ranks 0").code, 2);
  EXPECT_EQ(scratch.bonfire("train a.toml --ranks 100000 --set train.batch=100000").code, 2);
  EXPECT_EQ(scratch.bonfire("train a.toml --set nonsense").code, 2);
  EXPECT_EQ(scratch.bonfire("train").code, 2);
  EXPECT_EQ(scratch.bonfire("trian a.toml").code, 2);
  EXPECT_EQ(scratch.bonfire("train a.toml --resume latest").code, 2);
}

}  // namespace
}  // namespace bonfire::errors_test
