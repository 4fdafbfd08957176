#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
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

// What is done around a Unit's forward. `inputs` and `outputs` are the tensors among the arguments and in the result
// (tensors, and optionals, tuples, pairs, arrays and vectors of them, nested), in order; undefined ones are left out, and
// those inside other types are not seen. A hook may put another tensor in the place of one, never add or remove any: forward
// then takes it, or the caller gets it. The caller's own variables stay as they are.
class BONFIRE_API UnitHooks {
 public:
  virtual ~UnitHooks() = default;
  virtual void before_forward(UnitSeam& unit, std::vector<at::Tensor>& inputs) = 0;
  virtual void after_forward(UnitSeam& unit, std::vector<at::Tensor>& outputs) = 0;
  // Instead of after_forward, where forward threw; std::current_exception() is what it threw, and goes on to the caller.
  virtual void forward_failed(UnitSeam& /*unit*/) {}
};

// What every Unit has beside its module.
class BONFIRE_API UnitSeam {
 public:
  UnitSeam() = default;
  // A copy would share the parameters and be another Unit.
  UnitSeam(const UnitSeam&) = delete;
  UnitSeam& operator=(const UnitSeam&) = delete;
  virtual ~UnitSeam();

  virtual torch::nn::Module& module() = 0;
  // The type that was marked, without its seam.
  virtual const std::type_info& marked_type() const = 0;
  std::string type_name() const;  // its short name

  UnitHooks* hooks() const { return *hooks_; }
  // The hooks must outlive the module, or be taken off with nullptr.
  void set_hooks(UnitHooks* hooks) { *hooks_ = hooks; }
  // Where they are noted: whoever installs them can take them off there, also when the module is gone.
  const std::shared_ptr<UnitHooks*>& place_of_hooks() const { return hooks_; }

  // What a build scope has made of this Unit, for whoever adopts it.
  const std::shared_ptr<void>& prepared() const { return prepared_; }
  void set_prepared(std::shared_ptr<void> prepared) { prepared_ = std::move(prepared); }

 private:
  std::shared_ptr<UnitHooks*> hooks_ = std::make_shared<UnitHooks*>(nullptr);
  std::shared_ptr<void> prepared_;
};

// A module's type as users write it, without namespace and Impl: "Block".
BONFIRE_API std::string short_type_name(const std::type_info& type);

// The Unit that `module` is, or nullptr.
BONFIRE_API UnitSeam* unit_of(torch::nn::Module& module);

// Hears of every Unit when its constructor is done, the inner ones before the one around them.
class BONFIRE_API UnitObserver {
 public:
  virtual ~UnitObserver() = default;
  // The module is complete, but no shared_ptr holds it yet. What this throws, the Unit's constructor throws.
  virtual void constructed(UnitSeam& unit) = 0;
};

// For its lifetime, `observer` hears of the Units that the calling thread constructs; one inside another hides the outer.
// A thread-local list holds the scopes, the one such thing here: constructors of users' modules take no context that it
// could come in.
class BONFIRE_API ObserveUnits {
 public:
  explicit ObserveUnits(UnitObserver& observer);
  ~ObserveUnits();
  ObserveUnits(const ObserveUnits&) = delete;
  ObserveUnits& operator=(const ObserveUnits&) = delete;

 private:
  friend BONFIRE_API void announce(UnitSeam& unit);
  UnitObserver& observer_;
  ObserveUnits* outer_;
};

// Tells the calling thread's innermost observer, if there is one, that `unit` is complete.
BONFIRE_API void announce(UnitSeam& unit);

namespace detail {

// As a Unit's last member it announces the Unit when everything before it has been constructed.
struct Announcement {
  explicit Announcement(UnitSeam& unit) { announce(unit); }
};

// The types in which hooks see tensors.
template <class T>
struct HoldsTensors : std::is_same<T, at::Tensor> {};
template <class T>
struct HoldsTensors<std::optional<T>> : HoldsTensors<T> {};
template <class T, class Allocator>
struct HoldsTensors<std::vector<T, Allocator>> : HoldsTensors<T> {};
template <class T, std::size_t n>
struct HoldsTensors<std::array<T, n>> : HoldsTensors<T> {};
template <class A, class B>
struct HoldsTensors<std::pair<A, B>> : std::disjunction<HoldsTensors<A>, HoldsTensors<B>> {};
template <class... T>
struct HoldsTensors<std::tuple<T...>> : std::disjunction<HoldsTensors<T>...> {};

template <class T>
inline constexpr bool copyable = std::is_copy_constructible_v<T>;
template <class T, class Allocator>
inline constexpr bool copyable<std::vector<T, Allocator>> = copyable<T>;

// Calls visit(at::Tensor&) for every defined tensor that `value` holds, in order.
template <class T, class Visit>
void for_each_tensor(T& value, const Visit& visit) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (value.defined()) visit(value);
  } else if constexpr (HoldsTensors<T>::value) {
    if constexpr (requires { value.has_value(); }) {
      if (value) for_each_tensor(*value, visit);
    } else if constexpr (requires { value.push_back({}); }) {
      for (auto& element : value) for_each_tensor(element, visit);
    } else {
      std::apply([&](auto&... element) { (for_each_tensor(element, visit), ...); }, value);
    }
  }
}

