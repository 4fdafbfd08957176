#include "bonfire/train/config_keys.h"

namespace bonfire {

ConfigSection data_section() {
  return {
      .name = "data",
      .help = "The training data.",
      .keys = {
          {.name = "data.type",
           .field = BONFIRE_FIELD(data.type),
           .help = "`synthetic`: generated from the seed, with known entropy. `tokens`: token files (llm.c or Megatron).",
           .choices = {"synthetic", "tokens"}},
          {.name = "data.sequence",
           .field = BONFIRE_FIELD(data.sequence),
           .help = "Tokens per sample.",
           .range = {.at_least = 1, .at_most = 1e8},
           .reads_tokens = true},
          {.name = "data.paths",
           .field = BONFIRE_FIELD(data.paths),
           .help = "Token files to train on.",
           .where_key = "data.type",
           .where_values = {"tokens"}},
          {.name = "data.check",
           .field = BONFIRE_FIELD(data.check),
           .help = "How much of the token files is checked against the vocabulary before training starts: `full`, every "
                   "token, once (the result is kept in `FILE.checked` until the file changes); `sample`, 256 MiB spread "
                   "over the files; `off`. In every case, each sample is checked when it is read.",
           .choices = {"sample", "full", "off"},
           .where_key = "data.type",
           .where_values = {"tokens"}},
          {.name = "data.held_out",
           .field = BONFIRE_FIELD(data.held_out),
           .help = "Fraction of the samples, taken from the end, that is kept for evaluation and never trained on. For "
                   "unlimited synthetic data this is always one half.",
           .range = {.more_than = 0, .less_than = 1}},
          {.name = "data.seed",
           .field = BONFIRE_FIELD(data.seed),
           .help = "Seed of the synthetic data.",
           .range = {.at_least = 0},
           .where_key = "data.type",
           .where_values = {"synthetic"}},
          {.name = "data.branching",
           .field = BONFIRE_FIELD(data.branching),
           .help = "Number of tokens that can follow each token in the synthetic Markov chain.",
           .range = {.at_least = 1, .at_most = 1e6},
           .where_key = "data.type",
           .where_values = {"synthetic"},
           .reads_tokens = true},
          {.name = "data.noise",
           .field = BONFIRE_FIELD(data.noise),
           .help = "Standard deviation of the noise added to synthetic images and vectors, whose own standard deviation is "
                   "1.",
           .range = {.at_least = 0},
           .where_key = "data.type",
           .where_values = {"synthetic"},
           .reads_tokens = false},
          {.name = "data.documents",
           .field = BONFIRE_FIELD(data.documents),
           .help = "How the documents within a sample are treated. `joined`: as one text. `separate`: attention "
                   "stays within each document, and positions start at 0 in each. For llama and gpt2.",
           .choices = {"joined", "separate"},
           .where_key = "data.type",
           .where_values = {"tokens"}},
          {.name = "data.end_of_document",
           .field = BONFIRE_FIELD(data.end_of_document),
           .help = "The token that ends each document in llm.c's files, whose format does not store where "
                   "documents end; -1 if there is none. Megatron's index contains this.",
           .range = {.at_least = -1},
           .where_key = "data.documents",
           .where_values = {"separate"}},
      }};
}

}  // namespace bonfire
