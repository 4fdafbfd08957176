#pragma once

#include <functional>

#include <CLI/App.hpp>

// One file per subcommand. Each function adds its subcommand to the program; when it is the one that was asked for, its
// callback runs and leaves its exit code in `exit_code`. Errors are thrown: main.cpp turns them into words and codes.
namespace bonfire::cli {

// Exit codes that scripts rely on.
inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kBadRequest = 2;
inline constexpr int kStoppedAfterSaving = 3;

void add_bench_comm(CLI::App& bench, int& exit_code);  // a subcommand of `bench`
void add_bench_step(CLI::App& bench, int& exit_code);  // a subcommand of `bench`
void add_checkpoint(CLI::App& program, int& exit_code);
void add_doctor(CLI::App& program, int& exit_code);
void add_launch(CLI::App& program, int& exit_code);
void add_partition(CLI::App& program, int& exit_code);
void add_plan(CLI::App& program, int& exit_code);
void add_profile(CLI::App& program, int& exit_code);
void add_schedule(CLI::App& program, int& exit_code);
void add_tokens(CLI::App& program, int& exit_code);
void add_train(CLI::App& program, int& exit_code);

}  // namespace bonfire::cli
