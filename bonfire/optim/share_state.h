#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/shard/flat_parameter.h"
#include "bonfire/shard/share.h"

namespace bonfire {

class Shares;

// What an optimizer remembers of its parameters, on this rank: for each trained share some tensors as long as
// its master, beside it and of its type. They start at zero, are made when they are first needed, and follow their
// parameters when these are laid out anew.
class BONFIRE_API ShareState {
 public:
  struct OfShare {
    std::size_t region = 0;
    Share share{};
    std::vector<at::Tensor> tensors;
  };
  struct OfPart {
    FlatParameter* flat = nullptr;  // valid while the layout is
    int stage = 0;
    plan::FlatLayout layout;
    std::vector<OfShare> shares;  // as FlatParameter::trained()
  };

  explicit ShareState(std::size_t tensors) : tensors_(tensors) {}

  // Takes on the layout that the shares have now; `steps` have been taken with the old one. Parameters that are no longer
  // trained are forgotten. False where nothing has changed. Collective, where a share has changed its parameters.
  bool follow(const Shares& shares, std::int64_t steps);

  const std::vector<OfPart>& parts() const { return parts_; }  // as Shares::parts()
  // Steps that had been taken when this parameter began to be trained.
  std::int64_t began(int stage, const std::string& parameter) const { return began_.at({stage, parameter}); }
  void set_began(int stage, const std::string& parameter, std::int64_t steps) { began_.at({stage, parameter}) = steps; }
  // All began so many steps later.
  void delay(std::int64_t steps);
  std::int64_t bytes() const;

 private:
  using Key = std::pair<int, std::string>;  // stage and name
  struct Place {
    std::size_t part = 0, share = 0, segment = 0;
  };
  using Places = std::map<Key, Place>;
  void take_layout(const Shares& shares, std::int64_t steps);
  Places trained_places() const;
  bool move(const OfPart& part, OfShare& old, const Places& places);
  void carry(const Shares& shares, const OfPart& part, OfShare& old, const Places& places);
  std::vector<at::Tensor>& made(std::size_t part, std::size_t share);

  std::size_t tensors_;
  std::int64_t version_ = -1;
  std::vector<OfPart> parts_;
  std::map<Key, std::int64_t> began_;
};

}  // namespace bonfire
