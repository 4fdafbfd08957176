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

#include <torch/detail/static.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"

// The seam around a Unit's forward. C++ modules have no forward hooks, so a Unit's type is marked where it is declared:
// BONFIRE_UNIT(Block) in place of TORCH_MODULE(Block). Whoever gathers, recomputes or profiles Units then installs hooks on
// the seam, which every way to call forward passes: block->forward(x), block(x), and as a child of a Sequential.
namespace bonfire {

class UnitSeam;

class UnitCall;

// What is done around a Unit's forward: one of a chain of hooks, each inside of the one before it. `inputs` and `outputs`
// are the tensors among the arguments and in the result (tensors, and optionals, tuples, pairs, arrays and vectors of them,
// nested), in order; undefined ones are left out, and those inside other types are not seen. A hook may put another tensor
// in the place of one, never add or remove any: what is inside of it then takes that, or what is outside gets it. The
// caller's own variables stay as they are.
class BONFIRE_API UnitHook {
 public:
  virtual ~UnitHook() = default;
  virtual void before_forward(UnitSeam& /*unit*/, std::vector<at::Tensor>& /*inputs*/) {}
  virtual void after_forward(UnitSeam& /*unit*/, std::vector<at::Tensor>& /*outputs*/) {}
  // Instead of after_forward, where forward threw; std::current_exception() is what it threw, and goes on to the caller.
  virtual void forward_failed(UnitSeam& /*unit*/) {}
  // All of it, for a hook that goes around forward: it runs the call, and may run it again (UnitCall::repeatable). This one
  // calls the three above.
  virtual std::vector<at::Tensor> around(UnitCall& call, std::vector<at::Tensor> inputs);
  // Stays inside of all that are not, also of those that are added later.
  virtual bool innermost() const { return false; }
};

// The hooks of a Unit, the outermost first. Lives as long as anybody holds it: whoever has put a hook there can take it off
// when the module is gone.
class BONFIRE_API UnitHooks {
 public:
  using List = std::shared_ptr<const std::vector<UnitHook*>>;  // null: empty

  bool empty() const { return !hooks_; }
  const List& list() const { return hooks_; }
  // Inside of those that are there. The hook must outlive the module, or be taken off. Calls that run already do not notice.
  void add(UnitHook& hook);
  void remove(const UnitHook& hook);

 private:
  List hooks_;
};

// A call of a Unit's forward that has arguments of its own. REQUIRES: the module and the hooks live.
class BONFIRE_API RepeatableCall {
 public:
  virtual ~RepeatableCall() = default;
  virtual std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) = 0;
};

// One call of a Unit's forward, as a hook sees it: what is inside of the hook.
class BONFIRE_API UnitCall {
 public:
  UnitCall(UnitSeam& unit, UnitHooks::List hooks, std::size_t next) : unit_(unit), hooks_(std::move(hooks)), next_(next) {}
  virtual ~UnitCall() = default;
  UnitCall(const UnitCall&) = delete;
  UnitCall& operator=(const UnitCall&) = delete;

  UnitSeam& unit() const { return unit_; }
  // Runs the hooks inside of this one, and forward. Once: the caller's arguments are handed over. The result has the form of
  // the one that this run returned.
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs);
  // The same over copies of the arguments: it can be run any number of times, also after this call has returned. Before
  // run(). Throws where forward takes something that holds neither tensors nor plain values.
  virtual std::unique_ptr<RepeatableCall> repeatable() const = 0;

 protected:
  const UnitHooks::List& hooks() const { return hooks_; }
  std::size_t next() const { return next_; }

 private:
  virtual std::vector<at::Tensor> forward(std::vector<at::Tensor> inputs) = 0;

  UnitSeam& unit_;
  UnitHooks::List hooks_;
  std::size_t next_;  // of the hooks, the first that was not entered
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

  UnitHooks& hooks() const { return *hooks_; }
  const std::shared_ptr<UnitHooks>& shared_hooks() const { return hooks_; }

  // What a build scope has made of this Unit, for whoever adopts it.
  const std::shared_ptr<void>& prepared() const { return prepared_; }
  void set_prepared(std::shared_ptr<void> prepared) { prepared_ = std::move(prepared); }

 private:
  std::shared_ptr<UnitHooks> hooks_ = std::make_shared<UnitHooks>();
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

