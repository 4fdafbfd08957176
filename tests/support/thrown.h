#pragma once

#include <string>

namespace bonfire::testing {

// What an exception of this type says that `action` throws; empty where it throws none. Others pass.
template <class Exception, class Action>
std::string thrown(const Action& action) {
  try {
    action();
  } catch (const Exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace bonfire::testing
