#pragma once

#include <string>

#include "tests/support/shell.h"

namespace bonfire::testing {

struct Ended {
  int code = -1;
  std::string out, err;
};

// A folder in which the real program runs, as a person would run it.
class Scratch : public Folder {
 public:
  // `arguments` as the shell reads them; `variables` such as "RANK=0 WORLD_SIZE=1" in front. One that takes longer than
  // `seconds` hangs.
  Ended bonfire(const std::string& arguments, const std::string& variables = "", int seconds = 120) const {
    const Said said = run_shell("cd '" + path().string() + "' && " + variables + " timeout " + std::to_string(seconds) +
                                " '" BONFIRE_BUILD_DIR "/bonfire' " + arguments + " >out.txt 2>err.txt");
    return {said.code, read("out.txt"), read("err.txt")};
  }
};

}  // namespace bonfire::testing
