#include "bonfire/train/config.h"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "bonfire/base/error.h"

namespace bonfire::config_test {
namespace {

std::string error_of(const std::string& text, std::int64_t ranks = 1, const std::vector<std::string>& overrides = {}) {
  try {
    Config config = parse_config(text, "a.toml", overrides);
    resolve(config, ranks);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Config, AnEmptyFileIsTheDefaults) {
  Config config = parse_config("", "a.toml");
  resolve(config, 1);
  EXPECT_EQ(config.train.batch, 8);
  EXPECT_EQ(config.train.microbatch, 8);
  EXPECT_EQ(config.layout.replicate, 1);
}

TEST(Config, ReadsEveryTypeAndRemembersWhere) {
  const Config config = parse_config(
      "[optimizer]\nlr = 1\nbetas = [0.5, 0.25]\namsgrad = true\n[run]\nname = \"x\"\n[data]\ntype = \"tokens\"\n"
      "paths = [\"a\", \"b\"]\n[train]\nsteps = 7\n",
      "a.toml");
  EXPECT_EQ(config.optimizer.lr, 1.0);
  EXPECT_EQ(config.optimizer.betas, (std::array<double, 2>{0.5, 0.25}));
  EXPECT_TRUE(config.optimizer.amsgrad);
  EXPECT_EQ(config.run.name, "x");
  EXPECT_EQ(config.data.paths, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.origin.at("train.steps"), "a.toml:11");
  EXPECT_FALSE(config.given("train.batch"));
}

TEST(Config, OverridesWinAndNeedNoQuotes) {
  const Config config = parse_config(
      "[train]\nsteps = 7\n", "a.toml",
      {"train.steps=9", "run.name=1", "train.precision=bf16", "optimizer.betas=[0.1, 0.2]", "optimizer.lr=1e-3"});
  EXPECT_EQ(config.train.steps, 9);
  EXPECT_EQ(config.run.name, "1");
  EXPECT_EQ(config.train.precision, "bf16");
  EXPECT_EQ(config.optimizer.lr, 1e-3);
  EXPECT_EQ(config.optimizer.betas[1], 0.2);
}

TEST(Config, GroupsAreTables) {
  for (const auto& config :
       {parse_config("[optimizer]\nlr = 0.5\n[[optimizer.group]]\nmatch = [\"norms\", \"head\"]\nweight_decay = "
                     "0\n[[optimizer.group]]\nmatch = \"embedding\"\nlr = 1\n",
                     "a.toml"),
        parse_config("", "a.toml",
                     {"optimizer.group=[{match=[\"norms\", \"head\"], weight_decay=0}, {match=\"embedding\", lr=1}]"})}) {
    const auto& groups = config.optimizer.group;
    ASSERT_EQ(groups.size(), 2u);
    EXPECT_EQ(groups[0].match, (std::vector<std::string>{"norms", "head"}));
    EXPECT_EQ(groups[0].weight_decay, 0.0);
    EXPECT_FALSE(groups[0].lr);
    EXPECT_EQ(groups[1].match, std::vector<std::string>{"embedding"});
    EXPECT_EQ(groups[1].lr, 1.0);
    EXPECT_FALSE(groups[1].weight_decay);
  }
}

TEST(Config, APresetIsWhatTheOtherKeysChange) {
  Config config = parse_config("[model]\nlayers = 2\npreset = \"gpt2-124m\"\n[data]\nsequence = 64\n", "a.toml");
  resolve(config, 1);
  EXPECT_EQ(config.model.type, "gpt2");
  EXPECT_EQ(config.model.spec.dim, 768);
  EXPECT_EQ(config.model.spec.layers, 2);
  EXPECT_EQ(config.model.spec.type, plan::ModelType::gpt2);
}

TEST(Config, WithoutAnAxisTheRanksReplicate) {
  Config config = parse_config("[train]\nbatch = 12\n", "a.toml");
  resolve(config, 3);
  EXPECT_EQ(config.layout.replicate, 3);
  EXPECT_EQ(config.train.microbatch, 4);
}

TEST(Config, KeysThatTakeSeveralTypes) {
  const auto reshard = [](const char* text) {
    return parse_config("", "a.toml", {std::string("layout.reshard_after_forward=") + text}).layout.reshard_after_forward;
  };
  EXPECT_EQ(Config().layout.reshard_after_forward, SwitchOrNumber(true));
  EXPECT_EQ(reshard("false"), SwitchOrNumber(false));
  EXPECT_EQ(reshard("4"), SwitchOrNumber(std::int64_t{4}));
  const auto wrap = [](const char* text) {
    return parse_config("", "a.toml", {std::string("layout.wrap=") + text}).layout.wrap;
  };
  EXPECT_EQ(Config().layout.wrap, WordOrNumber("unit"));
  EXPECT_EQ(wrap("all"), WordOrNumber("all"));
  EXPECT_EQ(wrap("100000"), WordOrNumber(std::int64_t{100000}));
  const auto cap = [](const char* text) {
    return parse_config("", "a.toml", {std::string("run.memory_cap=") + text}).run.memory_cap.count;
  };
  EXPECT_EQ(cap("2GiB"), std::int64_t{2} << 30);
  EXPECT_EQ(cap("12345"), 12345);
  EXPECT_EQ(cap("0"), 0);
}

// Each message names the place, the key, the value and what is allowed, on one line.
struct BadInput {
  const char* name;
  std::string text;
  std::vector<std::string> parts;
  std::int64_t ranks = 1;
  std::vector<std::string> overrides = {};
};

class ConfigErrors : public ::testing::TestWithParam<BadInput> {};

TEST_P(ConfigErrors, AreOneLineThatNamesTheThing) {
  const auto& bad = GetParam();
  const std::string error = error_of(bad.text, bad.ranks, bad.overrides);
  for (const auto& part : bad.parts)
    EXPECT_NE(error.find(part), std::string::npos) << "'" << part << "' is not in: " << error;
  EXPECT_EQ(error.find('\n'), std::string::npos) << error;
}

INSTANTIATE_TEST_SUITE_P(
    Bad, ConfigErrors,
    ::testing::Values(
        BadInput{"unknown_key",
                 "[model]\ndim = 8\nlayer = 6\n",
                 {"a.toml:3", "model.layer = 6", "did you mean layers?", "kv_heads"}},
        BadInput{"unknown_section", "[optimiser]\nlr = 1\n", {"a.toml:1", "[optimiser]", "did you mean optimizer?"}},
        BadInput{"key_in_wrong_section", "[train]\nlr = 1\n", {"a.toml:2", "train.lr = 1", "did you mean optimizer.lr?"}},
        BadInput{"outside_of_a_section", "steps = 5\n", {"a.toml:1", "steps = 5", "[train]"}},
        BadInput{"string_for_integer",
                 "[train]\nsteps = \"many\"\n",
                 {"a.toml:2", "train.steps = \"many\"", "is a string", "allowed: an integer, at least 1"}},
        BadInput{"float_for_integer", "[train]\nsteps = 2.0\n", {"train.steps = 2.0", "an integer"}},
        BadInput{"integer_for_bool", "[optimizer]\namsgrad = 1\n", {"optimizer.amsgrad = 1", "true or false"}},
        BadInput{"negative", "[train]\nbatch = -4\n", {"a.toml:2", "train.batch = -4", "at least 1"}},
        BadInput{"huge",
                 "[train]\nbatch = 9223372036854775807\n",
                 {"a.toml:2", "train.batch = 9223372036854775807", "too large", "at most 1000000000"}},
        BadInput{"nan", "[optimizer]\nlr = nan\n", {"optimizer.lr = nan", "not finite", "at least 0"}},
        BadInput{"infinite", "[optimizer]\nlr = inf\n", {"optimizer.lr = inf", "not finite"}},
        BadInput{"short_list", "[optimizer]\nbetas = [0.9]\n", {"optimizer.betas = [0.9]", "holds 1 values", "two numbers"}},
        BadInput{"beta_of_one", "[optimizer]\nbetas = [0.9, 1.0]\n", {"a.toml:2", "optimizer.betas", "less than 1"}},
        BadInput{"wrong_choice",
                 "[train]\nprecision = \"bf61\"\n",
                 {"a.toml:2", "train.precision = \"bf61\"", "fp32 | bf16 | fp16"}},
        BadInput{"near_choice", "[optimizer]\ntype = \"adamW\"\n", {"optimizer.type = \"adamW\"", "did you mean adamw?"}},
        BadInput{"not_toml", "[train\n", {"a.toml:1", "not TOML"}},
        BadInput{"product_of_axes",
                 "[layout]\nreplicate = 2\n",
                 {"a.toml:2", "layout.replicate = 2", "but there are 3", "product is 3"},
                 3},
        BadInput{"batch_not_divided",
                 "[train]\nbatch = 8\n",
                 {"a.toml:2", "train.batch = 8", "3 data-parallel ranks", "a multiple of 3"},
                 3},
        BadInput{
            "microbatch", "[train]\nbatch = 8\nmicrobatch = 3\n", {"a.toml:3", "train.microbatch = 3", "a divisor of 4"}, 2},
        BadInput{"missing_file",
                 "[data]\ntype = \"tokens\"\npaths = [\"nowhere.bin\"]\n",
                 {"a.toml:3", "data.paths", "\"nowhere.bin\"", "exist"}},
        BadInput{"no_files", "[data]\ntype = \"tokens\"\n", {"data.paths = []", "at least one path"}},
        BadInput{"tokens_for_images",
                 "[model]\ntype = \"vgg\"\n[data]\ntype = \"tokens\"\n",
                 {"a.toml:4", "data.type", "\"vgg\"", "synthetic"}},
        BadInput{"no_meaning",
                 "[model]\ntype = \"gpt2\"\nkv_heads = 2\n",
                 {"a.toml:3", "model.kv_heads = 2", "model.type = \"gpt2\"", "llama"}},
        BadInput{"noise_of_tokens",
                 "[data]\nnoise = 0.5\n",
                 {"a.toml:2", "data.noise = 0.5", "model.type = \"llama\"", "vgg | mlp with inputs more than 0"}},
        BadInput{"branching_of_images",
                 "[model]\ntype = \"vgg\"\n[data]\nbranching = 4\n",
                 {"a.toml:4", "data.branching = 4", "model.type = \"vgg\"", "llama | gpt2 | mlp with inputs = 0"}},
        BadInput{"classes_of_tokens",
                 "[model]\ntype = \"mlp\"\nclasses = 5\n",
                 {"a.toml:3", "model.classes = 5", "model.inputs = 0", "mlp with inputs more than 0"}},
        BadInput{"vocab_of_vectors",
                 "[model]\ntype = \"mlp\"\ninputs = 12\nvocab = 50\n",
                 {"a.toml:4", "model.vocab = 50", "model.inputs = 12", "mlp with inputs = 0"}},
        BadInput{"tied_vectors",
                 "[model]\ntype = \"mlp\"\ninputs = 12\ntied = true\n",
                 {"a.toml:4", "model.tied = true", "model.inputs = 12", "mlp with inputs = 0"}},
        BadInput{"sequence_of_vectors",
                 "[model]\ntype = \"mlp\"\ninputs = 12\n[data]\nsequence = 8\n",
                 {"a.toml:5", "data.sequence = 8", "model.inputs = 12", "mlp with inputs = 0"}},
        BadInput{"pipeline_of_nobody", "[layout]\npipeline = 0\n", {"a.toml:2", "layout.pipeline = 0", "at least 1"}, 2},
        BadInput{"shard_that_does_not_divide",
                 "[layout]\nshard = 3\n",
                 {"a.toml:2", "layout.shard = 3", "but there are 4", "product is 4", "replicate 2 x shard 2"},
                 4},
        BadInput{"shard_without_anything",
                 "[layout]\nshard = 2\nsharded = \"none\"\n",
                 {"a.toml:3", "layout.sharded = \"none\"", "layout.shard = 2", "optimizer | gradients | parameters"},
                 2},
        BadInput{"sharded_unknown",
                 "[layout]\nshard = 2\nsharded = \"gradient\"\n",
                 {"a.toml:3", "layout.sharded = \"gradient\"", "did you mean gradients?", "none | optimizer | gradients"},
                 2},
        BadInput{"reshard_that_does_not_divide",
                 "[layout]\nshard = 4\nreshard_after_forward = 3\n",
                 {"a.toml:3", "layout.reshard_after_forward = 3", "layout.shard = 4", "true | false | a divisor of 4"},
                 4},
        BadInput{"reshard_of_words",
                 "[layout]\nreshard_after_forward = \"often\"\n",
                 {"a.toml:2", "is a string", "allowed: true | false | an integer, at least 1"}},
        BadInput{"reshard_of_none",
                 "[layout]\nreshard_after_forward = 0\n",
                 {"a.toml:2", "layout.reshard_after_forward = 0", "too small"}},
        BadInput{"reshard_of_whole_parameters",
                 "[layout]\nshard = 2\nsharded = \"gradients\"\nreshard_after_forward = false\n",
                 {"a.toml:4", "layout.reshard_after_forward = false", "layout.sharded = \"gradients\"", "parameters"},
                 2},
        BadInput{"accumulation_of_whole_gradients",
                 "[layout]\nshard = 2\nsharded = \"optimizer\"\naccumulation = \"full\"\n",
                 {"a.toml:4", "layout.accumulation", "gradients | parameters"},
                 2},
        BadInput{"prefetch", "[layout]\nprefetch = -1\n", {"a.toml:2", "layout.prefetch = -1", "at least 0"}},
        BadInput{"powersgd_of_shares",
                 "[layout]\nshard = 2\ncompression = \"powersgd\"\n",
                 {"a.toml:3", "layout.compression", "layout.shard = 2", "none | bf16 | fp16"},
                 2},
        BadInput{"offload_of_whole_parameters",
                 "[layout]\nshard = 2\nsharded = \"gradients\"\noffload = \"parameters\"\n",
                 {"a.toml:4", "layout.offload", "layout.sharded = \"gradients\"", "none | optimizer"},
                 2},
        BadInput{"wrap_word",
                 "[layout]\nwrap = \"al\"\n",
                 {"a.toml:2", "layout.wrap = \"al\"", "unit | all | an integer, at least 1"}},
        BadInput{
            "wrap_type",
            "[layout]\nwrap_types = [\"blocks\"]\n",
            {"a.toml:2", "layout.wrap_types = [\"blocks\"]", "did you mean block?", "a list of embedding | block | head"}},
        BadInput{"wrap_types_of_all",
                 "[layout]\nwrap = \"all\"\nwrap_types = [\"block\"]\n",
                 {"a.toml:3", "layout.wrap_types", "layout.wrap = \"all\"", "unit | a number"}},
        BadInput{"gradient_dtype",
                 "[train]\ngradient_precision = \"int8\"\n",
                 {"a.toml:2", "train.gradient_precision = \"int8\"", "fp32 | bf16 | fp16"}},
        BadInput{"gradient_of_another_precision",
                 "[train]\nprecision = \"bf16\"\ngradient_precision = \"fp16\"\n",
                 {"a.toml:3", "train.gradient_precision", "train.precision = \"bf16\"", "fp32 | bf16"}},
        BadInput{"gradient_below_fp32",
                 "[train]\ngradient_precision = \"bf16\"\n",
                 {"a.toml:2", "train.precision = \"fp32\"", "allowed with it: fp32"}},
        BadInput{"reduction_dtype",
                 "[train]\nreduction_precision = \"fp8\"\n",
                 {"a.toml:2", "train.reduction_precision = \"fp8\"", "gradient | fp32 | bf16 | fp16"}},
        BadInput{"reduction_above_gradient",
                 "[train]\nprecision = \"bf16\"\ngradient_precision = \"bf16\"\nreduction_precision = \"fp32\"\n",
                 {"a.toml:4", "train.reduction_precision", "train.gradient_precision = \"bf16\"", "gradient | bf16"}},
        BadInput{"two_reductions",
                 "[train]\nreduction_precision = \"bf16\"\n[layout]\ncompression = \"fp16\"\n",
                 {"a.toml:2", "train.reduction_precision", "layout.compression = \"fp16\"", "allowed with it: gradient"}},
        BadInput{"two_roundings",
                 "[train]\nprecision = \"bf16\"\ngradient_precision = \"bf16\"\n[layout]\ncompression = \"bf16\"\n",
                 {"a.toml:5", "layout.compression", "train.gradient_precision = \"bf16\"", "allowed with it: none"}},
        BadInput{"keep_in_fp32",
                 "[train]\nkeep_fp32 = [\"norms\"]\n",
                 {"a.toml:2", "train.keep_fp32", "train.precision = \"fp32\"", "bf16 | fp16"}},
        BadInput{"keep_unknown",
                 "[train]\nprecision = \"bf16\"\nkeep_fp32 = [\"nrms\"]\n",
                 {"a.toml:3", "\"nrms\" names no parameter", "did you mean \"norms\"?", "attention_norm | ", "embeddings"}},
        BadInput{"freeze_unknown",
                 "[train]\nfreeze = [\"embedding\", \"block.0\"]\n",
                 {"a.toml:2", "\"block.0\" names no parameter", "did you mean \"blocks.0\"?",
                  "begin with blocks | embedding | head"}},
        BadInput{
            "freeze_past_the_end", "[train]\nfreeze = [\"blocks.6\"]\n", {"a.toml:2", "\"blocks.6\" names no parameter"}},
        BadInput{"freeze_all",
                 "[train]\nfreeze = [\"embedding\", \"blocks\", \"head\"]\n",
                 {"a.toml:2", "train.freeze", "nothing is left to train"}},
        BadInput{"memory_cap",
                 "[run]\nmemory_cap = \"2 GB\"\n",
                 {"a.toml:2", "run.memory_cap = \"2 GB\"", "not a number of bytes", "\"2GiB\""}},
        BadInput{"memory_cap_below_zero", "[run]\nmemory_cap = -1\n", {"a.toml:2", "run.memory_cap = -1", "at least 0"}},
        BadInput{"clip_value", "[train]\nclip_value = -1\n", {"a.toml:2", "train.clip_value = -1", "at least 0"}},
        BadInput{"heads", "[model]\nheads = 7\n", {"a.toml:2", "model.heads is 7", "model.dim = 256"}},
        BadInput{"preset", "[model]\npreset = \"gpt2-12m\"\n", {"a.toml:2", "model.preset", "did you mean gpt2-124m?"}},
        BadInput{
            "preset_type", "[model]\npreset = \"vgg11\"\ntype = \"gpt2\"\n", {"a.toml:3", "vgg11", "allowed with it: vgg"}},
        BadInput{"sequence", "[model]\npositions = 16\n", {"data.sequence = 256", "model.positions = 16"}},
        BadInput{"auto_layout",
                 "[layout]\nreplicate = \"auto\"\n",
                 {"a.toml:2", "layout.replicate = \"auto\"", "planner is not available"}},
        BadInput{"precision",
                 "[train]\nprecision = \"fp4\"\n",
                 {"a.toml:2", "train.precision = \"fp4\"", "fp32 | bf16 | fp16 | fp8"}},
        BadInput{"gradients_of_fp8",
                 "[train]\nprecision = \"fp8\"\ngradient_precision = \"fp16\"\n",
                 {"a.toml:3", "train.precision = \"fp8\"", "fp32 | bf16"}},
        BadInput{"recompute",
                 "[layout]\nrecompute = \"full\"\n[train]\nkeep_for_backward = \"all\"\n",
                 {"a.toml:2", "layout.recompute = \"full\"", "keep_for_backward = \"all\"", "selective"}},
        BadInput{"later_key",
                 "[model]\nfrom = \"folder\"\n",
                 {"a.toml:2", "model.from = \"folder\"", "importing Hugging Face folders is not available"}},
        BadInput{
            "reversible_in_fp8",
            "[model]\nreversible = true\n[train]\nprecision = \"fp8\"\n",
            {"a.toml:4", "train.precision = \"fp8\"", "model.reversible = true", "allowed with it: fp32 | bf16 | fp16"}},
        BadInput{"reversible_keeps_nothing",
                 "[model]\nreversible = true\n[train]\nkeep_for_backward = \"all\"\n",
                 {"a.toml:4", "train.keep_for_backward = \"all\"", "keep nothing", "allowed with it: least"}},
        BadInput{"reversible_mlp",
                 "[model]\ntype = \"mlp\"\nreversible = true\n",
                 {"a.toml:3", "model.reversible = true", "llama | gpt2"}},
        BadInput{"adapter_of_nothing",
                 "[adapter]\nrank = 4\nmatch = [\"query\"]\n",
                 {"a.toml:3", "adapter.match holds \"query\"", "allowed: down_proj | gate_proj | k_proj"}},
        BadInput{
            "min_lr", "[optimizer]\nlr = 0.1\nmin_lr = 0.2\n", {"a.toml:3", "optimizer.min_lr = 0.2", "optimizer.lr = 0.1"}},
        BadInput{"kept_in_a_product",
                 "[train]\nprecision = \"bf16\"\nkeep_fp32 = [\"feed\"]\n",
                 {"a.toml:3", "\"blocks.0.feed.gate_up.weight\" is used in products in bf16", "norms | embeddings"}},
        BadInput{"kept_and_tied",
                 "[model]\ntied = true\n[train]\nprecision = \"bf16\"\nkeep_fp32 = [\"embeddings\"]\n",
                 {"a.toml:5", "model.tied = true", "allowed with it: norms"}},
        BadInput{"output_precision",
                 "[train]\noutput_precision = \"fp64\"\n",
                 {"a.toml:2", "train.output_precision = \"fp64\"", "model | fp32 | bf16 | fp16"}},
        BadInput{"buffer_precision",
                 "[train]\nbuffer_precision = \"bf61\"\n",
                 {"a.toml:2", "train.buffer_precision = \"bf61\"", "did you mean bf16?"}},
        BadInput{"start", "[train]\nstart = \"zero\"\n", {"a.toml:2", "train.start = \"zero\"", "check | broadcast"}},
        BadInput{"debug", "[run]\ndebug_parameters = 1\n", {"a.toml:2", "run.debug_parameters = 1", "true or false"}},
        BadInput{"ignore_name",
                 "[layout]\nignore = [\"block.0\"]\n",
                 {"a.toml:2", "\"block.0\" names no parameter", "did you mean \"blocks.0\"?"}},
        BadInput{"ignore_precision",
                 "[train]\nprecision = \"bf16\"\n[layout]\nignore = [\"head\"]\n",
                 {"a.toml:4", "layout.ignore = [\"head\"]", "train.precision = \"bf16\"", "allowed with: fp32"}},
        BadInput{"ignore_all",
                 "[layout]\nignore = [\"*\"]\n",
                 {"a.toml:2", "layout.ignore = [\"*\"]", "nothing is left to train"}},
        BadInput{"group_kind", "[optimizer]\ngroup = 3\n", {"a.toml:2", "optimizer.group = 3", "is an integer"}},
        BadInput{"group_key",
                 "[[optimizer.group]]\nmatch = [\"head\"]\nweigth_decay = 0\n",
                 {"a.toml:1", "weigth_decay is not a setting of a group; did you mean weight_decay?"}},
        BadInput{"group_name",
                 "[[optimizer.group]]\nmatch = [\"norm\"]\nlr = 0.1\n",
                 {"optimizer.group = ", "\"norm\" names no parameter", "did you mean \"norms\"?",
                  "biases | embeddings | norms, and names that begin with blocks | embedding | head"}},
        BadInput{"group_match", "[[optimizer.group]]\nlr = 0.1\n", {"optimizer.group = ", "without `match`"}},
        BadInput{"group_setting", "[[optimizer.group]]\nmatch = \"head\"\n", {"optimizer.group = ", "changes nothing"}},
        BadInput{"group_lr",
                 "[[optimizer.group]]\nmatch = \"head\"\nlr = -1\n",
                 {"optimizer.group = -1", "is too small", "at least 0"}},
        BadInput{"group_without_a_course",
                 "[optimizer]\nlr = 0\n[[optimizer.group]]\nmatch = \"head\"\nlr = 0.1\n",
                 {"optimizer.group = ", "optimizer.lr, which is 0"}},
        BadInput{"name", "[run]\nname = \"../x\"\n", {"a.toml:2", "run.name = \"../x\"", "letters"}},
        BadInput{"trace_past_the_end",
                 "[train]\nsteps = 4\ntrace_steps = 9\n",
                 {"train.trace_steps = 9", "4 steps", "at most 2"}},
        BadInput{"override_unknown", "", {"--set train.stpes=5", "did you mean steps?"}, 1, {"train.stpes=5"}},
        BadInput{"override_type", "", {"--set train.steps=five", "is a string", "an integer"}, 1, {"train.steps=five"}},
        BadInput{"override_form", "", {"--set steps", "section.key=value"}, 1, {"steps"}},
        BadInput{"override_section", "", {"--set trian.steps=5", "did you mean train?"}, 1, {"trian.steps=5"}}),
    [](const auto& info) { return info.param.name; });

TEST(Config, TheResolvedFileReadsBackToItself) {
  for (const char* text :
       {"", "[model]\ntype = \"mlp\"\n", "[model]\ntype = \"mlp\"\ninputs = 12\n",
        "[model]\ntype = \"vgg\"\n[optimizer]\ntype = \"sgd\"\nlr = 0.1\n",
        "[train]\nprecision = \"fp16\"\nbatch = 12\n[layout]\ncompression = \"powersgd\"\n",
        "[run]\nmemory_cap = \"3GiB\"\n[train]\nfreeze = [\"blocks.0\"]\n[layout]\nshard = 2\n",
        "[run]\nmemory_cap = 1234567890\n[layout]\nshard = 2\nreshard_after_forward = 2\nwrap = \"all\"\n",
        "[run]\ndebug_parameters = true\n[train]\noutput_precision = \"bf16\"\nbuffer_precision = \"fp16\"\nstart = "
        "\"broadcast\"\n[layout]\nignore = [\"head\"]\n",
        "[[optimizer.group]]\nmatch = [\"norms\", \"blocks.0\"]\nlr = 0.1\n[[optimizer.group]]\nmatch = "
        "\"head\"\nweight_decay = 0.0\n",
        "[train]\nmicrobatch = 1\n[layout]\npipeline = 2\nschedule = \"zb-v\"\nchunks = 2\n",
        "[layout]\nshard = 2\nsharded = \"optimizer\"\nwrap = 5000\nwrap_types = [\"block\"]\n"}) {
    Config config = parse_config(text, "a.toml");
    resolve(config, 2);
    const std::string written = to_toml(config);
    Config again = parse_config(written, "config.toml");
    resolve(again, 2);
    EXPECT_EQ(to_toml(again), written);
  }
}

// Products of the largest values must not pass what an int64 holds.
TEST(Config, EveryIntegerOfAShapeIsBounded) {
  for (const char* key : {"model.dim", "model.layers", "model.heads", "model.ffn", "model.vocab", "model.positions",
                          "data.sequence", "data.branching", "train.steps", "train.batch", "train.microbatch",
                          "train.eval_every", "optimizer.warmup", "layout.replicate", "layout.shard"}) {
    const auto error = error_of("", 1, {std::string(key) + "=9223372036854775807"});
    EXPECT_NE(error.find(std::string(key) + " = 9223372036854775807: "), std::string::npos) << error;
    EXPECT_NE(error.find("allowed: "), std::string::npos) << error;
  }
}

TEST(Config, EveryFileOfTheProjectIsOneThatRuns) {
  int files = 0;
  for (const char* folder : {"examples", "bench"}) {
    for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(BONFIRE_SOURCE_DIR) / folder)) {
      if (entry.path().extension() != ".toml") continue;
      ++files;
      Config config = load_config(entry.path());
      EXPECT_NO_THROW(resolve(config, 2)) << entry.path();
    }
  }
  EXPECT_GE(files, 2);
}

TEST(Config, TheReferencePageIsUpToDate) {
  std::ifstream in(std::string(BONFIRE_SOURCE_DIR) + "/docs/configuration.md");
  std::stringstream page;
  page << in.rdbuf();
  EXPECT_TRUE(page.str() == config_reference())
      << "write it anew: build/bonfire doctor --config-reference > docs/configuration.md";
}

}  // namespace
}  // namespace bonfire::config_test
