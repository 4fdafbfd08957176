#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/model.h"

namespace bonfire {

// A number of bytes; a file may say "2GiB".
struct Bytes {
  std::int64_t count = 0;
};
// Yes, no, or how many.
using SwitchOrNumber = std::variant<bool, std::int64_t>;
// One of a key's words, or how many.
using WordOrNumber = std::variant<std::string, std::int64_t>;
// A word, or how many of each.
using WordOrCounts = std::variant<std::string, std::vector<std::int64_t>>;

// Parameters with settings of their own.
struct OptimizerGroup {
  std::vector<std::string> match;
  std::optional<double> lr, weight_decay;  // the optimizer's where none is given
};

// What a configuration file says. Its keys, their defaults, what is allowed and their one line of help stand in one table
// (config_keys.cpp), from which the parser, the errors, the overrides, the writer and the reference page are made.
struct BONFIRE_API Config {
  struct Run {
    std::string name = "run";
    std::string folder = "runs";
    std::string device = "auto";
    std::int64_t threads = 0;
    double timeout = 600;
    double watchdog = 300;
    double heartbeat = 30;
    bool debug_collectives = false;
    bool debug_parameters = false;
    Bytes memory_cap;
    std::string disk_full = "warn";
  } run;

  struct Model {
    std::string preset;
    std::string type = "llama";
    // Its `type` is the one above as an enumerator, and what 0 stands for is filled in, once the Config is resolved.
    plan::ModelSpec spec = {.positions = 0};
  } model;

  // The other keys of [adapter] are the model's.
  struct Adapter {
    std::string weights;
  } adapter;

  struct Data {
    std::string type = "synthetic";
    std::int64_t sequence = 256;
    std::vector<std::string> paths;
    std::string check = "sample";
    double held_out = 0.01;
    std::int64_t seed = 1;
    std::int64_t branching = 8;
    double noise = 1;
    std::string documents = "joined";
    std::int64_t end_of_document = -1;
  } data;

  struct Train {
    std::int64_t steps = 200;
    std::int64_t batch = 8;
    std::int64_t microbatch = 0;
    std::string precision = "fp32";
    std::string fp8_scaling = "delayed";
    std::string fp8_scales = "tensor";
    std::string gradient_precision = "fp32";
    std::string reduction_precision = "gradient";
    std::string output_precision = "model";
    std::string buffer_precision = "model";
    std::vector<std::string> keep_fp32;
    std::string keep_for_backward = "least";
    std::string graphs = "auto";
    std::vector<std::string> freeze;
    std::string start = "check";
    double clip = 1.0;
    double clip_value = 0;
    std::int64_t seed = 1;
    std::int64_t log_every = 1;
    std::int64_t eval_every = 0;
    std::int64_t eval_batches = 8;
    std::string nan_policy = "stop";
    std::int64_t trace_from = 3;
    std::int64_t trace_steps = 0;
  } train;

  struct Optimizer {
    std::string type = "adamw";
    double lr = 3e-4;
    std::array<double, 2> betas = {0.9, 0.95};
    double eps = 1e-8;
    double weight_decay = 0.1;
    bool amsgrad = false;
    bool maximize = false;
    double momentum = 0.9;
    bool nesterov = false;
    std::int64_t warmup = 20;
    std::string decay = "cosine";
    double min_lr = 0;
    std::vector<OptimizerGroup> group;
    double loss_scale = 65536;
    std::int64_t scale_growth_interval = 2000;
  } optimizer;

