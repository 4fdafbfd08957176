#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/App.hpp>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/plan/memory_table.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/selection.h"
#include "cli/commands.h"
#include "cli/config_arguments.h"
#include "cli/limits.h"

namespace bonfire::cli {
namespace {

struct Arguments {
  ConfigArguments config;
  std::optional<int> gpus;
  std::optional<double> cap;  // GiB
  bool memory = false;
  bool json = false;
};

struct Question {
  Config config;
  plan::ModelDescription model;
  plan::DataParallel layout;
  plan::MemoryOptions options;
  int ranks = 1;
};

const char* known_as(plan::Sharded what) {
  switch (what) {
    case plan::Sharded::none: return "DDP";
    case plan::Sharded::optimizer: return "ZeRO-1";
    case plan::Sharded::gradients: return "ZeRO-2";
    case plan::Sharded::parameters: return "ZeRO-3";
  }
  return "";
}

// 1.33, but 16: only what there is to say.
std::string number(double value) {
  std::string text = fmt::format("{:.2f}", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string percent(std::int64_t part, std::int64_t whole) {
  return fmt::format("{:.0f}%", 100 * static_cast<double>(part) / static_cast<double>(whole));
}

// The file's layout on so many ranks: its sharding factor, and as many replicas as there are then.
void spread_over(Config& config, int ranks) {
  if (ranks % config.layout.shard != 0)
    fail_key(config, "layout.shard", fmt::format("does not divide --gpus {}; allowed: a divisor of it", ranks));
  config.layout.replicate = ranks / config.layout.shard;
}

Question ask(const Arguments& arguments) {
  Question question{.config = load_config(arguments.config.file, arguments.config.overrides)};
  if (question.config.layout.pipeline > 1)
    fail_key(question.config, "layout.pipeline", "tables of memory are of data parallelism; allowed here: 1");
  // A rank's part of the batch, and with it activations, follow from how many there are.
  if (arguments.gpus) spread_over(question.config, *arguments.gpus);
  resolve(question.config, question.config.ranks());
  question.model = wrapped_model_of(question.config);
  question.layout = data_parallel_of(question.config);
  question.options = memory_options_of(question.config);
  question.ranks = static_cast<int>(question.config.data_ranks());
  return question;
}

// The layout that fits into `cap` bytes, for each precision.
std::optional<plan::Fit> fit(const Question& question, const plan::PrecisionKind& kind, std::int64_t cap) {
  plan::DataParallel layout = question.layout;
  layout.replicate = question.ranks;
  layout.shard = 1;
  layout.what = plan::Sharded::none;
  if (kind.compute != layout.compute) layout.scales = {};
  layout.compute = kind.compute;
  layout.master = kind.master;
  layout.gradient = layout.reduction = kind.gradient;
  return plan::smallest_fit(question.model, layout, question.options, cap);
}

void print_words(const Question& question, const std::vector<plan::MemoryRow>& rows, std::optional<std::int64_t> cap) {
  const auto& config = question.config;
  fmt::print("{}: {}, {} parameters in {} Units; {} data-parallel rank{}\n", config.file, config.model.type,
             format_count(question.model.parameter_elements()), question.model.units.size(), question.ranks,
             question.ranks == 1 ? "" : "s");
  const auto memory = plan::memory_of(question.model, question.layout, question.options);
  const std::int64_t total = memory.total();
  fmt::print("The file asks for {}, shard = {}, sharded = \"{}\": a rank needs {} at its peak\n", config.train.precision,
             config.layout.shard, config.layout.sharded, format_bytes(total));
  const auto part = [&](const char* name, std::int64_t bytes) {
    if (bytes > 0) fmt::print("  {:<28} {:>12}  {:>4}\n", name, format_bytes(bytes), percent(bytes, total));
  };
  part("parameters", memory.state.parameters);
  part("fp32 masters", memory.state.masters);
  part("gradients", memory.state.gradients);
  part("optimizer state", memory.state.optimizer);
  part("parameters of Units that run", memory.gathered);
  part("gradients on their way", memory.whole_gradients);
  part("communication", memory.communication);
  part("activations", memory.activations);
  part("data and tables", memory.data);
  part("workspaces of libraries", memory.workspaces);
  if (memory.building > memory.step())
    fmt::print("  a step needs {} of that; the rest is there while the model is built\n", format_bytes(memory.step()));
  if (memory.state.host > 0) fmt::print("  and, of its host's memory, {:>10}\n", format_bytes(memory.state.host));

  const std::string title = fmt::format("\n{:>4}  {:<11} {:<7} {:>8} {:>7} {:>7} {:>7}   {:>6}  {:>11}  {:>11}", "F",
                                        "sharded", "", "weights", "grads", "optim", "bytes", "less", "state", "peak");
  const plan::PrecisionKind* kind = nullptr;
  for (const auto& row : rows) {
    if (row.kind != kind) {
      kind = row.kind;
      fmt::print("\n{}: bytes per parameter on a rank", kind->name);
      if (std::string(kind->name) == "fp32")
        fmt::print(" (and, as a rule of thumb, {} for activations: {} in all)", plan::activations_per_parameter,
                   number(row.per_parameter.total() + plan::activations_per_parameter));
      fmt::print("{}\n", title);
    }
    const auto& bytes = row.per_parameter;
    fmt::print("{:>4}  {:<11} {:<7} {:>8} {:>7} {:>7} {:>7}  {:>6}x  {:>11}  {:>11}{}\n", row.shard, name_of(row.what),
               known_as(row.what), number(bytes.parameters), number(bytes.gradients), number(bytes.optimizer),
               number(bytes.total()), number(row.reduction), format_bytes(row.state.total()), format_bytes(row.peak),
               row.given ? "  <- the file" : "");
  }
  fmt::print(
      "\nstate: weights, gradients and optimizer state as they are held, with padding. peak: all of a rank, activations of\n"
      "{} sample{} at once included.\n",
      config.train.microbatch, config.train.microbatch == 1 ? "" : "s");
  if (!cap) return;
  fmt::print("\nWith {} on a rank:\n", format_bytes(*cap));
  for (const auto& one : plan::precision_kinds()) {
    const auto found = fit(question, one, *cap);
    fmt::print("  {:<22} {}\n", one.name,
               found ? fmt::format("shard = {}, sharded = \"{}\" fits ({})", found->shard, name_of(found->what),
                                   format_bytes(found->bytes))
                     : fmt::format("nothing fits on {} ranks: more of them, or a smaller train.microbatch", question.ranks));
  }
}

void print_json(const Question& question, const std::vector<plan::MemoryRow>& rows, std::optional<std::int64_t> cap) {
  using Json = nlohmann::ordered_json;
  const auto memory = plan::memory_of(question.model, question.layout, question.options);
  Json answer{{"parameters", question.model.parameter_elements()},
              {"ranks", question.ranks},
              {"microbatch", question.config.train.microbatch},
              {"memory_bytes", memory.total()},
              {"memory",
               {{"parameters", memory.state.parameters},
                {"masters", memory.state.masters},
                {"gradients", memory.state.gradients},
                {"optimizer", memory.state.optimizer},
                {"gathered", memory.gathered},
                {"whole_gradients", memory.whole_gradients},
                {"communication", memory.communication},
                {"activations", memory.activations},
                {"data", memory.data},
                {"workspaces", memory.workspaces},
                {"building", memory.building},
                {"host", memory.state.host}}},
              {"table", Json::array()}};
  for (const auto& row : rows)
    answer["table"].push_back({{"precision", row.kind->name},
                               {"shard", row.shard},
                               {"replicate", question.ranks / row.shard},
                               {"sharded", name_of(row.what)},
                               {"bytes_per_parameter",
                                {{"parameters", row.per_parameter.parameters},
                                 {"gradients", row.per_parameter.gradients},
                                 {"optimizer", row.per_parameter.optimizer},
                                 {"total", row.per_parameter.total()}}},
                               {"reduction_factor", row.reduction},
                               {"state_bytes", row.state.total()},
                               {"memory_bytes", row.peak},
                               {"file", row.given}});
  if (cap) {
    answer["fits"] = Json::array();
    for (const auto& kind : plan::precision_kinds())
      if (const auto found = fit(question, kind, *cap))
        answer["fits"].push_back({{"precision", kind.name},
                                  {"shard", found->shard},
                                  {"sharded", name_of(found->what)},
                                  {"memory_bytes", found->bytes}});
  }
  fmt::print("{}\n", answer.dump());
}

}  // namespace

void add_plan(CLI::App& program, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = program.add_subcommand("plan", "Say how much memory a configuration needs, sharded in every way");
  arguments->config.add_to(*command);
  command->add_flag("--memory", arguments->memory, "Memory of a rank by precision, sharding factor and what is sharded");
  command
      ->add_option("--gpus", arguments->gpus,
                   "For this many data-parallel ranks, the batch divided among them (default: those of [layout])")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--cap", arguments->cap, "Also say what fits into this many GiB on a rank")->check(more_than(0));
  command->add_flag("--json", arguments->json, "Print one object");
  command->callback([arguments, &exit_code] {
    if (!arguments->memory)
      fail_config("plan: choosing a layout is not there yet; allowed: --memory, the memory of all of them");
    const Question question = ask(*arguments);
    const auto rows = plan::memory_table(question.model, question.layout, question.options, question.ranks);
    std::optional<std::int64_t> cap;
    if (arguments->cap) cap = static_cast<std::int64_t>(*arguments->cap * (1 << 30));
    if (arguments->json)
      print_json(question, rows, cap);
    else
      print_words(question, rows, cap);
    exit_code = kDone;
  });
}

}  // namespace bonfire::cli
