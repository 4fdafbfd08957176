#include "bonfire/schedule/text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <optional>
#include <sstream>

#include <fmt/format.h>

#include "bonfire/base/error.h"

namespace bonfire::schedule {
namespace {

// Far more than a machine has; keeps a slip of the finger from asking for all memory.
constexpr std::int32_t kMostRanks = 65536;
constexpr std::int32_t kMostNumber = 1 << 24;

bool is_filler(std::string_view word) { return word.find_first_not_of(".-") == std::string_view::npos; }

// Takes "rank 3:" off the front of the line; nothing where it does not begin so.
std::optional<std::int32_t> take_rank(std::string& line, const std::string& where) {
  std::istringstream in(line);
  std::string word, number;
  if (!(in >> word) || word != "rank") return std::nullopt;
  std::getline(in, number, ':');
  const auto begin = number.find_first_not_of(" \t"), end = number.find_last_not_of(" \t");
  if (in.eof() || begin == std::string::npos)
    fail_config("{}: 'rank' without a number and a colon; allowed: 'rank 3: 3F0 …'", where);
  number = number.substr(begin, end - begin + 1);
  std::int32_t rank = -1;
  const auto [stop, error] = std::from_chars(number.data(), number.data() + number.size(), rank);
  if (error != std::errc() || stop != number.data() + number.size() || rank < 0 || rank >= kMostRanks)
    fail_config("{}: rank '{}'; allowed: 0 to {}", where, number, kMostRanks - 1);
  std::string rest;
  std::getline(in, rest, '\0');
  line = rest;
  return rank;
}

// Columns of cells with one label per line, wrapped at a width.
class Grid {
 public:
  explicit Grid(std::size_t lines) : cells_(lines) {}

  void add_column(std::vector<std::string> column) {
    std::size_t width = 0;
    for (const auto& cell : column) width = std::max(width, cell.size());
    widths_.push_back(width);
    for (std::size_t line = 0; line < column.size(); ++line) cells_[line].push_back(std::move(column[line]));
  }

  std::string text(const std::vector<std::string>& labels, int width) const {
    std::size_t label_width = 0;
    for (const auto& label : labels) label_width = std::max(label_width, label.size());
    std::string result;
    for (std::size_t begin = 0; begin < widths_.size() || begin == 0;) {
      std::size_t end = begin, used = label_width;
      while (end < widths_.size() &&
             (end == begin || width <= 0 || used + 1 + widths_[end] <= static_cast<std::size_t>(width)))
        used += 1 + widths_[end++];
      if (begin > 0) result += '\n';
      for (std::size_t line = 0; line < cells_.size(); ++line) {
        std::string text = fmt::format("{:<{}}", labels[line], label_width);
        for (std::size_t column = begin; column < end; ++column)
          text += fmt::format(" {:<{}}", cells_[line][column], widths_[column]);
        text.erase(text.find_last_not_of(' ') + 1);
        result += text + '\n';
      }
      if (end == widths_.size()) break;
      begin = end;
    }
    return result;
  }

 private:
  std::vector<std::vector<std::string>> cells_;  // per line, per column
  std::vector<std::size_t> widths_;
};

std::vector<std::string> rank_labels(int ranks) {
  std::vector<std::string> labels;
  labels.reserve(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) labels.push_back(fmt::format("rank {}:", rank));
  return labels;
}

}  // namespace

Schedule parse_table(std::string_view text, const std::string& name) {
  Schedule schedule;
  bool labelled = false;
  std::istringstream in{std::string(text)};
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const std::string where = fmt::format("{}:{}", name, number);
    line.erase(std::min(line.find('#'), line.size()));
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto rank = take_rank(line, where);
    if (!schedule.rows.empty() && rank.has_value() != labelled)
      fail_config("{}: some lines begin with 'rank N:' and some do not; allowed: all or none", where);
    labelled = rank.has_value();
    const auto row_number = static_cast<std::size_t>(rank.value_or(schedule.ranks()));
    if (row_number >= schedule.rows.size()) schedule.rows.resize(row_number + 1);
    auto& row = schedule.rows[row_number];
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      if (is_filler(word)) continue;
      const auto action = parse_action(word);
      if (!action) fail_config("{}: '{}' is no action; allowed: {}", where, word, action_forms());
      if (action->stage >= kMostNumber || action->microbatch >= kMostNumber)
        fail_config("{}: '{}': numbers must be below {}", where, word, kMostNumber);
      row.push_back(*action);
      schedule.stages = std::max(schedule.stages, action->stage + 1);
      if (action->kind != Kind::tie) schedule.microbatches = std::max(schedule.microbatches, action->microbatch + 1);
    }
  }
  if (schedule.rows.empty()) fail_config("{}: no rank does anything; allowed: lines such as 'rank 0: 0F0 0B0 0U'", name);
  for (std::size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    if (schedule.rows[rank].empty()) fail_config("{}: rank {} of {} does nothing", name, rank, schedule.rows.size());
  }
  return schedule;
}

