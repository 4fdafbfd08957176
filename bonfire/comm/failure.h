#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"

namespace bonfire {

// What is wrong with the run, and not with the rank that says so: it ends, whatever is done about ranks that are lost.
class BONFIRE_API RunOver : public Error {
 public:
  using Error::Error;
};

// Why a rank says it failed: what it leaves in its error file before it goes, for whoever started it.
struct FailureNote {
  // `communication`: another rank was lost, so this one is probably not where it began. `stall`: the watchdog ended the run.
  // `run`: a RunOver.
  enum class Kind { exception, configuration, communication, stall, run };
  Kind kind = Kind::exception;
  std::string message = {};  // one line
  std::int64_t at = 0;       // now_ns() when it was noticed
  std::string details = {};  // what else the exception said, such as LibTorch's stack; for the rank's log
};

// False where it cannot be written.
BONFIRE_API bool write_failure_note(const std::string& file, const FailureNote& note);
// Nothing where there is no such file or it is not whole.
BONFIRE_API std::optional<FailureNote> read_failure_note(const std::string& file);

// How one rank ended, other than well.
struct RankFailure {
  int rank = 0;
  int node = 0;
  int code = 0;    // exit code; meaningless where signal is not 0
  int signal = 0;  // that killed it
  std::optional<FailureNote> note = {};
  std::int64_t at = 0;  // when the launcher saw it
  std::vector<std::string> last_lines = {};
  std::string log_file = {};
};

// "rank 2 was killed by SIGKILL (signal 9)", "rank 1 failed: std::bad_alloc".
BONFIRE_API std::string cause_of(const RankFailure& failure);
// The last lines of the rank's output, without those that only repeat the cause; empty where none are left.
BONFIRE_API std::string last_words_of(const RankFailure& failure);
// "SIGKILL (signal 9)".
BONFIRE_API std::string signal_name(int signal);

// It failed because it had lost another rank, and is probably not where the trouble began.
BONFIRE_API bool is_victim(const RankFailure& failure);
// Of several that failed at nearly the same time, the one that made the others fail. REQUIRES: not empty.
BONFIRE_API const RankFailure& first_failure(const std::vector<RankFailure>& failures);

// The wire form, between launchers of several nodes.
BONFIRE_API std::string encode(const RankFailure& failure);
BONFIRE_API std::optional<RankFailure> decode_failure(const std::string& text);

}  // namespace bonfire
