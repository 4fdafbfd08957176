#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/comm/child.h"

// How tests start ranks with the command, and what they look for in what those said.
namespace bonfire::test {

inline const std::string kBonfire = BONFIRE_BUILD_DIR "/bonfire";
inline const std::string kProgram = BONFIRE_BUILD_DIR "/rank_program";

// Words of `bonfire launch`: ranks that run a shell's script, or rank_program.
std::vector<std::string> launch(const std::vector<std::string>& options, const std::string& script);
std::vector<std::string> launch(int ranks, const std::vector<std::string>& options = {});

// The process of a rank, a rank_program, as that has said.
pid_t process_of_rank(Child& run, int rank);

// What torchrun tells the one rank that it has started, which meets nobody at the port.
std::map<std::string, std::string> torchrun(const std::string& port = "1");

bool contains(const std::string& text, const std::string& part);

// Each of the ranks, rank_programs, has come to its end.
void expect_all_done(Child& run, int ranks);

}  // namespace bonfire::test