Schedule read_table(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::ostringstream text;
  if (std::filesystem::is_directory(file) || !(text << in.rdbuf()))
    fail_config("schedule '{}' cannot be read as a file", file.string());
  return parse_table(text.str(), file.string());
}

std::string table_text(const Schedule& schedule) {
  Grid grid(schedule.rows.size());
  std::size_t longest = 0;
  for (const auto& row : schedule.rows) longest = std::max(longest, row.size());
  for (std::size_t at = 0; at < longest; ++at) {
    std::vector<std::string> column;
    for (const auto& row : schedule.rows) column.push_back(at < row.size() ? to_text(row[at]) : "");
    grid.add_column(std::move(column));
  }
  return grid.text(rank_labels(schedule.ranks()), 0);
}

std::string table_text(const Schedule& schedule, const Timeline& timeline, TextOptions options) {
  const auto ticks = static_cast<std::size_t>(timeline.makespan);
  require(timeline.makespan == std::floor(timeline.makespan), "a table in time needs whole times; the makespan is {}",
          timeline.makespan);
  const std::size_t ranks = schedule.rows.size();
  std::vector<std::size_t> next(ranks);  // per rank: its first cell that is not yet in the grid
  Grid grid(ranks);
  const auto left = [&](std::size_t rank) { return next[rank] < schedule.rows[rank].size(); };
  const auto takes_time = [&](std::size_t at, std::size_t rank) {
    return timeline.cells[rank][at].end > timeline.cells[rank][at].start;
  };
  // Whether the rank's next cell that takes time starts at the tick.
  const auto works_at = [&](std::size_t rank, std::size_t tick) {
    std::size_t at = next[rank];
    while (at < schedule.rows[rank].size() && !takes_time(at, rank)) ++at;
    return at < schedule.rows[rank].size() && timeline.cells[rank][at].start == static_cast<double>(tick);
  };
  std::vector<double> busy_until(ranks);
  for (std::size_t tick = 0; tick <= ticks; ++tick) {
    // What takes no time stands where the rank would wait; where it does not wait, in columns between the ticks.
    for (bool more = true; more;) {
      more = false;
      std::vector<std::string> column(ranks);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        if (!left(rank) || takes_time(next[rank], rank) || (tick < ticks && !works_at(rank, tick))) continue;
        column[rank] = to_text(schedule.rows[rank][next[rank]++]);
        more = true;
      }
      if (more) grid.add_column(std::move(column));
    }
    if (tick == ticks) break;
    std::vector<std::string> column(ranks, ".");
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      if (busy_until[rank] > static_cast<double>(tick)) {
        column[rank] = "-";
      } else if (left(rank) && timeline.cells[rank][next[rank]].start <= static_cast<double>(tick)) {
        busy_until[rank] = timeline.cells[rank][next[rank]].end;
        column[rank] = to_text(schedule.rows[rank][next[rank]++]);
      }
    }
    grid.add_column(std::move(column));
  }
  return grid.text(rank_labels(schedule.ranks()), options.width);
}

std::string marked_table(const Schedule& schedule, Position cell) {
  constexpr std::int32_t kRanksAround = 4, kCellsAround = 6;
  const std::int32_t first = std::max(0, cell.rank - kRanksAround);
  const std::int32_t last = std::min(schedule.ranks() - 1, cell.rank + kRanksAround);
  std::int32_t longest = 0;
  for (std::int32_t rank = first; rank <= last; ++rank)
    longest = std::max(longest, static_cast<std::int32_t>(schedule.rows[static_cast<std::size_t>(rank)].size()));
  const std::int32_t begin = std::max(0, cell.at - kCellsAround), end = std::min(longest, cell.at + kCellsAround + 1);

  Grid grid(static_cast<std::size_t>(last - first + 1));
  const auto ellipsis = [&] {
    grid.add_column(std::vector<std::string>(static_cast<std::size_t>(last - first + 1), "..."));
  };
  if (begin > 0) ellipsis();
  for (std::int32_t at = begin; at < end; ++at) {
    std::vector<std::string> column;
    for (std::int32_t rank = first; rank <= last; ++rank) {
      const auto& row = schedule.rows[static_cast<std::size_t>(rank)];
      std::string text = at < static_cast<std::int32_t>(row.size()) ? to_text(row[static_cast<std::size_t>(at)]) : "";
      column.push_back(Position{rank, at} == cell ? "[" + text + "]" : text);
    }
    grid.add_column(std::move(column));
  }
  if (end < longest) ellipsis();
  std::vector<std::string> labels = rank_labels(schedule.ranks());
  labels.erase(labels.begin() + last + 1, labels.end());
  labels.erase(labels.begin(), labels.begin() + first);
  return grid.text(labels, 0);
}

}  // namespace bonfire::schedule
