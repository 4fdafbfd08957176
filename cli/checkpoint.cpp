#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/App.hpp>
#include <nlohmann/json.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"
#include "bonfire/base/look.h"
#include "bonfire/base/size.h"
#include "bonfire/checkpoint/checkpoint_folder.h"
#include "bonfire/checkpoint/compare.h"
#include "bonfire/checkpoint/load.h"
#include "bonfire/checkpoint/manifest.h"
#include "bonfire/checkpoint/peft.h"
#include "bonfire/checkpoint/reshard.h"
#include "bonfire/train/adapters.h"
#include "bonfire/train/resume.h"
#include "cli/commands.h"
#include "cli/limits.h"

// Looks into checkpoints and compares them, without the run that has written them.
namespace bonfire::cli {
namespace {

namespace fs = std::filesystem;

// A checkpoint's folder, or the newest checkpoint of a run's.
fs::path checkpoint_at(const std::string& said) {
  const fs::path folder = said;
  if (!is_folder(folder)) fail_config("'{}' is no folder; allowed: that of a checkpoint, or of a run", said);
  if (is_there(folder / manifest_name)) return folder;
  if (const auto newest = latest_checkpoint(checkpoints_of(folder))) return *newest;
  if (is_folder(checkpoints_of(folder))) fail_config("'{}' has no complete checkpoint", said);
  return folder;  // whoever reads it says what it lacks
}

std::int64_t elements_of(const ManifestTensor& tensor) { return bonfire::elements_of(whole_box(tensor.shape)); }
std::int64_t bytes_of(const ManifestTensor& tensor) { return elements_of(tensor) * bonfire::bytes_of(tensor.type); }

std::int64_t bytes_of(const Manifest& manifest) {
  std::int64_t bytes = 0;
  for (const auto& tensor : manifest.tensors) bytes += bytes_of(tensor);
  return bytes;
}

std::size_t files_of(const Manifest& manifest) {
  std::map<std::string, int> files;
  for (const auto& tensor : manifest.tensors)
    for (const auto& piece : tensor.pieces) ++files[piece.file];
  return files.size();
}

std::string text_of(const StateValue& value) {
  return std::visit([](const auto& held) { return fmt::format("{}", held); }, value);
}

void inspect(const std::string& said, bool json) {
  const fs::path checkpoint = checkpoint_at(said);
  const auto manifest = read_manifest(checkpoint);
  if (json) {
    nlohmann::json tensors = nlohmann::json::array(), states = nlohmann::json::object();
    for (const auto& tensor : manifest.tensors)
      tensors.push_back({{"name", tensor.name},
                         {"kind", tensor.kind},
                         {"dtype", name_of(tensor.type)},
                         {"shape", tensor.shape},
                         {"pieces", tensor.pieces.size()}});
    for (const auto& [of, state] : manifest.states)
      for (const auto& [name, value] : state)
        std::visit([&, &of = of, &name = name](const auto& held) { states[of][name] = held; }, value);
    fmt::print("{}\n", nlohmann::json{{"checkpoint", checkpoint.string()},
                                      {"step", manifest.step},
                                      {"bytes", bytes_of(manifest)},
                                      {"files", files_of(manifest)},
                                      {"state", states},
                                      {"tensors", tensors}}
                           .dump());
    return;
  }
  fmt::print("{}: step {}, {} tensors, {} in {} file{}\n", checkpoint.string(), manifest.step, manifest.tensors.size(),
             format_bytes(bytes_of(manifest)), files_of(manifest), files_of(manifest) == 1 ? "" : "s");
  struct Kind {
    std::int64_t tensors = 0, elements = 0, bytes = 0;
  };
  std::map<std::string, Kind> kinds;
  for (const auto& tensor : manifest.tensors) {
    auto& kind = kinds[tensor.kind];
    ++kind.tensors;
    kind.elements += elements_of(tensor);
    kind.bytes += bytes_of(tensor);
  }
  fmt::print("\n{:<16} {:>8} {:>16} {:>12}\n", "kind", "tensors", "elements", "bytes");
  for (const auto& [name, kind] : kinds)
    fmt::print("{:<16} {:>8} {:>16} {:>12}\n", name, kind.tensors, format_count(kind.elements), format_bytes(kind.bytes));
  std::size_t width = 0;
  for (const auto& tensor : manifest.tensors)
    if (tensor.kind == "value" || tensor.kind == "buffer") width = std::max(width, tensor.name.size());
  width = std::max(width, std::string("parameters and buffers").size());
  fmt::print("\n{:<{}}  {:<7} {:>6}  {}\n", "parameters and buffers", width, "dtype", "pieces", "shape");
  for (const auto& tensor : manifest.tensors)
    if (tensor.kind == "value" || tensor.kind == "buffer")
      fmt::print("{:<{}}  {:<7} {:>6}  [{}]\n", tensor.name, width, name_of(tensor.type), tensor.pieces.size(),
                 fmt::join(tensor.shape, ", "));
  for (const auto& [of, state] : manifest.states)
    for (const auto& [name, value] : state) fmt::print("\nstate {}: {} = {}", of, name, text_of(value));
  if (!manifest.states.empty()) fmt::print("\n");
}

// How far long work has come: on a terminal a line that is drawn again, else a line now and then.
class BytesDone {
 public:
  BytesDone(std::string what, std::int64_t bytes)
      : what_(std::move(what)), bytes_(bytes), terminal_(isatty(STDERR_FILENO) != 0), said_(now_ns()) {}
  ~BytesDone() {
    if (drawn_) fmt::print(stderr, "\r\033[K");
  }
  BytesDone(const BytesDone&) = delete;
  BytesDone& operator=(const BytesDone&) = delete;

