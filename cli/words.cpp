#include "cli/words.h"

#include <algorithm>

#include <fmt/ranges.h>
#include <CLI/Formatter.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/toml.h"

namespace bonfire::cli {
namespace {

std::vector<std::string> names_of(const std::vector<const CLI::App*>& commands) {
  std::vector<std::string> names;
  for (const CLI::App* command : commands) names.push_back(command->get_name());
  return names;
}

const CLI::App* named(const CLI::App& parent, const std::string& word) {
  const auto found = parent.get_subcommands([&](const CLI::App* command) { return command->get_name() == word; });
  return found.empty() ? nullptr : found.front();
}

std::string path_of(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent == nullptr ? command.get_name() : path_of(*parent) + " " + command.get_name();
}

std::string guess(const std::string& typed, const std::vector<std::string>& words) {
  const std::string word = nearest(typed, words);
  return word.empty() ? "" : fmt::format("did you mean {}? ", word);
}

std::string unknown(const CLI::App& parent, const std::string& word) {
  const auto names = names_of(parent.get_subcommands({}));
  return fmt::format("'{}' is not a command of {}; {}commands: {}", word, path_of(parent), guess(word, names),
                     fmt::join(names, ", "));
}

// The innermost command that was parsed.
const CLI::App& deepest(const CLI::App& program) {
  const CLI::App* command = &program;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().back();
  return *command;
}

}  // namespace

std::optional<std::string> wrong_command(const CLI::App& program, const std::vector<std::string>& arguments) {
  const CLI::App* command = &program;
  for (const std::string& word : arguments) {
    if (word.starts_with('-')) return std::nullopt;
    const CLI::App* next = named(*command, word);
    if (next == nullptr) return unknown(*command, word);
    command = next;
    if (command->get_subcommands({}).empty()) return std::nullopt;
  }
  return fmt::format("{} needs a command: {}; 'bonfire help' says what they do", path_of(*command),
                     fmt::join(names_of(command->get_subcommands({})), ", "));
}

std::string wrong_options(const CLI::App& program) {
  const CLI::App& command = deepest(program);
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  const auto extras = program.remaining(/*recurse=*/true);
  const auto option = std::find_if(extras.begin(), extras.end(), [](const auto& word) { return word.starts_with("-"); });
  if (option == extras.end())
    return fmt::format("{}: '{}' is one argument too many", path_of(command), extras.empty() ? "" : extras.front());
  const std::string typed = option->substr(0, option->find('='));
  return fmt::format("{} has no option {}; {}'bonfire help {}' lists them", path_of(command), typed, guess(typed, known),
                     path_of(command).substr(path_of(program).size() + 1));
}

std::string help_about(const CLI::App& program, const std::vector<std::string>& words) {
  const CLI::App* command = &program;
  for (const std::string& word : words) {
    const CLI::App* next = named(*command, word);
    if (next == nullptr) fail_config("{}", unknown(*command, word));
    command = next;
  }
  return command->help(command == &program ? "" : path_of(*command->get_parent()));
}

}  // namespace bonfire::cli
