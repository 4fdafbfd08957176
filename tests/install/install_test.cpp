#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "bonfire/base/version.h"
#include "tests/support/shell.h"

namespace bonfire::install_test {
namespace {

namespace fs = std::filesystem;
using testing::Folder;
using testing::run_shell;
using testing::Said;

// A folder that looks like LibTorch of another version.
void make_fake_libtorch(const std::string& folder, const std::string& version) {
  fs::create_directories(folder + "/include/torch/headeronly");
  std::ofstream(folder + "/include/torch/headeronly/version.h") << "#define TORCH_VERSION \"" << version << "\"\n";
}

std::string without_line_breaks(std::string text) {
  // CMake folds long messages.
  std::string joined;
  for (const char c : text) {
    const char next = c == '\n' ? ' ' : c;
    if (next != ' ' || joined.empty() || joined.back() != ' ') joined += next;
  }
  return joined;
}

void expect_says(const Said& ended, const std::string& words) {
  EXPECT_NE(without_line_breaks(ended.output).find(words), std::string::npos) << "expected: " << words << "\n"
                                                                              << ended.output;
}

class Installed : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new Folder;
    const auto install = run_shell(fmt::format("cmake --install '{}' --prefix '{}'", BONFIRE_BUILD_DIR, prefix()));
    ASSERT_EQ(install.code, 0) << install.output;
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }

  static std::string prefix() { return *folder_ / "prefix"; }

  static std::string configure(const std::string& project, const std::string& build, const std::string& more) {
    return fmt::format("cmake -G '{}' -S '{}' -B '{}' -DCMAKE_PREFIX_PATH='{}' {}", BONFIRE_GENERATOR, project, build,
                       prefix(), more);
  }

  static Folder* folder_;
};
Folder* Installed::folder_ = nullptr;

// The first C++ program in README.md.
std::string program_of_readme() {
  std::ifstream file(std::string(BONFIRE_SOURCE_DIR) + "/README.md");
  std::ostringstream text;
  text << file.rdbuf();
  const std::string page = text.str(), fence = "```cpp\n";
  const auto begin = page.find(fence) + fence.size();
  return page.substr(begin, page.find("```", begin) - begin);
}

// The same with `lines` at the end of what each rank does.
std::string program_with(const std::string& lines) {
  std::string program = program_of_readme();
  const auto end = program.rfind("  });\n}");
  EXPECT_NE(end, std::string::npos) << program;
  return program.insert(end, lines);
}

std::vector<double> numbers_after(const std::string& words, const std::string& output) {
  std::vector<double> found;
  const std::regex pattern(words + " ([-+0-9.e]+)");
  for (std::sregex_iterator at(output.begin(), output.end(), pattern), end; at != end; ++at)
    found.push_back(std::stod((*at)[1]));
  return found;
}

// Law: what the README shows is a program. Pasted into a project outside of the tree it builds against what was installed
// and learns, on one rank and on eight, which then have one model.
TEST_F(Installed, TheProgramOfTheReadmeLearnsOnOneRankAndOnEight) {
  fs::create_directories(*folder_ / "project");
  fs::copy(std::string(BONFIRE_SOURCE_DIR) + "/tests/install/stranger/CMakeLists.txt", *folder_ / "project/CMakeLists.txt");
  std::ofstream(*folder_ / "project/pasted.cpp") << program_of_readme();
  std::ofstream(*folder_ / "project/asked.cpp") << program_with(R"(
    const torch::NoGradGuard no_grad;
    const double answer = model->forward(torch::ones({1, 64}, world.device())).item<double>();
    std::printf("bonfire %s on LibTorch %s: rank %d answers %.17g\n", BONFIRE_VERSION, BONFIRE_TORCH_VERSION, world.rank(),
                answer);
)");
  const std::string build = *folder_ / "build",
                    launch = fmt::format("timeout 100 '{}/bin/bonfire' launch -n 8 --", prefix());
  auto ended = run_shell(configure(*folder_ / "project", build, "-DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS=-O0"));
  ASSERT_EQ(ended.code, 0) << ended.output;
  ended = run_shell(fmt::format("cmake --build '{}'", build));
  ASSERT_EQ(ended.code, 0) << ended.output;

  for (const auto& command : {fmt::format("timeout 100 '{}/pasted'", build), fmt::format("{} '{}/pasted'", launch, build)}) {
    ended = run_shell(command);
    EXPECT_EQ(ended.code, 0) << ended.output;
    const auto losses = numbers_after("step [0-9]+: loss", ended.output);
    ASSERT_EQ(losses.size(), 6u) << ended.output;
    EXPECT_LT(losses.back(), 0.5 * losses.front()) << ended.output;
  }
  ended = run_shell(fmt::format("{} '{}/asked'", launch, build));
  EXPECT_EQ(ended.code, 0) << ended.output;
  const auto answers =
      numbers_after("bonfire " BONFIRE_VERSION " on LibTorch " BONFIRE_TORCH_VERSION ": rank [0-7] answers", ended.output);
  ASSERT_EQ(answers.size(), 8u) << ended.output;
  for (const double answer : answers) EXPECT_EQ(answer, answers.front());
}

TEST_F(Installed, AnotherLibTorchStopsAStrangersConfigure) {
  make_fake_libtorch(*folder_ / "fake", "2.10.1");
  const auto ended = run_shell(configure(std::string(BONFIRE_SOURCE_DIR) + "/tests/install/stranger", *folder_ / "refused",
                                         fmt::format("-DBONFIRE_LIBTORCH='{}'", *folder_ / "fake")));
  EXPECT_NE(ended.code, 0);
  expect_says(ended, "is version 2.10.1; this Bonfire is built against 2.11.0 and no other");
}

