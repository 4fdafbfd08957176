#include "bonfire/comm/terminal.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "bonfire/comm/signal_events.h"

namespace bonfire {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMostBytes = 1 << 20;  // waiting
constexpr std::size_t kMostWords = 1000;     // messages of the launcher, which are not counted as bytes

bool same_file(int a, int b) {
  struct stat one {
  }, other{};
  return fstat(a, &one) == 0 && fstat(b, &other) == 0 && one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

// 0, or errno: nobody reads any more.
int write_all(int fd, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t written = ::write(fd, text.data() + done, text.size() - done);
    if (written > 0)
      done += static_cast<std::size_t>(written);
    else if (errno == EAGAIN)
      std::this_thread::sleep_for(10ms);  // another program has made the shared file non-blocking
    else if (errno != EINTR)
      return errno;
  }
  return 0;
}

}  // namespace

// One queue and the thread that empties it.
class Terminal::Lane : public std::enable_shared_from_this<Terminal::Lane> {
 public:
  explicit Lane(std::string kept_in) : kept_in_(std::move(kept_in)) {}

  void start() {
    const SignalsBlocked signals;  // in the new thread, for ever: a terminal stops no background job that blocks SIGTTOU
    // It shares the lane: where it hangs in a write, nobody can wait for its end.
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }

  void write(int fd, std::string text) {
    const std::lock_guard lock(mutex_);
    if (leaving_out_ > 0 && bytes_ > kMostBytes / 2) {
      leaving_out_ += lines(text);
      incomplete_ = incomplete_ || fd == STDOUT_FILENO;
      return;
    }
    say_what_was_left_out();
    if (bytes_ + text.size() > kMostBytes) {
      leaving_out_ += std::max<std::size_t>(1, lines(text));
      left_out_of_ = fd;
      incomplete_ = incomplete_ || fd == STDOUT_FILENO;
      return;
    }
    bytes_ += text.size();
    push({fd, std::move(text), {}});
  }

  void call(std::function<void()> words) {
    const std::lock_guard lock(mutex_);
    if (words_ < kMostWords) push({-1, {}, std::move(words)});
  }

  void drain(std::chrono::milliseconds patience, const std::function<bool()>& give_up) {
    std::unique_lock lock(mutex_);
    say_what_was_left_out();
    auto until = std::chrono::steady_clock::now() + patience;
    std::size_t left = queue_.size();
    while (!queue_.empty() || busy_) {
      moved_.wait_for(lock, 20ms);
      if (queue_.size() != left) until = std::chrono::steady_clock::now() + patience;
      left = queue_.size();
      lock.unlock();
      if (give_up() || std::chrono::steady_clock::now() >= until) return;
      lock.lock();
    }
  }

  int stdout_error() {
    const std::lock_guard lock(mutex_);
    if (error_[0] != 0) return error_[0];
    const bool waiting = writing_ == STDOUT_FILENO || std::any_of(queue_.begin(), queue_.end(), [](const Entry& entry) {
                           return entry.fd == STDOUT_FILENO;
                         });
    return incomplete_ || waiting ? EAGAIN : 0;
  }

  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    wake_.notify_all();
  }

 private:
  struct Entry {
    int fd;
    std::string text;
    std::function<void()> words;
  };

  static std::size_t lines(const std::string& text) {
    return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
  }

  void push(Entry entry) {
    if (entry.words) ++words_;
    queue_.push_back(std::move(entry));
    wake_.notify_all();
  }

  void say_what_was_left_out() {
    if (leaving_out_ == 0) return;
    push({left_out_of_,
          fmt::format("\nbonfire: {} lines of the ranks were left out here, because nobody read them; they are in {}\n",
                      leaving_out_, kept_in_),
          {}});
    leaving_out_ = 0;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return closed_ || !queue_.empty(); });
      if (closed_) return;
      Entry entry = std::move(queue_.front());
      queue_.pop_front();
      bytes_ -= std::min(bytes_, entry.text.size());
      if (entry.words) --words_;
      const bool gone = entry.fd >= 0 && error_[entry.fd == STDERR_FILENO] != 0;
      busy_ = true;
      writing_ = entry.fd;
      lock.unlock();
      int error = 0;
      if (entry.words)
        entry.words();
      else if (!gone)
        error = write_all(entry.fd, entry.text);
      lock.lock();
      if (error != 0) error_[entry.fd == STDERR_FILENO] = error;
      busy_ = false;
      writing_ = -1;
      moved_.notify_all();
    }
  }

  const std::string kept_in_;
  std::mutex mutex_;
  std::condition_variable wake_, moved_;
  std::deque<Entry> queue_;
  std::size_t bytes_ = 0;
  std::size_t words_ = 0;
  std::size_t leaving_out_ = 0;  // lines since the buffer was full
  int left_out_of_ = STDOUT_FILENO;
  int error_[2] = {0, 0};    // of stdout and stderr: nobody reads any more
  bool incomplete_ = false;  // something for stdout was left out
  bool busy_ = false;
  int writing_ = -1;  // where to, while busy
  bool closed_ = false;
};

Terminal::Terminal(std::string kept_in) : out_(std::make_shared<Lane>(kept_in)) {
  out_->start();
  err_ = out_;
  if (same_file(STDOUT_FILENO, STDERR_FILENO)) return;
  err_ = std::make_shared<Lane>(std::move(kept_in));
  err_->start();
}

Terminal::~Terminal() {
  out_->close();
  err_->close();
}

int Terminal::stdout_error() const { return out_->stdout_error(); }

void Terminal::write(Stream stream, std::string text) {
  lane(stream).write(stream == Stream::out ? STDOUT_FILENO : STDERR_FILENO, std::move(text));
}

Log Terminal::relay(Log log) {
  // It decides itself what is worth a word.
  return Log(
      [lane = err_, log = std::move(log)](LogLevel level, std::string_view words) {
        lane->call([log, level, text = std::string(words)] { log.write(level, text); });
      },
      LogLevel::debug);
}

void Terminal::drain(std::chrono::milliseconds patience, const std::function<bool()>& give_up) {
  err_->drain(patience, give_up);
  if (out_ != err_) out_->drain(patience, give_up);
}

}  // namespace bonfire
