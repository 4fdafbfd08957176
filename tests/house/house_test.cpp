#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/house/house_rules.h"
#include "tests/support/shell.h"

namespace bonfire::house::house_test {
namespace {

const std::vector<File>& tree() {
  static const std::vector<File> files = read_tree(BONFIRE_SOURCE_DIR);
  return files;
}

Rooms rooms_of_the_house() {
  for (const auto& file : tree())
    if (file.path == "docs/architecture.md") return read_rooms(file.text);
  throw std::runtime_error("docs/architecture.md is missing");
}

template <class Rule>
void expect_no_fault(const Rule& rule) {
  ASSERT_GT(tree().size(), 30u);
  for (const auto& file : tree())
    for (const auto& fault : rule(file)) ADD_FAILURE() << fault;
}

TEST(House, RoomsIncludeOnlyWhatTheTableAllows) {
  const Rooms rooms = rooms_of_the_house();
  expect_no_fault([&](const File& file) { return include_faults(file, rooms); });
}

TEST(House, NamesSayWhatIsInside) { expect_no_fault(name_faults); }

TEST(House, FilesAreShortFinishedAndOfNoMachine) { expect_no_fault(text_faults); }

TEST(House, LinksLeadSomewhere) {
  expect_no_fault([](const File& file) { return link_faults(file, BONFIRE_SOURCE_DIR); });
}

// So that several can be compiled as one.
TEST(House, EveryTestFileHasANamespaceOfItsOwn) {
  int seen = 0;
  for (const auto& file : tree()) {
    const std::filesystem::path path(file.path);
    if (!file.path.starts_with("tests/") || !file.path.ends_with("_test.cpp")) continue;
    ++seen;
    EXPECT_NE(file.text.find("::" + path.stem().string() + " {\n"), std::string::npos)
        << file.path << " has no namespace " << path.stem();
  }
  EXPECT_GT(seen, 100);
}

TEST(House, TestsMirrorTheRooms) {
  std::set<std::string> allowed{"house", "install", "examples", "support", "peers", "faults", "fuzz", "random"};
  for (const auto& [room, unused] : rooms_of_the_house()) allowed.insert(room);
  for (const auto& entry : std::filesystem::directory_iterator(std::string(BONFIRE_SOURCE_DIR) + "/tests")) {
    if (!entry.is_directory()) continue;
    EXPECT_TRUE(allowed.contains(entry.path().filename())) << entry.path() << " is the name of no room";
  }
  for (const auto& [room, unused] : rooms_of_the_house()) {
    const std::string source = std::string(BONFIRE_SOURCE_DIR) + (room == "cli" ? "/cli" : "/bonfire/" + room);
    if (!std::filesystem::exists(source + "/CMakeLists.txt")) continue;
    const std::string tests = std::string(BONFIRE_SOURCE_DIR) + "/tests/" + room + "/CMakeLists.txt";
    EXPECT_TRUE(std::filesystem::exists(tests)) << "room " << room << " has no tests: " << tests;
  }
}

// Below: each rule is shown a file that breaks it.
const char* const small_table =
    "| room | what | may include |\n|---|---|---|\n| `bonfire/base` | | small libraries |\n| `bonfire/plan` | | |\n"
    "| `bonfire/comm` | | |\n| `bonfire/cuda` | | comm |\n| `bonfire/nn` | | comm |\n"
    "| `bonfire/train` | | all of the above but cuda |\n| `cli` | | all of the above |\n\n| other | table |\n";

std::size_t includes(const std::string& path, const std::string& line) {
  return include_faults({path, line + "\n"}, read_rooms(small_table)).size();
}

TEST(HouseRules, TheTableIsRead) {
  const Rooms rooms = read_rooms(small_table);
  EXPECT_EQ(rooms.size(), 7u);
  EXPECT_EQ(rooms.at("nn"), (std::set<std::string>{"comm"}));
  EXPECT_EQ(rooms.at("train"), (std::set<std::string>{"base", "comm", "nn", "plan"}));
  EXPECT_TRUE(rooms.at("cli").contains("train"));
  EXPECT_THROW(read_rooms("| room | a | b |\n|---|---|---|\n| `bonfire/a` | | b |\n"), std::runtime_error);
  EXPECT_THROW(read_rooms("nothing"), std::runtime_error);
}

TEST(HouseRules, AWallBetweenRoomsIsSeen) {
  EXPECT_EQ(includes("bonfire/comm/group.cpp", R"(#include "bonfire/nn/unit.h")"), 1u);
  EXPECT_EQ(includes("bonfire/comm/group.cpp", R"(  # include <bonfire/nn/unit.h>)"), 1u);
  EXPECT_EQ(includes("bonfire/nn/unit.cpp", R"(#include "bonfire/comm/group.h")"), 0u);
  EXPECT_EQ(includes("bonfire/nn/unit.cpp", R"(#include "bonfire/base/error.h")"), 0u);
  EXPECT_EQ(includes("bonfire/train/loop.cpp", R"(#include "bonfire/cuda/spin.h")"), 1u);
  EXPECT_EQ(includes("bonfire/nn/unit.cpp", R"(#include "bonfire/bonfire.h")"), 1u);
  EXPECT_EQ(includes("bonfire/cellar/barrel.cpp", ""), 1u);
  EXPECT_EQ(includes("tests/nn/unit_test.cpp", R"(#include "bonfire/train/loop.h")"), 0u);
}

TEST(HouseRules, TorchWhereItDoesNotBelongIsSeen) {
  EXPECT_EQ(includes("bonfire/nn/unit.h", "#include <torch/torch.h>"), 1u);
  EXPECT_EQ(includes("tests/support/ranks.h", "#include <torch/torch.h>"), 1u);
  EXPECT_EQ(includes("tests/nn/unit_test.cpp", "#include <torch/torch.h>"), 0u);
  EXPECT_EQ(includes("bonfire/plan/layout.cpp", "#include <c10/util/Exception.h>"), 1u);
  EXPECT_EQ(includes("bonfire/base/error.h", "#include <ATen/core/Tensor.h>"), 1u);
  EXPECT_EQ(includes("bonfire/cuda/spin.cu", "#include <ATen/core/Tensor.h>"), 1u);
  EXPECT_EQ(includes("bonfire/comm/group.h", "#include <torch/nn/module.h>"), 1u);
  EXPECT_EQ(includes("bonfire/comm/group.h", "#include <ATen/core/Tensor.h>"), 0u);
}

TEST(HouseRules, ANameThatSaysNothingIsSeen) {
  for (const char* name :
       {"utils.h", "util.cpp", "string_helpers.cpp", "common.h", "misc.cu", "task_manager.cpp", "CamelCase.h"})
    EXPECT_EQ(name_faults({std::string("bonfire/nn/") + name, ""}).size(), 1u) << name;
  for (const char* name : {"group.h", "flat_parameter.cpp", "spin.cu", "communicator.h"})
    EXPECT_EQ(name_faults({std::string("bonfire/nn/") + name, ""}).size(), 0u) << name;
}

TEST(HouseRules, ALinkToNothingIsSeen) {
  const auto faults = [](const std::string& text) { return link_faults({"docs/a.md", text}, BONFIRE_SOURCE_DIR).size(); };
  EXPECT_EQ(faults("see [this](../README.md) and [that](https://example.org/x)\n"), 0u);
  EXPECT_EQ(faults("see [this](architecture.md#rooms), [that](no/such.md) and [it](../nothing)\n"), 2u);
}

TEST(HouseRules, UnfinishedLongAndLocalTextIsSeen) {
  std::string many;
  for (int line = 0; line < 501; ++line) many += "int x;\n";
  const auto faults = [](const std::string& path, const std::string& text) { return text_faults({path, text}).size(); };
  EXPECT_EQ(faults("bonfire/nn/a.cpp", many), 1u);
  EXPECT_EQ(faults("bonfire/nn/a.cpp", many.substr(7)), 0u);
  EXPECT_EQ(faults("bonfire/nn/a.cpp", std::string("// TO") + "DO: later\n"), 1u);
  EXPECT_EQ(faults("setup/a.sh", std::string("cd /ho") + "me/someone\n"), 1u);
  EXPECT_EQ(faults("docs/a.md", std::string("see `/wo") + "rk/main`\n"), 1u);
  EXPECT_EQ(faults("docs/a.md", "build/work/main and $cache/home/lib\n"), 0u);
  EXPECT_EQ(faults("bonfire/nn/a.cpp", "int x;"), 1u);
  EXPECT_EQ(faults("bonfire/nn/a.h", "int x;\n"), 1u);
  EXPECT_EQ(faults("bonfire/nn/a.h", "#pragma once\nusing namespace std;\n"), 1u);
}

TEST(HouseRules, AReasonThatMayBeReadTooEarlyIsSeen) {
  const auto faults = [](const std::string& text) { return text_faults({"bonfire/comm/a.cpp", text}).size(); };
  EXPECT_EQ(faults("require(pipe(ends) == 0, \"no pipe: {}\",\n        std::strerror(errno));\n"), 1u);
  EXPECT_EQ(faults("require_system(pipe(ends) == 0, \"no pipe\");\nif (errno == 0) return;\n"), 0u);
  EXPECT_EQ(faults("require(good, \"bad\");\nreason = std::strerror(errno);\n"), 0u);
  // Whatever is called, and however deep.
  EXPECT_EQ(faults("warn(\"cannot open {}: {}\", open(file), std::strerror(errno));\n"), 1u);
  EXPECT_EQ(faults("note = Note(name, made(file), errno);\n"), 1u);
  EXPECT_EQ(faults("log.warning(\"{}: {}\", file.open(name), errno);\n"), 1u);
  EXPECT_EQ(faults("fail(\"(no call) {}: {}\", file.string(), std::strerror(errno));\n"), 0u);
  EXPECT_EQ(faults("if (read(fd) < 0 && errno != EINTR) return;\n"), 0u);
}

// What `make test` ends with.
TEST(Skipped, TestsAreListedWithTheirReasons) {
  const bonfire::testing::Folder folder;
  folder.write(
      "log",
      "[ RUN      ] Gpu/Kernels.Add/0\n/a/b_test.cpp:33: Skipped\nno GPU: no driver\n\n"
      "[  SKIPPED ] Gpu/Kernels.Add/0 (0 ms)\n"
      "[ RUN      ] Gpu/Kernels.Multiply/0\n/a/b_test.cpp:33: Skipped\nno GPU: no driver\n\n"
      "[  SKIPPED ] Gpu/Kernels.Multiply/0 (0 ms)\n"
      "[ RUN      ] Text.Splits\n[       OK ] Text.Splits (0 ms)\n"
      "[ RUN      ] Mpi.Starts\n/a/c_test.cpp:3: Skipped\nmpirun is not installed\n\n[  SKIPPED ] Mpi.Starts (0 ms)\n"
      "[ RUN      ] Mpi.Ends\n/a/c_test.cpp:3: Skipped\n\n\n[  SKIPPED ] Mpi.Ends (0 ms)\n"
      "[  SKIPPED ] 4 tests, listed below:\n[  SKIPPED ] Gpu/Kernels.Add/0\n[  SKIPPED ] Mpi.Starts\n");
  const auto list = [&](const std::string& log) {
    return bonfire::testing::run_shell("awk -f " BONFIRE_SOURCE_DIR "/tests/skipped.awk '" + folder / log + "'").output;
  };
  EXPECT_EQ(list("log"),
            "\n4 tests were skipped:\n  2: no GPU: no driver: Gpu/Kernels (2)\n  1: mpirun is not installed: Mpi.Starts\n"
            "  1: no reason given: Mpi.Ends\n");
  folder.write("none", "[ RUN      ] Text.Splits\n[       OK ] Text.Splits (0 ms)\n");
  EXPECT_EQ(list("none"), "");
}

TEST(Failed, TestsAreListedWithWhatTheySaid) {
  const bonfire::testing::Folder folder;
  folder.write("log",
               "1/2 Test: comm\n[ RUN      ] Text.Splits\nfine\n[       OK ] Text.Splits (0 ms)\n"
               "[ RUN      ] Text.Joins\n/a/b_test.cpp:3: Failure\nExpected: ab\n[  FAILED  ] Text.Joins (0 ms)\n"
               "[  FAILED  ] 1 test, listed below:\n[  FAILED  ] Text.Joins\n<end of output>\n"
               "2/2 Test: cli\n[ RUN      ] Run.Ends\nterminate called\n<end of output>\nTest Failed.\n"
               "3/3 Test: foreign\nno such library\n<end of output>\nTest Failed.\n");
  const auto list = [&](const std::string& log) {
    return bonfire::testing::run_shell("awk -f " BONFIRE_SOURCE_DIR "/tests/failed.awk '" + folder / log + "'").output;
  };
  EXPECT_EQ(list("log"),
            "\nTests that failed:\n\ncomm: Text.Joins failed\n/a/b_test.cpp:3: Failure\nExpected: ab\n"
            "\ncli: Run.Ends did not end\nterminate called\n"
            "\nforeign: failed\n3/3 Test: foreign\nno such library\n<end of output>\nTest Failed.\n");
  folder.write("none", "1/1 Test: comm\n[ RUN      ] Text.Splits\n[       OK ] Text.Splits (0 ms)\n<end of output>\n");
  EXPECT_EQ(list("none"), "");
}

}  // namespace
}  // namespace bonfire::house::house_test
