#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <string>

#include <gtest/gtest.h>

namespace bonfire::test {

// For the output of a program: a reader that does as the test likes.
struct Pipe {
  Pipe() { EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0); }
  ~Pipe() {
    close_reader();
    close_writer();
  }
  void close_reader() { close(0); }
  void close_writer() { close(1); }
  // Until the other side has ended.
  std::string read_all() {
    close_writer();
    std::string text;
    char bytes[1 << 16];
    ssize_t got;
    while ((got = read(ends[0], bytes, sizeof bytes)) > 0) text.append(bytes, static_cast<std::size_t>(got));
    return text;
  }
  void close(int end) {
    if (ends[end] >= 0) ::close(ends[end]);
    ends[end] = -1;
  }
  int ends[2] = {-1, -1};
};

}  // namespace bonfire::test
