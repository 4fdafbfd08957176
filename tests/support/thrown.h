#pragma once

#include <string>

#include <gtest/gtest.h>

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

inline void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

}  // namespace bonfire::testing