// The types of arguments that are copied where forward may be run again. Others need neither be complete nor compile when
// they are copied.
template <class T>
struct Plain : std::is_trivially_copyable<T> {};
template <class T>
requires(!requires { sizeof(T); }) struct Plain<T> : std::false_type {
};
template <class T>
struct Keepable : std::disjunction<std::is_same<T, at::Tensor>, std::is_same<T, std::string>, Plain<T>> {};
template <class T>
struct Keepable<std::shared_ptr<T>> : std::true_type {};
template <class T>
struct Keepable<std::optional<T>> : Keepable<T> {};
template <class T, class Allocator>
struct Keepable<std::vector<T, Allocator>> : Keepable<T> {};
template <class T, std::size_t n>
struct Keepable<std::array<T, n>> : Keepable<T> {};
template <class A, class B>
struct Keepable<std::pair<A, B>> : std::conjunction<Keepable<A>, Keepable<B>> {};
template <class... T>
struct Keepable<std::tuple<T...>> : std::conjunction<Keepable<T>...> {};

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
  const std::remove_reference_t<A>& value() const { return argument_; }

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
  const std::remove_cvref_t<A>& value() const { return value_; }

 private:
  static constexpr bool gives_back = std::is_reference_v<A> && !std::is_const_v<std::remove_reference_t<A>>;
  std::remove_reference_t<A>& source_;
  std::remove_cvref_t<A> value_;
  std::vector<std::pair<at::Tensor, at::Tensor>> replaced_;
};

BONFIRE_API void require_same_count(const UnitSeam& unit, std::size_t seen, std::size_t given_back);

[[noreturn]] BONFIRE_API void fail_to_keep(const UnitSeam& unit, const std::type_info& pointer);
// Stands in the place of a tensor that is to come.
BONFIRE_API at::Tensor placeholder();

template <class R, class Forward, class... A>
class CopiedCall;

// A call whose arguments are somebody's.
template <class R, class Forward, class... A>
class Call final : public UnitCall {
 public:
  Call(UnitSeam& unit, UnitHooks::List hooks, std::size_t next, const Forward& forward, Argument<A>&... arguments)
      : UnitCall(unit, std::move(hooks), next), forward_(forward), arguments_(arguments...) {
    for_each_argument([this](auto& argument) { argument.visit([this](at::Tensor&) { ++seen_; }); });
  }

  std::vector<at::Tensor> inputs() {
    std::vector<at::Tensor> tensors;
    for_each_argument([&](auto& argument) { argument.visit([&](at::Tensor& tensor) { tensors.push_back(tensor); }); });
    return tensors;
  }
  // What forward returned, with these tensors in it.
  R result(std::vector<at::Tensor> outputs) {
    require(result_.has_value(), "a hook of Unit {} returned without running it", unit().type_name());
    require_same_count(unit(), returned_, outputs.size());
    std::size_t next = 0;
    for_each_tensor(*result_, [&](at::Tensor& tensor) { tensor = std::move(outputs[next++]); });
    return std::move(*result_);
  }

  std::unique_ptr<RepeatableCall> repeatable() const override {
    require(!result_, "UnitCall::repeatable of Unit {} after its run: the arguments are gone", unit().type_name());
    if constexpr ((Keepable<std::remove_cvref_t<A>>::value && ...)) {
      return std::apply(
          [this](const auto&... argument) {
            return std::make_unique<CopiedCall<R, Forward, A...>>(unit(), hooks(), next(), forward_, argument.value()...);
          },
          arguments_);
    } else {
      const std::type_info* pointer = nullptr;
      ((pointer = Keepable<std::remove_cvref_t<A>>::value ? pointer : &typeid(std::remove_reference_t<A>*)), ...);
      fail_to_keep(unit(), *pointer);
    }
  }

