#include "tests/house/house_rules.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <regex>
#include <sstream>
#include <stdexcept>

#include <fmt/format.h>

namespace bonfire::house {
namespace {

constexpr int most_lines = 500;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string trimmed(const std::string& text) {
  const auto begin = text.find_first_not_of(" \t`");
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t`") - begin + 1);
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, at);) parts.push_back(trimmed(part));
  return parts;
}

bool ends_with(const std::string& path, std::initializer_list<const char*> endings) {
  return std::any_of(endings.begin(), endings.end(), [&](const char* ending) { return path.ends_with(ending); });
}

bool is_header(const std::string& path) { return ends_with(path, {".h", ".cuh"}); }
bool is_source(const std::string& path) { return is_header(path) || ends_with(path, {".cpp", ".cu"}); }

// "comm" for bonfire/comm/group.h, "cli" for cli/train.cpp, nothing for what belongs to no room.
std::string room_of(const std::string& path) {
  if (path.starts_with("cli/")) return "cli";
  if (!path.starts_with("bonfire/")) return {};
  const auto end = path.find('/', 8);
  return end == std::string::npos ? std::string() : path.substr(8, end - 8);
}

bool is_torch(const std::string& include) {
  return include.starts_with("torch/") || include.starts_with("ATen/") || include.starts_with("c10/") ||
         include.starts_with("caffe2/");
}

// Where a call is given errno and what another call returns: errno may be read before or after that one, in whatever order
// the compiler likes. What cannot set it may stand there: strerror, and members without arguments, such as path.string().
std::vector<std::size_t> early_reasons(const std::string& text) {
  std::vector<std::size_t> lines;
  static const std::regex call(R"(\b(?!(?:if|while|for|switch|return|strerror)\b)[A-Za-z_]\w*\()");
  static const std::regex words(R"("(\\.|[^"\\])*")");
  static const std::regex other(R"((?:^|[^.>\w])(?!strerror\b)[A-Za-z_]\w*\(|(?:\.|->)[A-Za-z_]\w*\([^)])");
  for (auto found = std::sregex_iterator(text.begin(), text.end(), call); found != std::sregex_iterator(); ++found) {
    const auto start = static_cast<std::size_t>(found->position());
    int depth = 0;
    const std::size_t open = text.find('(', start);
    std::size_t end = open;
    do {
      if (text[end] == '(') ++depth;
      if (text[end] == ')') --depth;
    } while (depth > 0 && ++end < text.size());
    const std::string arguments = std::regex_replace(text.substr(open + 1, end - open - 1), words, "");
    if (arguments.find("errno") == std::string::npos || arguments.find(';') != std::string::npos) continue;
    if (!std::regex_search(arguments, other)) continue;
    lines.push_back(static_cast<std::size_t>(std::count(text.begin(), text.begin() + found->position(), '\n')));
  }
  return lines;
}

std::string fault(const File& file, std::size_t line, const std::string& what) {
  return fmt::format("{}:{}: {}", file.path, line + 1, what);
}

}  // namespace

Rooms read_rooms(const std::string& markdown) {
  Rooms rooms;
  bool inside = false;
  for (const auto& line : lines_of(markdown)) {
    if (line.starts_with("| room |"))
      inside = true;
    else if (inside && !line.starts_with("|"))
      break;
    else if (inside && !line.starts_with("|--")) {
      const auto cells = split(line.substr(1), '|');
      if (cells.size() < 3) throw std::runtime_error("a row of the table of rooms has fewer than three cells: " + line);
      const std::string room = cells[0].starts_with("bonfire/") ? cells[0].substr(8) : cells[0];
      std::set<std::string> allowed;
      std::string rule = cells[2];
      if (rule.starts_with("all of the above")) {
        for (const auto& [other, unused] : rooms) allowed.insert(other);
        if (const auto but = rule.find(" but "); but != std::string::npos) allowed.erase(trimmed(rule.substr(but + 5)));
        rule.clear();
      } else if (rule == "small libraries") {
        rule.clear();
      }
      for (const auto& other : split(rule, ',')) {
        if (other.empty()) continue;
        if (!rooms.contains(other))
          throw std::runtime_error(fmt::format("room {} may include {}, which no row above it is", room, other));
        allowed.insert(other);
      }
      rooms[room] = allowed;
    }
  }
  if (rooms.empty()) throw std::runtime_error("there is no table of rooms");
  return rooms;
}

std::vector<std::string> include_faults(const File& file, const Rooms& rooms) {
  std::vector<std::string> faults;
  if (!is_source(file.path)) return faults;
  static const std::set<std::string> without_torch{"base", "schedule", "plan", "text"};
  static const std::set<std::string> with_modules{"nn", "models", "pipeline", "shard"};
  const std::string room = room_of(file.path);
  if (!room.empty() && !rooms.contains(room))
    faults.push_back(fault(file, 0, fmt::format("room {} is not in the table", room)));
  const bool ours = file.path.starts_with("bonfire/") || file.path.starts_with("cli/");

  static const std::regex pattern(R"re(^\s*#\s*include\s*[<"]([^">]+)[">])re");
  const auto lines = lines_of(file.text);
  for (std::size_t at = 0; at < lines.size(); ++at) {
    std::smatch match;
    if (!std::regex_search(lines[at], match, pattern)) continue;
    const std::string include = match[1];
    const std::string other = room_of(include);
    if (include == "torch/torch.h" && (ours || is_header(file.path))) {
      faults.push_back(fault(file, at, "torch/torch.h costs half a minute a file: include what is needed"));
    } else if (is_torch(include)) {
      if (without_torch.contains(room))
        faults.push_back(fault(file, at, fmt::format("room {} knows no torch, yet includes {}", room, include)));
      if (file.path.ends_with(".cu")) faults.push_back(fault(file, at, "a .cu file includes no torch header"));
      if (!room.empty() && include.starts_with("torch/nn") && !with_modules.contains(room)) {
        faults.push_back(fault(file, at, fmt::format("room {} does not see torch/nn, yet includes {}", room, include)));
      }
    }
    if (room.empty()) continue;
    if (include == "bonfire/bonfire.h")
      faults.push_back(fault(file, at, "bonfire.h is for users; include the header that is needed"));
    const auto row = rooms.find(room);
    if (other.empty() || other == room || other == "base" || row == rooms.end()) continue;
    if (!row->second.contains(other))
      faults.push_back(fault(file, at, fmt::format("room {} may not include room {}", room, other)));
  }
  return faults;
}

std::vector<std::string> name_faults(const File& file) {
  static const std::regex empty_name(R"((^|.*[_-])(utils?|helpers?|common|misc|managers?)([_-].*|$))", std::regex::icase);
  static const std::regex snake_case("[a-z0-9_]+");
  std::vector<std::string> faults;
  const std::string stem = std::filesystem::path(file.path).stem();
  if (is_source(file.path) || file.path.ends_with(".py")) {
    if (std::regex_match(stem, empty_name))
      faults.push_back(fault(file, 0, "a name that does not say what is inside"));
    else if (!std::regex_match(stem, snake_case))
      faults.push_back(fault(file, 0, "file names are snake_case"));
  }
  return faults;
}

std::vector<std::string> text_faults(const File& file) {
  std::vector<std::string> faults;
  const auto lines = lines_of(file.text);
  if (is_source(file.path) && lines.size() > most_lines) {
    faults.push_back(
        fault(file, lines.size() - 1, fmt::format("{} lines, at most {}: it is two things", lines.size(), most_lines)));
  }
  if (!file.text.empty() && file.text.back() != '\n')
    faults.push_back(fault(file, lines.size() - 1, "no newline at the end"));
  if (is_header(file.path)) {
    if (file.text.find("#pragma once") == std::string::npos)
      faults.push_back(fault(file, 0, "a header without #pragma once"));
    for (std::size_t at = 0; at < lines.size(); ++at) {
      if (lines[at].starts_with("using namespace")) faults.push_back(fault(file, at, "using namespace in a header"));
    }
  }
  if (is_source(file.path) && !file.path.starts_with("tests/")) {
    for (const std::size_t at : early_reasons(file.text))
      faults.push_back(fault(file, at, "errno beside another call, which may be read before that: use require_system()"));
  }
  // Written in two pieces, so that this file is no fault of its own.
  static const std::regex unfinished(
      "\\b(TO"
      "DO|FIX"
      "ME|X"
      "XX)\\b");
  static const std::regex machine(
      "(^|[^A-Za-z0-9_./}])/(ho"
      "me|ro"
      "ot|Us"
      "ers|wo"
      "rk|workspace)/[A-Za-z0-9_.]");
  for (std::size_t at = 0; at < lines.size(); ++at) {
    if (std::regex_search(lines[at], unfinished)) faults.push_back(fault(file, at, "unfinished: " + trimmed(lines[at])));
    if (std::regex_search(lines[at], machine))
      faults.push_back(fault(file, at, "a path of one machine: " + trimmed(lines[at])));
  }
  return faults;
}

std::vector<std::string> link_faults(const File& file, const std::string& root) {
  static const std::regex pattern(R"re(\]\(([^)#\s]+)(#[^)]*)?\))re");
  std::vector<std::string> faults;
  if (!file.path.ends_with(".md")) return faults;
  const auto lines = lines_of(file.text);
  for (std::size_t at = 0; at < lines.size(); ++at) {
    for (std::sregex_iterator match(lines[at].begin(), lines[at].end(), pattern), end; match != end; ++match) {
      const std::string target = (*match)[1];
      if (target.find("://") != std::string::npos) continue;
      const auto path = std::filesystem::path(root) / std::filesystem::path(file.path).parent_path() / target;
      if (!std::filesystem::exists(path)) faults.push_back(fault(file, at, "a link to nothing: " + target));
    }
  }
  return faults;
}

std::vector<File> read_tree(const std::string& root) {
  namespace fs = std::filesystem;
  static constexpr std::array folders{"bonfire", "cli", "tests", "examples", "bench", "cmake", "docs", "setup"};
  std::vector<fs::path> paths;
  for (const char* folder : folders) {
    if (!fs::exists(fs::path(root) / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(fs::path(root) / folder)) {
      const std::string path = entry.path();
      const bool text = is_source(path) || ends_with(path, {".txt", ".cmake", ".in", ".md", ".sh", ".py", ".toml"});
      if (entry.is_regular_file() && text) paths.push_back(entry.path());
    }
  }
  for (const char* name : {"CMakeLists.txt", "CMakePresets.json", "Makefile", "README.md", "CONTRIBUTING.md"}) {
    if (fs::exists(fs::path(root) / name)) paths.push_back(fs::path(root) / name);
  }
  std::sort(paths.begin(), paths.end());
  std::vector<File> files;
  for (const auto& path : paths) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    files.push_back({fs::relative(path, root).generic_string(), text.str()});
  }
  return files;
}

}  // namespace bonfire::house