  struct Layout {
    std::int64_t pipeline = 1;
    std::int64_t replicate = 1;
    std::int64_t shard = 1;
    std::int64_t context = 1;
    std::string context_attention = "ring";
    std::int64_t tensor = 1;
    bool sequence_parallel = true;
    std::int64_t tensor_chunks = 1;
    std::string schedule = "1f1b";
    std::int64_t chunks = 0;
    WordOrCounts stages = "count";
    std::vector<std::int64_t> replicas;  // of each stage; empty: one
    bool stash = true;
    std::string sharded = "parameters";
    SwitchOrNumber reshard_after_forward = true;
    std::int64_t prefetch = 2;
    std::string backward_prefetch = "before";
    std::string accumulation = "sharded";
    WordOrNumber wrap = "unit";
    std::vector<std::string> wrap_types;
    std::vector<std::string> ignore;
    bool negotiate_order = false;
    std::string offload = "none";
    std::string recompute = "none";
    std::int64_t recompute_every = 1;
    bool recompute_offload = false;
    double bucket_mb = 25;
    double first_bucket_mb = 1;
    std::string compression = "none";
    std::int64_t powersgd_rank = 4;
    std::int64_t server = 0;
    std::string server_mode = "synchronous";
    std::int64_t server_staleness = 0;
    std::int64_t server_backup = 0;
    std::string server_lost = "stop";
    std::int64_t server_save_every = 0;
  } layout;

  struct Checkpoint {
    std::int64_t every = 100;
    std::int64_t keep = 2;
    bool asynchronous = true;
    bool drain = true;
    std::string busy = "wait";
    std::string failed = "warn";
    double grace = 60;
    std::string weights;
    std::vector<std::string> weights_of;
  } checkpoint;

  struct Fault {
    std::int64_t nan_step = 0;
    std::int64_t nan_rank = 0;
    std::int64_t nan_times = 0;
    std::int64_t memory_step = 0;
    std::int64_t memory_rank = 0;

    bool makes_nan(std::int64_t step, std::int64_t rollbacks) const {
      return nan_step > 0 && nan_step == step && (nan_times == 0 || rollbacks < nan_times);
    }
  } fault;

  std::string file;                           // as it was named
  std::map<std::string, std::string> origin;  // "train.batch" to "demo.toml:12" or "--set", for keys that were given

  bool given(const std::string& key) const { return origin.count(key) != 0; }
  // Ranks along the pipeline: where stages have replicas, all of them.
  std::int64_t pipeline_ranks() const {
    if (layout.replicas.empty()) return layout.pipeline;
    std::int64_t sum = 0;
    for (const auto replicas : layout.replicas) sum += replicas;
    return sum;
  }
  // Those of the mesh, and parameter servers.
  std::int64_t ranks() const {
    return pipeline_ranks() * layout.replicate * layout.shard * layout.context * layout.tensor + layout.server;
  }
  // Ranks that read different samples.
  std::int64_t data_ranks() const { return layout.replicate * layout.shard; }
  bool reads_tokens() const {
    return model.type == "llama" || model.type == "gpt2" || (model.type == "mlp" && !model.spec.inputs);
  }
};

// Whether Units of a pipeline's stages are gathered one by one.
inline bool gathers_units(const Config& config) {
  const auto* reshard = std::get_if<bool>(&config.layout.reshard_after_forward);
  return config.layout.pipeline > 1 && config.layout.shard > 1 && config.layout.sharded == "parameters" && reshard &&
         *reshard;
}

// Reads the file, then the overrides ("optimizer.lr=1e-3") in order, and checks each key by itself.
// Throws ConfigError: "FILE:LINE: section.key = value: what is wrong; allowed: ...".
BONFIRE_API Config load_config(const std::filesystem::path& file, const std::vector<std::string>& overrides = {});
// The same from text; `name` stands for the file in messages.
BONFIRE_API Config parse_config(const std::string& text, const std::string& name,
                                const std::vector<std::string>& overrides = {});

// Fills in what depends on other keys and on the number of ranks (an axis, where [layout] names none; `microbatch`,
// `positions`), then checks the keys against each other. Throws ConfigError as above.
BONFIRE_API void resolve(Config& config, std::int64_t ranks);

// Every key that applies, as a file that load_config reads back to the same configuration.
BONFIRE_API std::string to_toml(const Config& config);

// The reference page of all keys, in Markdown.
BONFIRE_API std::string config_reference();

// ConfigError about one key of `config`, with its place and value.
[[noreturn]] BONFIRE_API void fail_key(const Config& config, const std::string& key, const std::string& problem);

}  // namespace bonfire
