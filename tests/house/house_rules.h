#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

// The rules of the house as functions of text, so that each can be shown a file that breaks it.
namespace bonfire::house {

struct File {
  std::string path;  // from the root of the repository: "bonfire/comm/group.h"
  std::string text;
};

// Which rooms a room may include, beside itself and base.
using Rooms = std::map<std::string, std::set<std::string>>;

// Reads the table of rooms in docs/architecture.md. A room may name only rooms above it, so there can be no cycle; "all of
// the above but X" means what it says. Throws std::runtime_error where a row cannot be understood.
Rooms read_rooms(const std::string& markdown);

// Each returns one line per fault: the file, its line and what is wrong.
std::vector<std::string> include_faults(const File& file, const Rooms& rooms);
std::vector<std::string> name_faults(const File& file);
std::vector<std::string> text_faults(const File& file);
// Links of a page to what is not in the repository at `root`.
std::vector<std::string> link_faults(const File& file, const std::string& root);

// Every file that people wrote, in the order of their paths.
std::vector<File> read_tree(const std::string& root);

}  // namespace bonfire::house
