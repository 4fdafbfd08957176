#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/shard/flat_group.h"
#include "bonfire/shard/shares.h"
#include "bonfire/shard/slices.h"

namespace bonfire {

// What an engine carries from step to step beside parameters, by the parameters' names: what a reduction still has to send,
// and the magnitudes by which products in fp8 are scaled. All of it is a hint. What is written goes to where it belongs when
// all is written, because the parameters may lie elsewhere then.
class CarriedState {
 public:
  void add_slices(std::vector<Slice>& slices, const FlatGroup& flats, const Shares::Division& division);
  // REQUIRES: the parameters lie where they will.
  void apply(FlatGroup& flats);

 private:
  struct Written {
    at::Tensor values;  // 1-D
    bool any = false;
  };
  using Key = std::pair<std::string, std::string>;  // name and kind
  Slice slice(Key key, const at::Tensor& values);

  std::shared_ptr<std::map<Key, Written>> written_ = std::make_shared<std::map<Key, Written>>();
};

}  // namespace bonfire
