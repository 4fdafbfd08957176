#include "tests/random/refusal.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tests/support/ranks.h"

namespace bonfire::cases {

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

bool is_timeout(const std::string& message) {
  return message.find("imed out") != std::string::npos || message.find("imeout") != std::string::npos ||
         message.find("onnection closed") != std::string::npos;
}

std::string run_and_judge(int ranks, const std::function<std::string(World&)>& body) {
  std::mutex mutex;
  std::vector<std::string> wrong(static_cast<std::size_t>(ranks));
  const WorldOptions options{.timeout = std::chrono::seconds(20), .log = Log::silent()};
  try {
    testing::run_ranks(
        ranks,
        [&](World& world) {
          auto mine = body(world);
          const std::lock_guard lock(mutex);
          wrong[static_cast<std::size_t>(world.rank())] = std::move(mine);
        },
        options);
  } catch (const std::exception& error) {
    wrong.push_back(fmt::format("a rank ended with: {}", first_line(error.what())));
  }
  // A rank that was refused may have left before others were.
  const bool one_left = std::find(wrong.begin(), wrong.end(), refused) != wrong.end();
  for (auto& words : wrong)
    if (words == refused || (one_left && words.find("onnection closed") != std::string::npos)) words.clear();
  std::vector<std::string> lines;
  std::set<std::string> seen;
  for (std::size_t rank = 0; rank < wrong.size(); ++rank)
    if (!wrong[rank].empty() && seen.insert(wrong[rank]).second)
      lines.push_back(fmt::format("rank {}: {}", rank, wrong[rank]));
  // What others heard of it says less.
  std::stable_partition(lines.begin(), lines.end(), [](const std::string& line) { return !is_timeout(line); });
  return fmt::format("{}", fmt::join(lines, "\n"));
}

}  // namespace bonfire::cases
