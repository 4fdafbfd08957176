#pragma once

#include <optional>
#include <string>
#include <vector>

#include <CLI/App.hpp>

namespace bonfire::cli {

// What is wrong with a word where a command must stand, and which command was probably meant; nothing where all is well.
std::optional<std::string> wrong_command(const CLI::App& program, const std::vector<std::string>& arguments);

// The same for options that no command has. REQUIRES: parsing ended with an ExtrasError.
std::string wrong_options(const CLI::App& program);

// The help of the command that `words` name, of the program where there are none. Throws ConfigError where there is no
// such command.
std::string help_about(const CLI::App& program, const std::vector<std::string>& words);

}  // namespace bonfire::cli
