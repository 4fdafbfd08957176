#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "bonfire/base/random.h"

namespace bonfire::testing {

// A configuration of `bonfire bench step` that is allowed, drawn from one number: models of every type, one, two or four
// ranks, or eight where some of them split layers or share samples, and whatever of the rest decides about memory. As
// overrides of a file that says nothing.
class RandomRun {
 public:
  // Where there must be documents, in Megatron's format, of tokens below 256.
  static constexpr const char* documents = "documents.bin";

  explicit RandomRun(std::uint64_t seed) : random_(Random(seed).fork("run")) {
    draw_ranks();
    draw_model();
    draw_training();
    draw_sharding();
    draw_frozen();
    draw_recomputed();
    draw_kind_of_layers();
  }

  int ranks() const { return ranks_; }
  std::string arguments() const {
    std::string all;
    for (const auto& word : words_) all += fmt::format(" --set '{}'", word);
    return all;
  }
  // For a table.
  std::string line() const { return fmt::format("{} ranks: {}", ranks_, fmt::join(words_, " ")); }

 private:
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(random_.below(next_++, static_cast<std::uint64_t>(bound)));
  }
  bool chance(int percent) { return below(100) < percent; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + below(static_cast<std::int64_t>(values.size())));
  }
  template <class T>
  void set(const char* key, const T& value) {
    words_.push_back(fmt::format("{}={}", key, value));
  }

  // Of a key that may have been set twice, the last counts.
  void drop(const std::string& key) {
    std::erase_if(words_, [&](const auto& word) { return word.starts_with(key + "="); });
  }

  void draw_ranks() {
    ranks_ = pick({1, 2, 2, 4});
    if (ranks_ > 1 && chance(30)) pipeline_ = chance(70) ? 2 : ranks_;
    const int data = ranks_ / pipeline_;
    shard_ = data > 1 && chance(75) ? pick({2, data}) : 1;
    set("layout.pipeline", pipeline_);
    set("layout.shard", shard_);
    set("layout.replicate", data / shard_);
  }

  void draw_model() {
    type_ = pick<const char*>({"llama", "llama", "gpt2", "gpt2", "mlp", "vgg"});
    set("model.type", type_);
    if (type_ == "vgg") return draw_vgg();
    const std::int64_t dim = pick({64, 96, 128, 192, 256});
    layers_ = 2 + below(6);
    set("model.dim", dim);
    set("model.layers", layers_);
    set("model.ffn", pick({2 * dim, 3 * dim, 4 * dim, dim + 24}));
    if (type_ == "mlp" && chance(50)) {
      set("model.inputs", pick({48, 256, 1000}));
      set("model.classes", pick({10, 300}));
      tokens_ = 1;
      return;
    }
    vocab_ = pick({200, 1024, 4096, 8000});
    set("model.vocab", vocab_);
    tied_ = chance(30);
    set("model.tied", tied_);
    tokens_ = pick({16, 48, 64, 128});
    set("data.sequence", tokens_);
    if (type_ == "mlp") return;
    heads_ = kv_heads_ = pick({2, 4, 8});
    set("model.heads", heads_);
    if (type_ != "llama") return;
    kv_heads_ = pick({heads_, heads_ / 2, std::int64_t{1}});
    set("model.kv_heads", kv_heads_);
  }

  void draw_vgg() {
    const std::int64_t width = pick({8, 16, 32, 48});
    const bool deep = chance(50);
    std::vector<std::int64_t> layers = {width, 0, 2 * width, 0};
    if (deep) layers = {width, width, 0, 2 * width, 2 * width, 0, 4 * width, 0};
    layers_ = deep ? 7 : 4;
    set("model.convolutions", fmt::format("[{}]", fmt::join(layers, ", ")));
    set("model.image", pick({16, 24, 32, 48}));
    set("model.channels", pick({1, 3}));
    set("model.pool", pick({1, 2, 3}));
    set("model.ffn", pick({64, 256, 500}));
    set("model.classes", pick({10, 100}));
    tokens_ = 64;  // about as much work
  }

  void draw_training() {
    // Some hundred tokens to a few thousand.
    const std::int64_t most = std::max<std::int64_t>(1, 2048 / tokens_);
    const std::int64_t microbatch = std::min(most, pick<std::int64_t>({1, 2, 4, 8, 16, 32, 64}));
    std::int64_t microbatches = pick({1, 1, 2, 3, 4});
    if (pipeline_ > 1) {
      schedule_ = pick<const char*>({"gpipe", "1f1b", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"});
      microbatches = pipeline_ * pick({1, 2});
      if (schedule_ == "zb-h2" || schedule_ == "zb-v") microbatches = 2 * pipeline_;
      // A stage for each of its Units at least.
      const bool two = schedule_ == "interleaved" || schedule_ == "zb-v";
      if (layers_ + 2 < (two ? 2 : 1) * pipeline_) schedule_ = "1f1b";
      set("layout.schedule", schedule_);
    }
    set("train.microbatch", microbatch);
    set("train.batch", microbatch * microbatches * (ranks_ / pipeline_));
    const auto precision = pick<const char*>({"fp32", "fp32", "fp32", "bf16", "bf16", "fp16"});
    const bool narrow = std::string(precision) != "fp32";
    set("train.precision", precision);
    const bool rounded = narrow && chance(30);
    if (rounded)
      set("train.gradient_precision", precision);
    else if (narrow && chance(20))
      set("train.reduction_precision", precision);
    else if (chance(15))
      set("layout.compression", pick<const char*>({"bf16", "fp16"}));
    set("train.keep_for_backward", pick<const char*>({"least", "least", "activations", "all"}));
    const auto optimizer = pick<const char*>({"adamw", "adamw", "adam", "sgd"});
    set("optimizer.type", optimizer);
    if (std::string(optimizer) == "sgd") set("optimizer.momentum", pick({0.0, 0.9}));
    if (std::string(optimizer) == "adam") set("optimizer.amsgrad", chance(50));
  }

  void draw_sharding() {
    const std::string sharded = pick<const char*>({"optimizer", "gradients", "parameters", "parameters"});
    set("layout.sharded", sharded);
    if (sharded != "optimizer") {
      set("layout.prefetch", below(4));
      if (chance(25)) set("layout.accumulation", "full");
    }
    if ((sharded == "parameters" || shard_ == 1) && chance(30))
      set("layout.offload", pick<const char*>({"optimizer", "parameters"}));
    if (chance(30)) {
      set("layout.bucket_mb", pick({0.1, 1.0}));
      set("layout.first_bucket_mb", pick({0.05, 0.5}));
    }
    if (pipeline_ > 1) return draw_gathers_of_stages(sharded);
    // Kinds are drawn apart, so that what seeds meant before stays as it was.
    const auto kinds = random_.fork("wrap_types");
    if (chance(30))
      set("layout.wrap", pick<const char*>({"all", "20000", "200000"}));
    else if (kinds.below(0, 100) < 20 && (type_ == "llama" || type_ == "gpt2"))
      set("layout.wrap_types", std::array{R"(["block"])", R"(["embedding", "head"])", R"(["head"])"}[kinds.below(1, 3)]);
    if (sharded != "parameters") return;
    if (chance(40))
      set("layout.reshard_after_forward", shard_ > 2 && chance(50) ? "2" : pick<const char*>({"true", "false"}));
    if (chance(30)) set("layout.backward_prefetch", "after");
    if (chance(20)) set("layout.negotiate_order", "true");
  }

  // Drawn apart, too. Units of a stage gather themselves where no backward is split.
  void draw_gathers_of_stages(const std::string& sharded) {
    const auto gathers = random_.fork("gathers_of_stages");
    if (sharded != "parameters" || gathers.below(0, 2) == 0) return;
    const bool units = !schedule_.starts_with("zb-");
    set("layout.reshard_after_forward", units);
    if (units && shard_ > 1 && gathers.below(1, 10) < 3) set("layout.backward_prefetch", "after");
  }

  void draw_frozen() {
    if (!chance(30)) return;
    std::vector<std::string> choices = {"blocks.0", "blocks.1"};
    if (type_ != "vgg" && !tied_) choices.push_back("embedding");
    if (type_ == "vgg") choices.push_back("blocks.*.bias");
    if (type_ == "llama" || type_ == "gpt2") choices.insert(choices.end(), {"blocks.*.attention", "blocks.*.feed"});
    if (type_ == "mlp") choices.push_back("blocks.*.feed.up");
    std::vector<std::string> frozen;
    for (std::int64_t count = 1 + below(3); count > 0; --count) {
      const auto& one = choices[static_cast<std::size_t>(below(static_cast<std::int64_t>(choices.size())))];
      if (std::find(frozen.begin(), frozen.end(), "\"" + one + "\"") == frozen.end()) frozen.push_back("\"" + one + "\"");
    }
    set("train.freeze", fmt::format("[{}]", fmt::join(frozen, ", ")));
  }

  // Drawn apart, too.
  void draw_recomputed() {
    const auto recomputed = random_.fork("recompute");
    if (recomputed.below(0, 10) >= 4) return;
    const bool full = type_ == "vgg" || recomputed.below(1, 2) == 0;
    recompute_ = full ? "full" : "selective";
    set("layout.recompute", recompute_);
    if (full) set("train.keep_for_backward", "least");
    if (recomputed.below(2, 10) < 4) set("layout.recompute_every", 2 + recomputed.below(3, 2));
  }

  // What splits layers and samples, and what the layers are. Drawn apart, too.
  void draw_kind_of_layers() {
    const auto drawn = random_.fork("kind_of_layers");
    const bool attends = type_ == "llama" || type_ == "gpt2";
    const bool splits = attends && drawn.below(0, 10) < 4, shares = attends && drawn.below(1, 10) < 3;
    if (splits) draw_split_layers(drawn);
    if (shares) draw_shared_samples(drawn);
    const bool separate = attends && vocab_ > 256 && drawn.below(2, 10) < 2;
    if (separate) {
      set("data.type", "tokens");
      set("data.paths", fmt::format("[\"{}\"]", documents));
      set("data.documents", "separate");
    }
    if ((shares || separate) && recompute_ == "selective") recompute_in_full();
    if (splits || drawn.below(3, 10) >= 4) return;
    if (attends && !shares && drawn.below(4, 2) == 0) {
      set("model.reversible", true);
      set("train.keep_for_backward", "least");
      drop("layout.recompute");
      drop("layout.recompute_every");
      return;
    }
    // Everything else is frozen already.
    set("adapter.rank", 2 + 6 * drawn.below(5, 2));
    drop("train.freeze");
    if (type_ == "llama" && drawn.below(6, 2) == 0)
      set("adapter.match", std::array{R"(["q_proj", "v_proj"])", R"(["*_proj", "lm_head"])",
                                      R"(["o_proj", "up_proj"])"}[drawn.below(7, tied_ ? 1 : 3)]);
    if (recompute_ == "selective") recompute_in_full();
  }

  void draw_split_layers(const Random& drawn) {
    const int tensor = ranks_ == 1 && heads_ % 4 == 0 && drawn.below(10, 3) == 0 ? 4 : 2;
    if (ranks_ * tensor > most_ranks) return;
    ranks_ *= tensor;
    tensor_ = tensor;
    set("layout.tensor", tensor);
    set("layout.sequence_parallel", drawn.below(11, 3) > 0);
    if (drawn.below(12, 3) == 0) set("layout.tensor_chunks", 2 + drawn.below(13, 2));
  }

  void draw_shared_samples(const Random& drawn) {
    if (2 * ranks_ > most_ranks) return;
    ranks_ *= 2;
    set("layout.context", 2);
    const bool divides = heads_ % (2 * tensor_) == 0 && kv_heads_ % (2 * tensor_) == 0;
    if (divides && drawn.below(20, 2) == 0) set("layout.context_attention", "heads");
  }

  void recompute_in_full() {
    set("layout.recompute", "full");
    set("train.keep_for_backward", "least");
  }

  static constexpr int most_ranks = 8;

  Random random_;
  std::uint64_t next_ = 0;
  int ranks_ = 1, pipeline_ = 1, shard_ = 1, tensor_ = 1;
  std::string type_, schedule_, recompute_ = "none";
  std::int64_t layers_ = 0, tokens_ = 1, vocab_ = 0, heads_ = 0, kv_heads_ = 0;
  bool tied_ = false;
  std::vector<std::string> words_;
};

}  // namespace bonfire::testing
