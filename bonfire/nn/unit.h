#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"

// The seam around a Unit's forward. C++ modules have no forward hooks, so a Unit's type is marked where it is declared:
// BONFIRE_UNIT(Block) in place of TORCH_MODULE(Block). Whoever gathers, recomputes or profiles Units then installs hooks on
// the seam, which every way to call forward passes: block->forward(x), block(x), and as a child of a Sequential.
namespace bonfire {

class UnitSeam;

class BONFIRE_API UnitHooks {
 public:
  virtual ~UnitHooks() = default;
  // `inputs` and `outputs` are the tensors among the arguments and in the result, in order; undefined ones are left out.
  virtual void before_forward(UnitSeam& unit, const std::vector<at::Tensor>& inputs) = 0;
  virtual void after_forward(UnitSeam& unit, const std::vector<at::Tensor>& outputs) = 0;
};

// What every Unit has beside its module: found with dynamic_cast from a torch::nn::Module*.
class BONFIRE_API UnitSeam {
 public:
  virtual ~UnitSeam();
  virtual torch::nn::Module& module() = 0;

  UnitHooks* hooks() const { return hooks_; }
  // The hooks must outlive the module, or be taken off with nullptr.
  void set_hooks(UnitHooks* hooks) { hooks_ = hooks; }

 private:
  UnitHooks* hooks_ = nullptr;
};

// The Unit that `module` is, or nullptr.
BONFIRE_API UnitSeam* unit_of(torch::nn::Module& module);

namespace detail {

inline void collect(const at::Tensor& tensor, std::vector<at::Tensor>& into) {
  if (tensor.defined()) into.push_back(tensor);
}
template <class T>
void collect(const std::optional<T>& value, std::vector<at::Tensor>& into);
template <class T>
void collect(const std::vector<T>& values, std::vector<at::Tensor>& into);
template <class... T>
void collect(const std::tuple<T...>& values, std::vector<at::Tensor>& into);
template <class A, class B>
void collect(const std::pair<A, B>& values, std::vector<at::Tensor>& into);
template <class T>
requires(!std::is_convertible_v<const T&, const at::Tensor&>) void collect(const T&, std::vector<at::Tensor>&) {}

template <class T>
void collect(const std::optional<T>& value, std::vector<at::Tensor>& into) {
  if (value) collect(*value, into);
}
template <class T>
void collect(const std::vector<T>& values, std::vector<at::Tensor>& into) {
  for (const auto& value : values) collect(value, into);
}
template <class... T>
void collect(const std::tuple<T...>& values, std::vector<at::Tensor>& into) {
  std::apply([&](const auto&... value) { (collect(value, into), ...); }, values);
}
template <class A, class B>
void collect(const std::pair<A, B>& values, std::vector<at::Tensor>& into) {
  collect(values.first, into);
  collect(values.second, into);
}

}  // namespace detail

// T with a seam around its forward. T's `forward` must not be overloaded or a template; it takes anything and returns a
// tensor, or a tuple, pair or vector of them.
template <class T, class Signature = decltype(&T::forward)>
class Unit;

#define BONFIRE_UNIT_BODY(QUALIFIERS)                                                            \
 public:                                                                                         \
  using T::T;                                                                                    \
  torch::nn::Module& module() override { return *this; }                                         \
  R forward(A... arguments) QUALIFIERS {                                                         \
    UnitHooks* const hooks = this->hooks();                                                      \
    if (!hooks) [[likely]]                                                                       \
      return T::forward(std::forward<A>(arguments)...);                                          \
    auto& seam = const_cast<Unit&>(*this);                                                       \
    std::vector<at::Tensor> tensors;                                                             \
    (detail::collect(arguments, tensors), ...);                                                  \
    hooks->before_forward(seam, tensors);                                                        \
    tensors.clear();                                                                             \
    R result = T::forward(std::forward<A>(arguments)...);                                        \
    detail::collect(result, tensors);                                                            \
    hooks->after_forward(seam, tensors);                                                         \
    return result;                                                                               \
  }                                                                                              \
  /* T's own clone would be a T without the seam. */                                             \
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>&) const override { \
    fail("a Unit ({}) cannot be cloned; build it a second time", this->name());                  \
  }

template <class T, class C, class R, class... A>
class Unit<T, R (C::*)(A...)> : public T, public UnitSeam {
  BONFIRE_UNIT_BODY()
};

template <class T, class C, class R, class... A>
class Unit<T, R (C::*)(A...) const> : public T, public UnitSeam {
  BONFIRE_UNIT_BODY(const)
};

}  // namespace bonfire

// Declares the module holder `Name` for the class `NameImpl`, as TORCH_MODULE does, and marks it as a Unit.
#define BONFIRE_UNIT(Name)                                                    \
  class Name : public torch::nn::ModuleHolder<::bonfire::Unit<Name##Impl>> {  \
   public:                                                                    \
    using torch::nn::ModuleHolder<::bonfire::Unit<Name##Impl>>::ModuleHolder; \
    using Impl = ::bonfire::Unit<Name##Impl>;                                 \
  }