// An argument of type A on its way through a seam. One that holds no tensors goes on as it is.
template <class A>
class Argument {
 public:
  explicit Argument(A&& argument) : argument_(static_cast<A&&>(argument)) {}
  template <class Visit>
  void visit(const Visit&) {}
  void replace(std::vector<at::Tensor>&, std::size_t&) {}
  A&& pass() { return static_cast<A&&>(argument_); }

 private:
  A&& argument_;
};

// One that holds tensors is held by value, so that replacing some of them is forward's affair alone.
template <class A>
requires(HoldsTensors<std::remove_cvref_t<A>>::value &&
         (!std::is_lvalue_reference_v<A> || copyable<std::remove_cvref_t<A>>)) class Argument<A> {
 public:
  explicit Argument(A&& argument) : source_(argument), value_(static_cast<A&&>(argument)) {}
  Argument(const Argument&) = delete;
  // What forward did to a variable that it took by reference reaches the caller; what a hook replaced does not.
  ~Argument() {
    if constexpr (gives_back) {
      visit([this](at::Tensor& tensor) {
        for (auto& [before, now] : replaced_)
          if (tensor.is_same(now)) {
            tensor = before;
            break;
          }
      });
      source_ = std::move(value_);
    }
  }

  template <class Visit>
  void visit(const Visit& visit) {
    for_each_tensor(value_, visit);
  }
  void replace(std::vector<at::Tensor>& tensors, std::size_t& next) {
    visit([&](at::Tensor& tensor) {
      auto& now = tensors[next++];
      if constexpr (gives_back)
        if (!tensor.is_same(now)) replaced_.emplace_back(tensor, now);
      tensor = std::move(now);
    });
  }
  A&& pass() { return static_cast<A&&>(value_); }

 private:
  static constexpr bool gives_back = std::is_reference_v<A> && !std::is_const_v<std::remove_reference_t<A>>;
  std::remove_reference_t<A>& source_;
  std::remove_cvref_t<A> value_;
  std::vector<std::pair<at::Tensor, at::Tensor>> replaced_;
};

BONFIRE_API void require_same_count(const UnitSeam& unit, std::size_t seen, std::size_t given_back);

template <class R, class Forward, class... A>
R pass_seam(UnitSeam& unit, UnitHooks& hooks, const Forward& forward, Argument<A>... arguments) {
  static_assert(HoldsTensors<R>::value,
                "a Unit's forward returns a tensor, or an optional, tuple, pair, array or vector of tensors, by value");
  std::vector<at::Tensor> tensors;
  const auto collect = [&](at::Tensor& tensor) { tensors.push_back(tensor); };
  (arguments.visit(collect), ...);
  std::size_t seen = tensors.size(), next = 0;
  hooks.before_forward(unit, tensors);
  require_same_count(unit, seen, tensors.size());
  (arguments.replace(tensors, next), ...);
  tensors.clear();  // or inputs would live as long as forward runs

  const auto run = [&]() -> R {
    try {
      return forward(arguments.pass()...);
    } catch (...) {
      hooks.forward_failed(unit);
      throw;
    }
  };
  R result = run();

  for_each_tensor(result, collect);
  seen = tensors.size(), next = 0;
  hooks.after_forward(unit, tensors);
  require_same_count(unit, seen, tensors.size());
  for_each_tensor(result, [&](at::Tensor& tensor) { tensor = std::move(tensors[next++]); });
  return result;
}

}  // namespace detail

// T with a seam around its forward. T's `forward` must not be overloaded or a template; it takes anything and returns a
// tensor, or an optional, tuple, pair, array or vector of them.
template <class T, class Signature = decltype(&T::forward)>
class Unit;

#define BONFIRE_UNIT_BODY(QUALIFIERS)                                                                       \
 public:                                                                                                    \
  using T::T;                                                                                               \
  torch::nn::Module& module() override { return *this; }                                                    \
  const std::type_info& marked_type() const override { return typeid(T); }                                  \
  R forward(A... arguments) QUALIFIERS {                                                                    \
    UnitHooks* const hooks = UnitSeam::hooks();                                                             \
    if (!hooks) [[likely]]                                                                                  \
      return T::forward(std::forward<A>(arguments)...);                                                     \
    const auto inner = [this](A&&... passed) -> R { return T::forward(std::forward<A>(passed)...); };       \
    return detail::pass_seam<R, decltype(inner), A...>(const_cast<Unit&>(*this), *hooks, inner,             \
                                                       detail::Argument<A>(std::forward<A>(arguments))...); \
  }                                                                                                         \
  /* T's own clone would be a T without the seam. */                                                        \
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>&) const override {            \
    fail("a Unit ({}) cannot be cloned; build it a second time", UnitSeam::type_name());                    \
  }                                                                                                         \
                                                                                                            \
 private:                                                                                                   \
  [[no_unique_address]] detail::Announcement announcement_{*this};

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
