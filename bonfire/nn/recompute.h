#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"
#include "bonfire/nn/unit.h"

// Recomputation (activation checkpointing): forward keeps its inputs for backward and nothing else; when backward comes to
// the first operation that needs more, forward runs once more and makes it again. Autograd's graph is that of an ordinary
// forward, only what it has saved comes later: gradients, their order and their hooks, retained graphs and backwards in
// halves are those of the same module without it, to the last bit.
//
// What forward does must be the same both times. Random numbers are repeated (this library's dropout, and torch's
// generators), autocast is as it was, and the module's buffers are put back afterwards. A forward that saves other tensors
// the second time is an error that names it, as are inputs that were changed in place.
namespace bonfire {

class HostInputs;

struct RecomputeOptions {
  std::string name{};  // in messages
  // Whether torch's own generators may be used, so that they must be put back: the CPU's, and those of the inputs' devices.
  // It costs a copy of their states. This library's dropout is repeated in any case.
  bool torch_random = true;
  // Where inputs are kept, if not where they are. Those of a forward inside of another that is recomputed are not kept.
  std::shared_ptr<HostInputs> host{};
};

// Whether the calling thread runs a forward for the second time: its results are read by nobody but backward, and its graph
// by nobody.
BONFIRE_API bool running_again();

namespace detail {

struct Recomputation {
  std::vector<at::Tensor> inputs;
  // Forward with these inputs, for the first time and once more.
  std::function<void(std::vector<at::Tensor>)> run, again;
  torch::nn::Module* module = nullptr;  // whose buffers are put back; it is kept alive if a pointer holds it
  RecomputeOptions options{};
};
// Does the first run.
BONFIRE_API void run_recomputed(Recomputation what);

// The module that a holder, a pointer or a reference stands for; none of a function.
template <class F>
torch::nn::Module* module_of(F& forward) {
  if constexpr (std::is_base_of_v<torch::nn::Module, F>)
    return &forward;
  else if constexpr (requires { static_cast<torch::nn::Module&>(*forward); })
    return &static_cast<torch::nn::Module&>(*forward);
  else
    return nullptr;
}

template <class F, class... A>
decltype(auto) call_forward(F& forward, A&&... arguments) {
  if constexpr (requires { forward->forward(std::forward<A>(arguments)...); })
    return forward->forward(std::forward<A>(arguments)...);
  else if constexpr (requires { forward.forward(std::forward<A>(arguments)...); })
    return forward.forward(std::forward<A>(arguments)...);
  else
    return forward(std::forward<A>(arguments)...);
}

// A second run needs a function or a pointer of its own; a module that is no pointer's has to live.
template <class F>
auto kept_callable(F& forward) {
  if constexpr (std::is_base_of_v<torch::nn::Module, F>)
    return &forward;
  else
    return forward;
}

}  // namespace detail

// Runs `forward`, a module (as itself, a holder or a pointer) or a function, which returns a tensor, or an optional, tuple,
// pair, array or vector of them. Without gradients it simply runs. Inputs are copied: tensors, numbers, strings, and
// containers of them. A function may read other tensors than its inputs, such as parameters; it is copied.
template <class F, class... A>
auto recompute(const RecomputeOptions& options, F&& forward, A&&... inputs) {
  using R = std::remove_cvref_t<decltype(detail::call_forward(forward, inputs...))>;
  static_assert(detail::HoldsTensors<R>::value,
                "what is recomputed returns a tensor, or an optional, tuple, pair, array or vector of tensors");
  static_assert((detail::Keepable<std::remove_cvref_t<A>>::value && ...),
                "inputs of recompute() are tensors, numbers, strings, and containers of them");
  using Arguments = std::tuple<std::remove_cvref_t<A>...>;
  // Runs `callable` over `arguments`, with these tensors in them.
  const auto run = [](auto& callable, Arguments arguments, std::vector<at::Tensor> tensors) -> R {
    std::size_t next = 0;
    std::apply(
        [&](auto&... argument) {
          (detail::for_each_tensor(argument, [&](at::Tensor& tensor) { tensor = std::move(tensors[next++]); }), ...);
        },
        arguments);
    return std::apply([&](auto&... argument) -> R { return detail::call_forward(callable, argument...); }, arguments);
  };
  Arguments arguments(inputs...);
  detail::Recomputation what{.module = detail::module_of(forward), .options = options};
  std::apply(
      [&](auto&... argument) {
        (detail::for_each_tensor(argument,
                                 [&](at::Tensor& tensor) {
                                   what.inputs.push_back(tensor);
                                   tensor = detail::placeholder();
                                 }),
         ...);
      },
      arguments);
  std::optional<R> result;
  what.run = [&](std::vector<at::Tensor> tensors) { result.emplace(run(forward, arguments, std::move(tensors))); };
  what.again = [run, arguments, callable = detail::kept_callable(forward)](std::vector<at::Tensor> tensors) mutable {
    run(callable, arguments, std::move(tensors));
  };
  detail::run_recomputed(std::move(what));
  return std::move(*result);
}

template <class F, class... A>
requires(!std::is_same_v<std::remove_cvref_t<F>, RecomputeOptions>) auto recompute(F&& forward, A&&... inputs) {
  return recompute(RecomputeOptions{}, std::forward<F>(forward), std::forward<A>(inputs)...);
}

// The Units of `module` for which `which` (asked with their path in it; empty for `module` itself) says so, each recomputed
// whenever it runs, for as long as this object lives. With or without an engine, before or after shard(): a sharded Unit is
// gathered once for its second run and its backward. Units inside of a recomputed Unit run again with it.
class BONFIRE_API RecomputedUnits {
 public:
  using Which = std::function<bool(const std::string& path, torch::nn::Module& unit)>;
  // No `which`: all of them but `module` itself.
  explicit RecomputedUnits(torch::nn::Module& module, const Which& which = {}, const RecomputeOptions& options = {});
  template <class Holder>
  requires requires(Holder& holder) { static_cast<torch::nn::Module&>(*holder); }
  explicit RecomputedUnits(Holder& holder, const Which& which = {}, const RecomputeOptions& options = {})
      : RecomputedUnits(static_cast<torch::nn::Module&>(*holder), which, options) {}
  RecomputedUnits() = default;  // none
  ~RecomputedUnits();
  RecomputedUnits(RecomputedUnits&&) noexcept = default;
  RecomputedUnits& operator=(RecomputedUnits&& other) noexcept;

  std::size_t count() const { return units_.size(); }

 private:
  void take_off();

  struct One {
    std::shared_ptr<UnitHooks> hooks;  // all that is left of the Unit when its module is gone
    std::unique_ptr<UnitHook> hook;
  };
  std::vector<One> units_;
};

}  // namespace bonfire
