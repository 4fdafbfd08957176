#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/share.h"

namespace bonfire {

class Engine;

// What an optimizer remembers of its parameters, on this rank: for each trained share of an engine some tensors as long as
// its master, beside it and of its type. They start at zero, are made when they are first needed, and follow their
// parameters when the engine lays these out anew.
class BONFIRE_API ShareState {
 public:
  struct OfShare {
    std::size_t region = 0;
    Share share{};
    std::vector<at::Tensor> tensors;
  };
  struct OfFlat {
    plan::FlatLayout layout;
    std::vector<OfShare> shares;  // as FlatParameter::trained()
  };

  explicit ShareState(std::size_t tensors) : tensors_(tensors) {}

  // Takes on the engine's layout; `steps` have been taken with the old one. Parameters that are no longer trained are
  // forgotten. False where nothing has changed. Collective, where a share has changed its parameters.
  bool follow(const Engine& engine, std::int64_t steps);

  const std::vector<OfFlat>& flats() const { return flats_; }
  // Steps that had been taken when this parameter began to be trained.
  std::int64_t began(const std::string& parameter) const { return began_.at(parameter); }
  std::int64_t bytes() const;

 private:
  struct Place {
    std::size_t flat = 0, share = 0, segment = 0;
  };
  using Places = std::map<std::string, Place>;
  void take_layout(const Engine& engine, std::int64_t steps);
  Places trained_places() const;
  bool move(const OfFlat& flat, OfShare& old, const Places& places);
  void carry(const Engine& engine, const OfFlat& flat, OfShare& old, const Places& places);
  std::vector<at::Tensor>& made(const Engine& engine, std::size_t flat, std::size_t share);

  std::size_t tensors_;
  std::int64_t version_ = -1;
  std::vector<OfFlat> flats_;
  std::map<std::string, std::int64_t> began_;
};

}  // namespace bonfire
