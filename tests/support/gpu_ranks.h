#pragma once

#include <filesystem>
#include <functional>

#include "bonfire/comm/world.h"

namespace bonfire::testing {

// Runs `body` as `ranks` ranks over NCCL, each a process with a GPU (they share GPUs where there are fewer): CUDA has one
// backward thread per device for a whole process, so ranks cannot be threads there.
//
// The processes are copies of this test program that run the current test alone, and in them this function calls `body`.
// So a test that uses it does nothing else that matters. A copy's failures are this test's, with what it printed. With
// BONFIRE_TEST_REPEATS=N in the environment `body` is called N times in a row.
// REQUIRES: called inside a TEST, at most once; a GPU is available.
void run_gpu_ranks(int ranks, const std::function<void(World&)>& body);

// A folder that all ranks see, removed with its content after the last has ended. REQUIRES: called by `body`.
std::filesystem::path folder_of_gpu_ranks();

}  // namespace bonfire::testing

// Ends the current test, by name and with the reason, where there is no GPU.
#define BONFIRE_SKIP_WITHOUT_GPU() \
  if (!::bonfire::gpu_available()) GTEST_SKIP() << ::bonfire::gpu_unavailable_reason()
