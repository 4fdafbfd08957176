#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/App.hpp>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/plan/memory_table.h"
#include "bonfire/train/pipedream_model.h"
#include "bonfire/train/predict.h"
#include "bonfire/train/selection.h"
#include "cli/commands.h"
#include "cli/config_arguments.h"
#include "cli/limits.h"

namespace bonfire::cli {
namespace {

struct PlanArguments {
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

Question ask(const PlanArguments& arguments) {
  Question question{.config = load_config(arguments.config.file, arguments.config.overrides)};
  const bool asynchronous = runs_pipedream(question.config);
  if (question.config.layout.pipeline > 1 && !asynchronous)
    fail_key(question.config, "layout.pipeline",
             fmt::format("the memory table covers data parallelism only; allowed here: 1, or with layout.schedule = {} any",
                         fmt::join(schedule::pipedream_names(), " | ")));
  if (asynchronous) {
    if (arguments.gpus || arguments.cap)
      fail_key(question.config, "layout.schedule",
               fmt::format("stages and replicas are those of the file, and --{} asks for another layout; allowed: neither "
                           "--gpus nor --cap",
                           arguments.gpus ? "gpus" : "cap"));
    resolve(question.config, question.config.ranks());
    return question;
  }
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
  plan::DataParallel layout = question.layout.with_shard(1);
  layout.what = plan::Sharded::none;
  if (kind.compute != layout.compute) layout.scales = {};
  layout.compute = kind.compute;
  layout.master = kind.master;
  layout.gradient = layout.reduction = kind.gradient;
  return plan::smallest_fit(question.model, layout, question.options, cap);
}

// What the ranks of a parameter server hold and send.
struct ServedNeeds {
  plan::Served served{};
  std::int64_t worker_state = 0, worker_peak = 0, server_state = 0;
  struct Message {
    std::string what;
    Collective message;
  };
  std::vector<Message> messages;  // of a worker with each server in a step, in their order
  std::int64_t bytes = 0;         // of a worker with all servers
};

ServedNeeds served_needs(const Config& config) {
  ServedNeeds needs{.served = served_of(config), .worker_peak = predict_memory(config).total()};
  const auto flats = plan::served_flats(model_of(config), served_worker_of(config), needs.served);
  const auto messages = plan::messages_of_worker(flats, needs.served);
  needs.worker_state = plan::worker_state_bytes(flats, needs.served);
  needs.server_state = plan::server_state_bytes(flats, needs.served);
  std::vector<std::string> what;
  const auto of = [](const plan::FlatLayout& flat) { return fmt::format("of the Unit of {}", flat.segments.front().name); };
  for (const auto& flat : flats)
    if (flat.any_trained()) what.push_back("gradients " + of(flat));
  what.push_back("end of the step");
  for (auto flat = flats.rbegin(); flat != flats.rend(); ++flat)
    if (flat->any_trained()) what.push_back("weights " + of(*flat));
  for (std::size_t at = 0; at < messages.size(); ++at) {
    needs.messages.push_back({what.at(at), messages[at]});
    needs.bytes += messages[at].bytes * needs.served.servers;
  }
  return needs;
}

void print_server(const Config& config) {
  const auto needs = served_needs(config);
  const auto& [workers, servers] = std::pair(needs.served.workers, needs.served.servers);
  fmt::print("Parameter server ({}): {} worker{}, {} server{}\n", config.layout.server_mode, workers,
             workers == 1 ? "" : "s", servers, servers == 1 ? "" : "s");
  fmt::print("  a worker holds {} of model state, {} at its peak\n", format_bytes(needs.worker_state),
             format_bytes(needs.worker_peak));
  fmt::print("  a server holds {}: weights, gradients, optimizer state, and gradients of each worker\n",
             format_bytes(needs.server_state));
  fmt::print("  in a step a worker exchanges {} messages with each server, {} with all of them:\n", needs.messages.size(),
             format_bytes(needs.bytes));
  for (const auto& [what, message] : needs.messages)
    fmt::print("    {:<8} {:>12}  {}\n", name_of(message.kind), format_bytes(message.bytes), what);
}

void print_words(const Question& question, const std::vector<plan::MemoryRow>& rows, std::optional<std::int64_t> cap) {
  const auto& config = question.config;
  const std::string split =
      config.layout.tensor == 1 ? "" : fmt::format(" on each of {} ranks that split the layers,", config.layout.tensor);
  const std::string shared =
      config.layout.context == 1 ? "" : fmt::format(", each of {} ranks that share its samples", config.layout.context);
  fmt::print("{}: {}, {} parameters{} in {} Units; {} data-parallel rank{}{}\n", config.file, config.model.type,
             format_count(question.model.parameter_elements()), split, question.model.units.size(), question.ranks,
             question.ranks == 1 ? "" : "s", shared);
  if (config.layout.server > 0) return print_server(config);
  const auto memory = plan::memory_of(question.model, question.layout, question.options);
  const std::int64_t total = memory.total();
  fmt::print("This file ({}, shard = {}, sharded = \"{}\") needs {} per rank at its peak\n", config.train.precision,
             config.layout.shard, config.layout.sharded, format_bytes(total));
  const auto part = [&](const char* name, std::int64_t bytes) {
    if (bytes > 0) fmt::print("  {:<28} {:>12}  {:>4}\n", name, format_bytes(bytes), percent(bytes, total));
  };
  part("parameters", memory.state.parameters);
  part("fp32 master weights", memory.state.masters);
  part("gradients", memory.state.gradients);
  part("optimizer state", memory.state.optimizer);
  part("gathered parameters", memory.gathered);
  part("unsharded gradients", memory.whole_gradients);
  part("communication", memory.communication);
  part("activations", memory.activations);
  part("data and tables", memory.data);
  part("library workspaces", memory.workspaces);
  part("copy for checkpoints", memory.saving);
  if (total > memory.step())
    fmt::print("  a step needs only {}; the peak is reached {}\n", format_bytes(memory.step()),
               total == memory.building ? "while the model is built"
                                        : "after the first backward, when parameters move to other buckets");
  if (memory.state.host > 0) fmt::print("  and host memory: {}\n", format_bytes(memory.state.host));

  const std::string title = fmt::format("\n{:>4}  {:<11} {:<7} {:>8} {:>7} {:>7} {:>7}   {:>6}  {:>11}  {:>11}", "F",
                                        "sharded", "", "weights", "grads", "optim", "bytes", "less", "state", "peak");
  const plan::PrecisionKind* kind = nullptr;
  for (const auto& row : rows) {
    if (row.kind != kind) {
      kind = row.kind;
      fmt::print("\n{}: bytes per parameter and rank", kind->name);
      if (std::string(kind->name) == "fp32")
        fmt::print(" (a rule of thumb adds {} for activations: {} in total)", plan::activations_per_parameter,
                   number(row.per_parameter.total() + plan::activations_per_parameter));
      fmt::print("{}\n", title);
    }
    const auto& bytes = row.per_parameter;
    fmt::print("{:>4}  {:<11} {:<7} {:>8} {:>7} {:>7} {:>7}  {:>6}x  {:>11}  {:>11}{}\n", row.shard, name_of(row.what),
               known_as(row.what), number(bytes.parameters), number(bytes.gradients), number(bytes.optimizer),
               number(bytes.total()), number(row.reduction), format_bytes(row.state.total()), format_bytes(row.peak),
               row.given ? "  <- this file" : "");
  }
  fmt::print(
      "\nstate: weights, gradients and optimizer state, with padding. peak: total memory per rank, with the activations of "
      "a\n"
      "microbatch of {} sample{}.\n",
      config.train.microbatch, config.train.microbatch == 1 ? "" : "s");
  if (!cap) return;
  fmt::print("\nWith {} per rank:\n", format_bytes(*cap));
  for (const auto& one : plan::precision_kinds()) {
    const auto found = fit(question, one, *cap);
    fmt::print("  {:<22} {}\n", one.name,
               found
                   ? fmt::format("shard = {}, sharded = \"{}\" fits ({})", found->shard, name_of(found->what),
                                 format_bytes(found->bytes))
                   : fmt::format("nothing fits on {} ranks: use more ranks or a smaller train.microbatch", question.ranks));
  }
}

void print_json(const Question& question, const std::vector<plan::MemoryRow>& rows, std::optional<std::int64_t> cap) {
  using Json = nlohmann::ordered_json;
  if (question.config.layout.server > 0) {
    const auto needs = served_needs(question.config);
    auto messages = Json::array();
    for (const auto& [what, message] : needs.messages)
      messages.push_back({{"kind", name_of(message.kind)}, {"bytes", message.bytes}, {"what", what}});
    fmt::print("{}\n", Json{{"parameters", question.model.parameter_elements()},
                            {"workers", needs.served.workers},
                            {"servers", needs.served.servers},
                            {"memory_bytes", std::max(needs.worker_peak, needs.server_state)},
                            {"worker_memory_bytes", needs.worker_peak},
                            {"worker_state_bytes", needs.worker_state},
                            {"server_state_bytes", needs.server_state},
                            {"messages", messages},
                            {"bytes_per_step", needs.bytes}}
                           .dump());
    return;
  }
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
                {"saving", memory.saving},
                {"building", memory.building},
                {"moving", memory.moving},
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

std::string stage_words(const schedule::RoundRobin& robin) {
  const bool shares = robin.mode == schedule::WeightMode::two_buffers || robin.mode == schedule::WeightMode::flush;
  return shares ? "microbatches" : "minibatches";
}

// PipeDream's stages, beside data parallelism on as many ranks.
void print_stages(const Config& config) {
  const auto robin = robin_of(config);
  const auto model = model_of(config);
  fmt::print(
      "{}: {}, {} parameters in {} Units; {} on {} ranks, replicas {}, minibatches of {} microbatches of {} samples\n\n",
      config.file, config.model.type, format_count(model.parameter_elements()), plan::chain_of(model).size(),
      config.layout.schedule, robin.ranks(), fmt::join(robin.replicas, "-"), robin.microbatches, config.train.microbatch);
  fmt::print("{:>5} {:>6} {:>8} {:>9} {:>8} {:>11} {:>11} {:>11} {:>11} {:>11}\n", "stage", "Units", "replicas", "in flight",
             "versions", "weights", "gradients", "optimizer", "activations", "peak");
  const auto stages = predict_stages(config);
  for (std::size_t at = 0; at < stages.size(); ++at) {
    const auto& [first, units, replicas, in_flight, versions, memory] = stages[at];
    fmt::print("{:>5} {:>6} {:>8} {:>9} {:>8} {:>11} {:>11} {:>11} {:>11} {:>11}\n", at, units, replicas, in_flight,
               versions, format_bytes(memory.state.parameters + memory.state.masters), format_bytes(memory.state.gradients),
               format_bytes(memory.state.optimizer), format_bytes(memory.activations), format_bytes(memory.total()));
  }
  const Config beside = beside_data_parallel(config);
  fmt::print(
      "\nin flight: {} on each rank of a stage. weights: all versions, and the masters that updates change where there are "
      "several.\npeak: of a rank. Data parallelism on {} ranks, with batches of {} samples: {}\n",
      stage_words(robin), robin.ranks(), beside.train.batch, format_bytes(predict_memory(beside).total()));
}

void print_stages_json(const Config& config) {
  using Json = nlohmann::ordered_json;
  const Config beside = beside_data_parallel(config);
  Json answer{
      {"parameters", model_of(config).parameter_elements()},
      {"ranks", config.ranks()},
      {"schedule", config.layout.schedule},
      {"microbatch", config.train.microbatch},
      {"memory_bytes", predict_memory(config).total()},
      {"stages", Json::array()},
      {"data_parallel",
       {{"ranks", beside.ranks()}, {"batch", beside.train.batch}, {"memory_bytes", predict_memory(beside).total()}}}};
  for (const auto& stage : predict_stages(config))
    answer["stages"].push_back({{"first_unit", stage.first_unit},
                                {"units", stage.units},
                                {"replicas", stage.replicas},
                                {"in_flight", stage.in_flight},
                                {"versions", stage.versions},
                                {"weights_bytes", stage.memory.state.parameters + stage.memory.state.masters},
                                {"gradient_bytes", stage.memory.state.gradients},
                                {"optimizer_bytes", stage.memory.state.optimizer},
                                {"activation_bytes", stage.memory.activations},
                                {"memory_bytes", stage.memory.total()}});
  fmt::print("{}\n", answer.dump());
}

}  // namespace

void add_plan(CLI::App& program, int& exit_code) {
  auto arguments = std::make_shared<PlanArguments>();
  CLI::App* command =
      program.add_subcommand("plan", "Predict the memory that a configuration needs, for each sharding option");
  arguments->config.add_to(*command);
  command->add_flag("--memory", arguments->memory,
                    "Print memory per rank by precision, sharding factor and what is sharded");
  command
      ->add_option("--gpus", arguments->gpus,
                   "Number of data-parallel ranks, which divide the batch among them (default: from [layout])")
      ->check(CLI::Range(1, 1 << 20));
  command->add_option("--cap", arguments->cap, "Also print the least sharding that fits into this many GiB per rank")
      ->check(more_than(0));
  command->add_flag("--json", arguments->json, "Print one JSON object");
  command->callback([arguments, &exit_code] {
    if (!arguments->memory)
      fail_config(
          "plan: a layout cannot be chosen automatically yet; allowed: --memory, which lists the memory of all layouts");
    const Question question = ask(*arguments);
    exit_code = kDone;
    if (runs_pipedream(question.config)) {
      arguments->json ? print_stages_json(question.config) : print_stages(question.config);
      return;
    }
    const auto rows = plan::memory_table(question.model, question.layout, question.options, question.ranks);
    std::optional<std::int64_t> cap;
    if (arguments->cap) cap = static_cast<std::int64_t>(*arguments->cap * (1 << 30));
    if (arguments->json)
      print_json(question, rows, cap);
    else
      print_words(question, rows, cap);
  });
}

}  // namespace bonfire::cli