  void add(std::uint64_t bytes) {
    done_ += static_cast<std::int64_t>(bytes);
    const Nanoseconds now = now_ns(), pause = terminal_ ? 200'000'000 : 10'000'000'000;
    if (now - said_ < pause) return;
    said_ = now;
    const auto line =
        fmt::format("{}: {} of {} ({:.0f}%)", what_, format_bytes(done_), format_bytes(bytes_),
                    100.0 * static_cast<double>(done_) / static_cast<double>(std::max<std::int64_t>(1, bytes_)));
    if (terminal_)
      fmt::print(stderr, "\r\033[K{}", line);
    else
      fmt::print(stderr, "{}\n", line);
    drawn_ = terminal_;
  }
  std::int64_t done() const { return done_; }

 private:
  const std::string what_;
  const std::int64_t bytes_;
  const bool terminal_;
  Nanoseconds said_;
  std::int64_t done_ = 0;
  bool drawn_ = false;
};

// 0 where it cannot be read: whoever reads it says so.
std::int64_t bytes_in(const fs::path& checkpoint) try {
  return bytes_of(read_manifest(checkpoint));
} catch (const ConfigError&) {
  return 0;
}

int verify(const std::string& said, bool json) {
  const fs::path checkpoint = checkpoint_at(said);
  // Whether a file is broken is not known where it may not be read.
  require_readable(checkpoint);
  std::vector<std::string> problems;
  std::int64_t bytes = 0;
  {
    BytesDone progress("read", bytes_in(checkpoint));
    problems = verify_checkpoint(checkpoint, [&](std::uint64_t more) { progress.add(more); });
    bytes = progress.done();
  }
  if (json) {
    fmt::print("{}\n",
               nlohmann::json{{"ok", problems.empty()}, {"problems", problems}, {"checkpoint", checkpoint.string()}}.dump());
  } else {
    for (const auto& problem : problems) fmt::print("{}\n", problem);
    fmt::print("{}: {}\n", checkpoint.string(),
               problems.empty() ? fmt::format("all {} are as they were saved", format_bytes(bytes))
                                : fmt::format("broken: {} problem{}", problems.size(), problems.size() == 1 ? "" : "s"));
  }
  return problems.empty() ? kDone : kFailed;
}

std::string words_of(const TensorDifference& difference) {
  using What = TensorDifference::What;
  switch (difference.what) {
    case What::only_in_first: return "only in the first";
    case What::only_in_second: return "only in the second";
    case What::shape: return "other shape";
    case What::dtype: return "other dtype, same values";
    case What::values: break;
  }
  return fmt::format("{} elements differ, by at most {:.3g}", format_count(difference.elements), difference.largest);
}

int diff(const std::string& first, const std::string& second, bool json) {
  const auto differences = [&] {
    const auto one = checkpoint_at(first), other = checkpoint_at(second);
    BytesDone progress("compared", bytes_in(one) + bytes_in(other));
    return compare_checkpoints(one, other, [&](std::uint64_t more) { progress.add(more); });
  }();
  if (json) {
    nlohmann::json list = nlohmann::json::array();
    for (const auto& difference : differences)
      list.push_back({{"name", difference.name}, {"kind", difference.kind}, {"difference", words_of(difference)}});
    fmt::print("{}\n", nlohmann::json{{"same", differences.empty()}, {"differences", list}}.dump());
  } else {
    for (const auto& difference : differences)
      fmt::print("{}{}: {}\n", difference.kind, difference.name.empty() ? "" : " of " + difference.name,
                 words_of(difference));
    if (differences.empty()) fmt::print("the same tensors, with equal values\n");
  }
  return differences.empty() ? kDone : kFailed;
}

void reshard(const std::string& said, const std::string& to, int parts, bool json) {
  const fs::path from = checkpoint_at(said);
  std::int64_t bytes = 0;
  {
    BytesDone progress("written", bytes_in(from));
    reshard_checkpoint(from, to, {.parts = parts, .progress = [&](std::uint64_t more) { progress.add(more); }});
    bytes = progress.done();
  }
  if (json)
    fmt::print("{}\n", nlohmann::json{{"checkpoint", to}, {"parts", parts}, {"bytes", bytes}}.dump());
  else
    fmt::print("{}: {} in {} file{}\n", to, format_bytes(bytes), parts, parts == 1 ? "" : "s");
}

void adapter(const std::string& said, const std::string& to, bool json) {
  const fs::path from = checkpoint_at(said);
  export_adapters(from, to);
  if (json)
    fmt::print("{}\n", nlohmann::json{{"checkpoint", from.string()}, {"folder", to}}.dump());
  else
    fmt::print("{}: the adapters of {}, for PEFT\n", to, from.string());
}

void merge(const std::string& said, const std::string& to, const std::string& base, bool json) {
  const fs::path from = is_there(fs::path(said) / peft_config_name) ? fs::path(said) : checkpoint_at(said);
  MergeOptions options{.base = base.empty() ? fs::path() : checkpoint_at(base)};
  int weights = 0;
  {
    BytesDone progress("written", bytes_in(base_for_merge(from, options)));
    options.progress = [&](std::uint64_t more) { progress.add(more); };
    weights = merge_adapters(from, to, options);
  }
  if (json)
    fmt::print("{}\n", nlohmann::json{{"checkpoint", to}, {"layers", weights}}.dump());
  else
    fmt::print("{}: the weights with the adapters of {} layers in them\n", to, weights);
}

}  // namespace

void add_checkpoint(CLI::App& program, int& exit_code) {
  struct Arguments {
    std::string checkpoint, other, base;
    int parts = 1;
    bool json = false;
  };
  CLI::App* command =
      program.add_subcommand("checkpoint", "Inspect, verify, compare and rewrite checkpoints; export and merge adapters");
  command->require_subcommand(1);
  const auto add = [&](const char* name, const char* help) {
    auto arguments = std::make_shared<Arguments>();
    CLI::App* verb = command->add_subcommand(name, help);
    verb->add_option("checkpoint", arguments->checkpoint, "Folder of a checkpoint, or of a run: its newest one")->required();
    verb->add_flag("--json", arguments->json, "Print one JSON object to stdout");
    return std::pair(verb, arguments);
  };
  {
    const auto [verb, arguments] = add("inspect", "Show what a checkpoint contains");
    verb->callback([arguments = arguments] { inspect(arguments->checkpoint, arguments->json); });
  }
  {
    const auto [verb, arguments] = add("verify", "Read all of a checkpoint and compare it with its checksums");
    verb->callback([arguments = arguments, &exit_code] { exit_code = verify(arguments->checkpoint, arguments->json); });
  }
  {
    const auto [verb, arguments] = add("diff", "Compare the tensors of two checkpoints; exit code 1 if they differ");
    verb->add_option("other", arguments->other, "The other one")->required();
    verb->callback(
        [arguments = arguments, &exit_code] { exit_code = diff(arguments->checkpoint, arguments->other, arguments->json); });
  }
  {
    const auto [verb, arguments] = add("reshard", "Rewrite a checkpoint with another number of files");
    verb->add_option("to", arguments->other, "Folder of the new checkpoint, which must not exist")->required();
    verb->add_option("--parts", arguments->parts, "Number of files of about the same size; with 1 each tensor is whole")
        ->check(at_least(1))
        ->capture_default_str();
    verb->callback(
        [arguments = arguments] { reshard(arguments->checkpoint, arguments->other, arguments->parts, arguments->json); });
  }
  {
    const auto [verb, arguments] = add("adapter", "Write the adapters of a checkpoint as a PEFT folder");
    verb->add_option("to", arguments->other, "The folder, which must not exist")->required();
    verb->callback([arguments = arguments] { adapter(arguments->checkpoint, arguments->other, arguments->json); });
  }
  {
    const auto [verb, arguments] =
        add("merge", "Merge adapters into their base weights and write a checkpoint without adapters");
    verb->add_option("to", arguments->other, "Folder of the new checkpoint, which must not exist")->required();
    verb->add_option(
        "--base", arguments->base,
        "Checkpoint of the base weights (default: where they were in training). The first argument may then be a "
        "PEFT folder");
    verb->callback(
        [arguments = arguments] { merge(arguments->checkpoint, arguments->other, arguments->base, arguments->json); });
  }
}

}  // namespace bonfire::cli
