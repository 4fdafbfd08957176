#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <string>

namespace bonfire::testing {

// What is asked of the disk, and how it answers: the library finds these functions before the system's.
struct Disk {
  std::string within{};                              // only calls about files below are counted; empty: none
  std::atomic<int> calls{0};                         // of any of the functions in disk.cpp
  std::atomic<int> failing{0};                       // the how manieth fails; 0: none
  std::atomic<int> reason{0};                        // errno
  std::atomic<bool> stays{false};                    // so do all after it
  std::atomic<bool> dies{false};                     // it does not fail, but is the last one of this process
  std::atomic<bool> exchanges{true};                 // rename knows flags
  std::function<void(std::size_t bytes)> on_read{};  // called before a read

  // Called before each call that does not fail, with the paths that it is about; `to` is where a rename goes.
  enum class What { write, flush, rename, make_folder };
  std::function<void(What what, const std::string& path, const std::string& to)> on_change{};
};
extern Disk disk;

}  // namespace bonfire::testing
