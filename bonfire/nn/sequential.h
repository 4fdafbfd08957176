#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include <torch/nn/modules/container/sequential.h>

#include "bonfire/base/api.h"
#include "bonfire/nn/unit.h"

// Units without a type of one's own: the plain children of a Sequential, and a Sequential as a whole.
namespace bonfire {

// Gives children of `sequence` a seam each, as if their types had been marked: those that hold parameters, are no Units yet
// and, where there is a predicate, satisfy it; returns how many. Names and parameters stay, and train(), to() and the like
// reach the children as before, but sequence->at<T>(i) and sequence[i] then see the seam: take what you need from them
// first. Throws ConfigError for a child whose forward does not take one tensor; one that returns something else throws when
// it runs.
BONFIRE_API int wrap_children(torch::nn::SequentialImpl& sequence,
                              const std::function<bool(const std::string& name, torch::nn::Module& child)>& predicate = {});

inline int wrap_children(torch::nn::Sequential& sequence,
                         const std::function<bool(const std::string& name, torch::nn::Module& child)>& predicate = {}) {
  return wrap_children(*sequence, predicate);
}

// The Unit that `child` is where `parent` calls it: by its type, or by wrap_children. Or nullptr.
BONFIRE_API UnitSeam* unit_of(torch::nn::Module& child, torch::nn::Module& parent);

// torch's Sequential for children that take and return a tensor. Its one forward makes it a Unit: a root to shard, or a
// part of another.
class BONFIRE_API UnitSequentialImpl : public torch::nn::SequentialImpl {
 public:
  using torch::nn::SequentialImpl::SequentialImpl;
  at::Tensor forward(at::Tensor x) { return torch::nn::SequentialImpl::forward(std::move(x)); }
};

class UnitSequential : public torch::nn::ModuleHolder<Unit<UnitSequentialImpl>> {
 public:
  using torch::nn::ModuleHolder<Unit<UnitSequentialImpl>>::ModuleHolder;
  using Impl = Unit<UnitSequentialImpl>;
  UnitSequential() = default;
  UnitSequential(std::initializer_list<torch::nn::NamedAnyModule> children)
      : ModuleHolder(std::make_shared<Impl>(children)) {}
};

}  // namespace bonfire
