#include "bonfire/comm/rank_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "bonfire/base/system_error.h"

namespace bonfire {

using Stream = Terminal::Stream;

RankOutput::RankOutput(Options options, Terminal& terminal)
    : options_(std::move(options)),
      terminal_(&terminal),
      file_(open(options_.file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {
  require_system(file_.fd() >= 0, "cannot write the output of a rank to '{}'", options_.file);
}

// False, with the reason in errno: not all of it could be written.
bool RankOutput::write_line(std::string_view text) {
  const std::string line = fmt::format("{}\n", text);
  std::string_view left = line;
  while (!left.empty()) {
    const ssize_t written = write(file_.fd(), left.data(), left.size());
    if (written >= 0)
      left.remove_prefix(static_cast<std::size_t>(written));
    else if (errno != EINTR)
      return false;
  }
  return true;
}

void RankOutput::to_file(std::string_view text) {
  if (missing_ > 0) {
    // What stands before it may be half a line.
    if (write_line(fmt::format("\nbonfire: {} lines of the rank are missing here, which could not be written", missing_))) {
      options_.log.info("'{}' can be written again; {} lines are missing in it", options_.file, missing_);
      missing_ = 0;
    }
  }
  if (missing_ == 0 && write_line(text)) return;
  const int reason = errno;
  if (missing_++ == 0)
    options_.log.warning("'{}' cannot be written: {}; what follows is missing in it", options_.file, std::strerror(reason));
}

void RankOutput::line(std::string_view text, Stream stream) {
  to_file(text);
  last_lines_.emplace_back(text);
  if (last_lines_.size() > options_.remembered) last_lines_.pop_front();
  if (options_.echo && !options_.raw) terminal_->write(stream, fmt::format("{}{}\n", options_.prefix, text));
}

void RankOutput::note(std::string_view text) { to_file(text); }

// A progress bar draws over itself: shown, not kept.
void RankOutput::transient(std::string_view text, Stream stream) {
  if (options_.echo && !options_.raw) terminal_->write(stream, fmt::format("{}{}\r", options_.prefix, text));
}

bool RankOutput::take(const Socket& pipe, Stream stream, std::string& unfinished) {
  constexpr std::size_t kLongestLine = 1 << 16;
  constexpr int kMostReads = 32;
  char bytes[1 << 16];
  for (int reads = 0; reads < kMostReads; ++reads) {
    const ssize_t got = read(pipe.fd(), bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN;
    if (got == 0) return false;
    const std::string_view fresh(bytes, static_cast<std::size_t>(got));
    if (options_.echo && options_.raw) terminal_->write(stream, std::string(fresh));
    unfinished.append(fresh);
    std::size_t start = 0, end;
    while ((end = unfinished.find_first_of("\r\n", start)) != std::string::npos) {
      const std::string_view text(unfinished.data() + start, end - start);
      const bool carriage = unfinished[end] == '\r';
      if (carriage && end + 1 == unfinished.size()) {
        // Either a progress bar or the first half of "\r\n": shown as the former, and the latter adds an empty line at most.
        transient(text, stream);
      } else if (carriage && unfinished[end + 1] != '\n') {
        transient(text, stream);
      } else {
        line(text, stream);
        if (carriage) ++end;
      }
      start = end + 1;
    }
    unfinished.erase(0, start);
    if (unfinished.size() >= kLongestLine) {
      line(unfinished, stream);
      unfinished.clear();
    }
  }
  return true;
}

void RankOutput::take(Socket& out, Socket& err) {
  if (out && !take(out, Stream::out, unfinished_out_)) out.close();
  if (err && !take(err, Stream::err, unfinished_err_)) err.close();
}

void RankOutput::finish() {
  if (!unfinished_out_.empty()) line(unfinished_out_, Stream::out);
  if (!unfinished_err_.empty()) line(unfinished_err_, Stream::err);
  unfinished_out_.clear();
  unfinished_err_.clear();
  if (missing_ > 0) options_.log.warning("'{}': the last {} lines are missing in it", options_.file, missing_);
  missing_ = 0;
}

}  // namespace bonfire