 private:
  template <class Visit>
  void for_each_argument(const Visit& visit) {
    std::apply([&](auto&... argument) { (visit(argument), ...); }, arguments_);
  }

  std::vector<at::Tensor> forward(std::vector<at::Tensor> inputs) override {
    require_same_count(unit(), seen_, inputs.size());
    std::size_t next = 0;
    for_each_argument([&](auto& argument) { argument.replace(inputs, next); });
    inputs.clear();  // or they would live as long as forward runs
    result_.emplace(std::apply([&](auto&... argument) -> R { return forward_(argument.pass()...); }, arguments_));
    for_each_tensor(*result_, [&](at::Tensor& tensor) { inputs.push_back(tensor); });
    returned_ = inputs.size();
    return inputs;
  }

  const Forward& forward_;
  std::tuple<Argument<A>&...> arguments_;
  std::size_t seen_ = 0, returned_ = 0;
  std::optional<R> result_;
};

// Lends copies of its copies to one run after the other.
template <class R, class Forward, class... A>
class CopiedCall final : public RepeatableCall {
 public:
  CopiedCall(UnitSeam& unit, UnitHooks::List hooks, std::size_t next, const Forward& forward,
             const std::remove_cvref_t<A>&... arguments)
      : unit_(unit), hooks_(std::move(hooks)), next_(next), forward_(forward), arguments_(arguments...) {
    // Every run brings its own.
    std::apply([](auto&... kept) { (for_each_tensor(kept, [](at::Tensor& tensor) { tensor = placeholder(); }), ...); },
               arguments_);
  }

  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) override {
    auto copies = arguments_;
    return std::apply([&](auto&... copy) { return run_with(std::move(inputs), Argument<A>(static_cast<A&&>(copy))...); },
                      copies);
  }

 private:
  std::vector<at::Tensor> run_with(std::vector<at::Tensor> inputs, Argument<A>... arguments) {
    return Call<R, Forward, A...>(unit_, hooks_, next_, forward_, arguments...).run(std::move(inputs));
  }

  UnitSeam& unit_;
  UnitHooks::List hooks_;
  std::size_t next_;
  Forward forward_;
  std::tuple<std::remove_cvref_t<A>...> arguments_;
};

template <class R, class Forward, class... A>
R pass_seam(UnitSeam& unit, const Forward& forward, Argument<A>... arguments) {
  static_assert(HoldsTensors<R>::value,
                "a Unit's forward returns a tensor, or an optional, tuple, pair, array or vector of tensors, by value");
  Call<R, Forward, A...> call(unit, unit.hooks().list(), 0, forward, arguments...);
  return call.result(call.run(call.inputs()));
}

// forward may have default arguments. Their values are known only where T::forward itself is called, so the seam is passed
// with as many arguments as the caller gives: by an overload for every number of them.
template <class T, class... A>
concept ForwardTakes = requires(T& module, A&&... arguments) {
  module.forward(std::forward<A>(arguments)...);
};

template <class List, class Places>
struct Leading;
template <class List, std::size_t... at>
struct Leading<List, std::index_sequence<at...>> {
  using Type = std::tuple<std::tuple_element_t<at, List>...>;
};
template <class... A>
requires(sizeof...(A) >
         0) using AllButLast = typename Leading<std::tuple<A...>, std::make_index_sequence<sizeof...(A) - 1>>::Type;

// Those with the arguments of a list, and with fewer. They have a ref-qualifier, so that torch, which asks for
// &Unit::forward, finds the one alone that takes all.
template <class Self, class T, class R, class List>
class Forwards;

struct NoForwards {
  struct Nothing {};
  void forward(Nothing) & = delete;
};

