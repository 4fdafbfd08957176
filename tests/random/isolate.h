#pragma once

#include <functional>
#include <string>
#include <vector>

// A case that crashes or never ends is a failure like any other, with its seed: each runs in a process of its own.
namespace bonfire::cases {

// What `body(at)` returned for each of `count` numbers, at most `at_once` of them at a time; or how its process ended.
// `body` must start its threads itself: a forked process has none.
std::vector<std::string> run_isolated(int count, int at_once, const std::function<std::string(int)>& body);

}  // namespace bonfire::cases
