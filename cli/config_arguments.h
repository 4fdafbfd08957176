#pragma once

#include <string>
#include <vector>

#include <CLI/App.hpp>

namespace bonfire::cli {

// The configuration that a subcommand is about: FILE.toml, and what --set overrides in it.
struct ConfigArguments {
  std::string file;
  std::vector<std::string> overrides{};

  void add_to(CLI::App& command);
  // The same for a copy of this program.
  std::vector<std::string> words() const;
};

}  // namespace bonfire::cli