template <class Self, class T, class R, class... A>
struct ShorterForwards {
  using Type = Forwards<Self, T, R, AllButLast<A...>>;
};
template <class Self, class T, class R>
struct ShorterForwards<Self, T, R> {
  using Type = NoForwards;
};

template <class Self, class T, class R, class... A>
class Forwards<Self, T, R, std::tuple<A...>> : public ShorterForwards<Self, T, R, A...>::Type {
 public:
  using ShorterForwards<Self, T, R, A...>::Type::forward;
  R forward(A... arguments) & requires ForwardTakes<T, A...> {
    return static_cast<Self&>(*this).template through_seam<A...>(std::forward<A>(arguments)...);
  }
  // Holders ask for the type of this one.
  R forward(A... arguments) && requires ForwardTakes<T, A...> { return forward(std::forward<A>(arguments)...); }
  R forward(A... arguments) const& requires ForwardTakes<const T, A...> {
    return static_cast<const Self&>(*this).template through_seam<A...>(std::forward<A>(arguments)...);
  }
};

}  // namespace detail

// T with a seam around its forward. T's `forward` must not be overloaded or a template; it takes anything, may have default
// arguments, and returns a tensor, or an optional, tuple, pair, array or vector of them.
template <class T, class Signature = decltype(&T::forward)>
class Unit;

#define BONFIRE_UNIT_BODY(QUALIFIERS)                                                                   \
 public:                                                                                                \
  using T::T;                                                                                           \
  torch::nn::Module& module() override { return *this; }                                                \
  const std::type_info& marked_type() const override { return typeid(T); }                              \
  using detail::ShorterForwards<Unit, T, R, A...>::Type::forward;                                       \
  R forward(A... arguments) QUALIFIERS { return through_seam<A...>(std::forward<A>(arguments)...); }    \
  /* B: the types of as many of forward's arguments as are given. */                                    \
  template <class... B>                                                                                 \
  R through_seam(B&&... given) QUALIFIERS {                                                             \
    if (UnitSeam::hooks().empty()) [[likely]]                                                           \
      return T::forward(std::forward<B>(given)...);                                                     \
    const auto inner = [this](B&&... passed) -> R { return T::forward(std::forward<B>(passed)...); };   \
    return detail::pass_seam<R, decltype(inner), B...>(const_cast<Unit&>(*this), inner,                 \
                                                       detail::Argument<B>(std::forward<B>(given))...); \
  }                                                                                                     \
  /* T's own clone would be a T without the seam. */                                                    \
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>&) const override {        \
    fail("a Unit ({}) cannot be cloned; build it a second time", UnitSeam::type_name());                \
  }                                                                                                     \
                                                                                                        \
 private:                                                                                               \
  [[no_unique_address]] detail::Announcement announcement_{*this};

template <class T, class C, class R, class... A>
class Unit<T, R (C::*)(A...)>
    : public T, public UnitSeam, public detail::ShorterForwards<Unit<T, R (C::*)(A...)>, T, R, A...>::Type {
  BONFIRE_UNIT_BODY()
};

template <class T, class C, class R, class... A>
class Unit<T, R (C::*)(A...) const>
    : public T, public UnitSeam, public detail::ShorterForwards<Unit<T, R (C::*)(A...) const>, T, R, A...>::Type {
  BONFIRE_UNIT_BODY(const)
};

}  // namespace bonfire

// Torch asks whether &Unit::forward is one function.
template <class T, class Signature>
struct torch::detail::has_forward<bonfire::Unit<T, Signature>> : std::true_type {};

// Declares the module holder `Name` for the class `NameImpl`, as TORCH_MODULE does, and marks it as a Unit.
#define BONFIRE_UNIT(Name)                                                    \
  class Name : public torch::nn::ModuleHolder<::bonfire::Unit<Name##Impl>> {  \
   public:                                                                    \
    using torch::nn::ModuleHolder<::bonfire::Unit<Name##Impl>>::ModuleHolder; \
    using Impl = ::bonfire::Unit<Name##Impl>;                                 \
  }
