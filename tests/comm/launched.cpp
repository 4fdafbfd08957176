#include "tests/comm/launched.h"

#include <regex>

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace bonfire::test {
namespace {

std::vector<std::string> launched(const std::vector<std::string>& options, const std::vector<std::string>& program) {
  std::vector<std::string> words = {kBonfire, "launch"};
  words.insert(words.end(), options.begin(), options.end());
  words.push_back("--");
  words.insert(words.end(), program.begin(), program.end());
  return words;
}

}  // namespace

std::vector<std::string> launch(const std::vector<std::string>& options, const std::string& script) {
  return launched(options, {"sh", "-c", script});
}

std::vector<std::string> launch(int ranks, const std::vector<std::string>& options) {
  std::vector<std::string> all = {"-n", std::to_string(ranks)};
  all.insert(all.end(), options.begin(), options.end());
  return launched(all, {kProgram});
}

std::map<std::string, std::string> torchrun(const std::string& port) {
  return {{"RANK", "0"},
          {"WORLD_SIZE", "1"},
          {"LOCAL_RANK", "0"},
          {"LOCAL_WORLD_SIZE", "1"},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", port}};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

pid_t process_of_rank(Child& run, int rank) {
  const std::regex words(fmt::format("pid (\\d+) is rank {} ", rank));
  std::smatch found;
  std::string output;
  const bool there = eventually([&] {
    output = run.output();
    return std::regex_search(output, found, words);
  });
  EXPECT_TRUE(there) << output;
  return there ? std::stoi(found[1]) : -1;
}

void expect_all_done(Child& run, int ranks) {
  EXPECT_EQ(run.wait(std::chrono::seconds(60)), 0) << run.output();
  const std::string sum = fmt::format("sum {}\n", ranks);
  std::size_t count = 0;
  const std::string output = run.output();
  for (std::size_t at = 0; (at = output.find(sum, at)) != std::string::npos; ++at) ++count;
  EXPECT_EQ(count, static_cast<std::size_t>(ranks)) << output;
}

}  // namespace bonfire::test
