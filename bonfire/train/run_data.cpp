#include "bonfire/train/run_data.h"

#include "bonfire/base/error.h"
#include "bonfire/data/classes.h"
#include "bonfire/data/markov.h"
#include "bonfire/data/token_files.h"

namespace bonfire {
namespace {

std::vector<std::int64_t> input_sizes(const plan::ModelSpec& spec) {
  if (spec.type == plan::ModelType::vgg) return {spec.channels, spec.image, spec.image};
  return {spec.inputs};
}

TokenCheck check_named(const std::string& word) {
  return word == "full" ? TokenCheck::full : word == "sample" ? TokenCheck::sample : TokenCheck::off;
}

RunData open_checked(const Config& config, TokenCheck check, const Log& log) {
  const auto& data = config.data;
  const auto& spec = config.model.spec;
  RunData opened;
  std::shared_ptr<const Source> source;
  const bool tokens = data.type == "tokens";
  try {
    if (tokens) {
      source = std::make_shared<TokenFiles>(TokenFilesOptions{.paths = data.paths,
                                                              .vocab = spec.vocab,
                                                              .sequence = data.sequence,
                                                              .separate_documents = data.documents == "separate",
                                                              .end_of_document = data.end_of_document,
                                                              .check = check,
                                                              .log = log});
    } else if (config.reads_tokens()) {
      const auto chain = std::make_shared<MarkovSource>(MarkovOptions{.seed = static_cast<std::uint64_t>(data.seed),
                                                                      .vocab = spec.vocab,
                                                                      .sequence = data.sequence,
                                                                      .branching = data.branching});
      opened.entropy = chain->entropy();
      source = chain;
    } else {
      source = std::make_shared<ClassSource>(ClassOptions{.seed = static_cast<std::uint64_t>(data.seed),
                                                          .classes = spec.classes,
                                                          .sizes = input_sizes(spec),
                                                          .noise = data.noise});
    }
    const auto parts = split(source, data.held_out);
    opened.train = parts.train;
    opened.held_out = parts.held_out;
  } catch (const ConfigError& error) {
    const std::string key = tokens ? "data.paths" : "data.branching";
    const auto origin = config.origin.find(key);
    fail_config("{}: {}: {}", origin == config.origin.end() ? config.file : origin->second, key, error.what());
  }
  if (config.reads_tokens()) opened.tokens_per_sample = data.sequence;
  if (opened.train->size() < static_cast<std::uint64_t>(config.train.batch)) {
    fail_key(config, "train.batch",
             fmt::format("the data has {} samples to train on; allowed: at most that", opened.train->size()));
  }
  return opened;
}

}  // namespace

RunData open_data(const Config& config) { return open_checked(config, TokenCheck::off, Log::silent()); }

RunData check_data(const Config& config, const Log& log) {
  return open_checked(config, check_named(config.data.check), log);
}

}  // namespace bonfire
