#pragma once

#include <string_view>

namespace bonfire::cli {

// Writes to stderr what a command says last. Where nobody reads it for some seconds (a pager that is not scrolled, a halted
// terminal), it is left out: a command that has ended waits for nobody.
void say_last(std::string_view words);

}  // namespace bonfire::cli
