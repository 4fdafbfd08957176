#pragma once

#include <string>

#include "bonfire/shard/wrap.h"
#include "tests/random/engine_case.h"

namespace bonfire::cases {

// `chosen`: the path of the parameter that is ignored.
inline Wrapping wrapping_of(Wrap wrap, const std::string& chosen) {
  switch (wrap) {
    case Wrap::every:
    case Wrap::tied: break;
    case Wrap::types: return {.types = {"Beta"}};
    case Wrap::unknown_type: return {.types = {"Gamma"}};
    case Wrap::two_at_once: return {.types = {"Beta"}, .all_in_one = true};
    case Wrap::min_parameters: return {.min_parameters = 40};
    case Wrap::predicate:
      return {.predicate = [](const std::string& path, torch::nn::Module&) { return path.size() % 2 == 0; }};
    case Wrap::all_in_one: return {.all_in_one = true};
    case Wrap::ignored: return {.ignored_parameters = {chosen}};
  }
  return {};
}

}  // namespace bonfire::cases
