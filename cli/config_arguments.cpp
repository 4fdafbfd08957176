#include "cli/config_arguments.h"

namespace bonfire::cli {

void ConfigArguments::add_to(CLI::App& command) {
  command.add_option("file", file, "Configuration file; docs/configuration.md lists its keys")
      ->required()
      ->type_name("FILE.toml");
  command.add_option("--set", overrides, "Override a key of the file; can be repeated")
      ->type_name("SECTION.KEY=VALUE")
      ->allow_extra_args(false);
}

std::vector<std::string> ConfigArguments::words() const {
  std::vector<std::string> words{file};
  for (const auto& text : overrides) words.insert(words.end(), {"--set", text});
  return words;
}

}  // namespace bonfire::cli
