#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>

#include "bonfire/base/error.h"

namespace bonfire {

using StateValue = std::variant<std::int64_t, double, std::string>;
using State = std::map<std::string, StateValue>;

// What a checkpoint keeps besides tensors: a few named values. load(save()) changes nothing.
class BONFIRE_API Stateful {
 public:
  virtual ~Stateful() = default;
  virtual State save() const = 0;
  virtual void load(const State& state) = 0;
};

template <class T>
T state_value(const State& state, const std::string& name) {
  const auto at = state.find(name);
  require(at != state.end(), "saved state has no value '{}'", name);
  const T* value = std::get_if<T>(&at->second);
  require(value != nullptr, "saved value '{}' is of the wrong type", name);
  return *value;
}

}  // namespace bonfire
