#include "bonfire/comm/failure.h"

#include <csignal>
#include <cstring>
#include <ctime>
#include <iterator>
#include <tuple>

#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/json.h"
#include "bonfire/base/output_file.h"

namespace bonfire {
namespace {

using nlohmann::json;

constexpr const char* kKinds[] = {"exception", "configuration", "communication", "stall", "run"};

// Bytes of a rank's output need not be text.
std::string dump(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

json note_to_json(const FailureNote& note) {
  // torchrun reads "message" and "timestamp", in seconds.
  return {{"kind", kKinds[static_cast<int>(note.kind)]},
          {"message", note.message},
          {"details", note.details},
          {"at", note.at},
          {"timestamp", static_cast<std::int64_t>(std::time(nullptr))}};
}

FailureNote note_from_json(const Json& value) {
  FailureNote note;
  const std::string& kind = value.at("kind").string();
  for (int i = 0; i < static_cast<int>(std::size(kKinds)); ++i)
    if (kind == kKinds[i]) note.kind = static_cast<FailureNote::Kind>(i);
  note.message = value.at("message").string();
  note.details = value.at("details").string();
  note.at = value.at("at").integer();
  return note;
}

}  // namespace

bool write_failure_note(const std::string& file, const FailureNote& note) {
  try {
    write_file(file, dump(note_to_json(note)) + '\n', Survives::process);
    return true;
  } catch (const WriteError&) {
    return false;
  }
}

std::optional<FailureNote> read_failure_note(const std::string& file) {
  try {
    return note_from_json(read_json(file));
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::string signal_name(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{} (signal {})", name, signal) : fmt::format("signal {}", signal);
}

std::string cause_of(const RankFailure& failure) {
  if (failure.note && failure.note->kind == FailureNote::Kind::stall) return failure.note->message;
  std::string cause;
  if (failure.signal != 0) {
    cause = fmt::format("rank {} was killed by {}", failure.rank, signal_name(failure.signal));
    if (failure.note) cause += ": " + failure.note->message;
  } else if (failure.note) {
    cause = fmt::format("rank {} failed: {}", failure.rank, failure.note->message);
  } else {
    cause = fmt::format("rank {} ended with exit code {}", failure.rank, failure.code);
  }
  return cause;
}

std::string last_words_of(const RankFailure& failure) {
  // What a watchdog says is about another rank than the one that says it.
  if (failure.note && failure.note->kind == FailureNote::Kind::stall) return {};
  std::string lines;
  for (const std::string& line : failure.last_lines) {
    const bool repeats =
        failure.note && !failure.note->message.empty() && line.find(failure.note->message) != std::string::npos;
    if (!repeats) lines += "\n  | " + line;
  }
  if (lines.empty()) return {};
  return fmt::format("last lines of rank {}{}:{}", failure.rank,
                     failure.log_file.empty() ? "" : fmt::format(" ({})", failure.log_file), lines);
}

// One that wrote to a rank that was gone: Gloo does not ask the kernel to spare it the signal.
bool is_victim(const RankFailure& failure) {
  return failure.signal == SIGPIPE || (failure.note && failure.note->kind == FailureNote::Kind::communication);
}

const RankFailure& first_failure(const std::vector<RankFailure>& failures) {
  require(!failures.empty(), "no failure to choose from");
  // One that was killed otherwise cannot have been a victim; one that threw something else may.
  const auto order = [](const RankFailure& failure) {
    return std::tuple(is_victim(failure) ? 2 : failure.signal != 0 ? 0 : 1, failure.note ? failure.note->at : failure.at);
  };
  const RankFailure* first = &failures.front();
  for (const RankFailure& failure : failures)
    if (order(failure) < order(*first)) first = &failure;
  return *first;
}

std::string encode(const RankFailure& failure) {
  return dump({{"rank", failure.rank},
               {"node", failure.node},
               {"code", failure.code},
               {"signal", failure.signal},
               {"note", failure.note ? note_to_json(*failure.note) : json()},
               {"at", failure.at},
               {"last_lines", failure.last_lines},
               {"log_file", failure.log_file}});
}

std::optional<RankFailure> decode_failure(const std::string& text) {
  try {
    const Json value = parse_json(text, "a failure");
    const auto number = [&](const char* key) { return static_cast<int>(value.at(key).integer()); };
    RankFailure failure;
    failure.rank = number("rank");
    failure.node = number("node");
    failure.code = number("code");
    failure.signal = number("signal");
    if (!value.at("note").is_null()) failure.note = note_from_json(value.at("note"));
    failure.at = value.at("at").integer();
    for (const Json& line : value.at("last_lines").items()) failure.last_lines.push_back(line.string());
    failure.log_file = value.at("log_file").string();
    return failure;
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace bonfire