TEST(Configure, AnotherLibTorchStopsIt) {
  const Folder folder;
  make_fake_libtorch(folder / "fake", "2.12.0");
  const auto ended = run_shell(
      fmt::format("cmake -S '{}' -B '{}' -DBONFIRE_LIBTORCH='{}'", BONFIRE_SOURCE_DIR, folder / "build", folder / "fake"));
  EXPECT_NE(ended.code, 0);
  expect_says(ended, "is version 2.12.0; this Bonfire is built against 2.11.0 and no other");
}

TEST(Configure, NoLibTorchStopsIt) {
  const Folder folder;
  const auto ended = run_shell(fmt::format("cmake -S '{}' -B '{}'", BONFIRE_SOURCE_DIR, folder / "build"));
  EXPECT_NE(ended.code, 0);
  expect_says(ended, "setup/libtorch.sh fetches it");
}

TEST(Setup, NamesAFolderThatIsNoLibTorch) {
  const Folder folder;
  const auto ended = run_shell(fmt::format("LIBTORCH='{}' '{}/setup/libtorch.sh'", folder / "nothing", BONFIRE_SOURCE_DIR));
  EXPECT_EQ(ended.code, 2);
  expect_says(ended, folder / "nothing");
}

TEST(Setup, UsesTheLibTorchThatIsNamedOrInTheCache) {
  const auto named = run_shell(fmt::format("LIBTORCH='{}' '{}/setup/libtorch.sh'", BONFIRE_LIBTORCH, BONFIRE_SOURCE_DIR));
  EXPECT_EQ(named.output, std::string(BONFIRE_LIBTORCH) + "\n");
  const Folder cache;
  const std::string home = cache / "libtorch-" BONFIRE_TORCH_VERSION;
  fs::create_directories(home);
  std::ofstream(home + "/complete");
  fs::create_directories(cache / "nvidia");
  std::ofstream(cache / "nvidia/complete");
  const auto cached =
      run_shell(fmt::format("unset LIBTORCH; BONFIRE_CACHE='{}' '{}/setup/libtorch.sh'", cache / "", BONFIRE_SOURCE_DIR));
  EXPECT_EQ(fs::path(cached.output).lexically_normal(), fs::path(home + "\n").lexically_normal());
}

TEST(Setup, UsesTheFrontendInTheCache) {
  const auto script = fmt::format("'{}/setup/cudnn_frontend.sh'", BONFIRE_SOURCE_DIR);
  const Folder cache;
  // Without it there is one to fetch, which is refused here; then it is found.
  const auto missing = run_shell(fmt::format("BONFIRE_CACHE='{}' PIP_NO_INDEX=1 {}", cache / "", script));
  EXPECT_NE(missing.code, 0);
  std::smatch version;
  ASSERT_TRUE(std::regex_search(missing.output, version, std::regex("nvidia-cudnn-frontend==([0-9.]+)"))) << missing.output;
  const std::string home = cache / ("cudnn-frontend-" + version[1].str());
  EXPECT_FALSE(fs::exists(home));
  fs::create_directories(home);
  std::ofstream(home + "/complete");
  const auto cached = run_shell(fmt::format("BONFIRE_CACHE='{}' PIP_NO_INDEX=1 {}", cache / "", script));
  EXPECT_EQ(cached.code, 0);
  EXPECT_EQ(fs::path(cached.output).lexically_normal(), fs::path(home + "/include\n").lexically_normal());
}

TEST(Setup, RefusesAPartItDoesNotKnow) {
  const auto ended = run_shell(fmt::format("'{}/setup/packages.sh' garden", BONFIRE_SOURCE_DIR));
  EXPECT_EQ(ended.code, 2);
  expect_says(ended, "no part 'garden'");
}

// One line per symbol that leaves the library: an address, a letter, a demangled name.
void expect_only_ours(const std::string& library, const std::string& allowed) {
  const auto ended = run_shell(fmt::format("nm -D --defined-only -C '{}/{}'", BONFIRE_BUILD_DIR, library));
  ASSERT_EQ(ended.code, 0) << ended.output;
  std::istringstream lines(ended.output);
  int ours = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string address, letter, name;
    words >> address >> letter;
    std::getline(words, name);
    // Weak ones (W, V, u) are templates of the standard library and torch, which every program has copies of.
    const bool weak = letter == "W" || letter == "V" || letter == "u" || letter == "w" || letter == "v";
    const bool of_ours = name.find("bonfire::") != std::string::npos || name.find(allowed) != std::string::npos;
    ours += of_ours;
    EXPECT_TRUE(weak || of_ours) << library << " shows" << name;
  }
  EXPECT_GT(ours, 0);
}

TEST(Symbols, TheLibraryShowsOnlyItsOwn) { expect_only_ours("libbonfire.so", "bonfire::"); }

TEST(Symbols, ThePluginShowsOnlyItsEntry) {
  if (!fs::exists(std::string(BONFIRE_BUILD_DIR) + "/libbonfire_cuda.so"))
    GTEST_SKIP() << "the CUDA plug-in was not built: no nvcc";
  expect_only_ours("libbonfire_cuda.so", "bonfire_cuda_plugin");
}

}  // namespace
}  // namespace bonfire::install_test
