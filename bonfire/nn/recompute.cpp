#include "bonfire/nn/recompute.h"

#include <algorithm>
#include <mutex>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "bonfire/kernels/repeated_scales.h"
#include "bonfire/nn/host_inputs.h"
#include "bonfire/nn/repeated_state.h"
#include "bonfire/nn/save_scope.h"
#include "bonfire/nn/sequential.h"

namespace bonfire {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

// What a forward saved: known by its place in order, and made again when it is asked for. The hooks of the forward's graph
// hold it.
class Frame : public std::enable_shared_from_this<Frame> {
 public:
  explicit Frame(detail::Recomputation& what)
      : name_(what.options.name.empty() ? "a recomputed forward" : what.options.name),
        autocast_(Autocast::now()),
        module_(what.module),
        again_(std::move(what.again)) {
    if (module_) {
      alive_ = module_->weak_from_this().lock();
      for (const auto& parameter : module_->parameters()) parameters_.push_back(parameter._version());
    }
    // Outside of this frame's own scope: a forward around this one that is recomputed as well makes them again.
    const bool alone = !SaveScope::innermost();
    for (const auto& input : what.inputs) {
      auto on_host = alone && what.options.host ? what.options.host->keep(input) : nullptr;
      inputs_.push_back({on_host ? SavedVariable() : SavedVariable(input, false), on_host, input.requires_grad()});
    }
  }

  void run(detail::Recomputation& what);

  void repeat_with(const std::shared_ptr<DropoutState>& state) {
    for (const auto& known : dropout_)
      if (known.state == state) return;
    dropout_.push_back({state, *state});
  }

  // --- The first run.
  std::size_t add() {
    saved_.emplace_back();
    return saved_.size() - 1;
  }
  void saved(std::size_t at, const Tensor& tensor) {
    saved_[at].sizes = tensor.sizes().vec();
    saved_[at].type = tensor.scalar_type();
    // Operations save their parameters, or views of them.
    const at::TensorBase& whole = tensor.is_view() ? tensor._base() : tensor;
    if (whole.is_leaf() && whole.requires_grad()) saved_[at].version = tensor._version();
  }
  // Nobody asks for it any more.
  void forget(std::size_t at) {
    const std::lock_guard lock(mutex_);
    saved_[at].wanted = false;
    saved_[at].made.reset();
  }
  Tensor made_again(std::size_t at) {
    require(recorded_, "{} runs a backward inside of its forward, and cannot be recomputed", name_);
    const std::lock_guard lock(mutex_);
    if (!saved_[at].made.defined()) run_again();
    return saved_[at].made;
  }

  // --- The second run.
  std::size_t next() { return next_++; }
  void made(std::size_t at, const Tensor& tensor) {
    require(at < saved_.size(), "{} saved {} tensors for backward, and more when it ran again: {}", name_, saved_.size(),
            must_repeat);
    auto& place = saved_[at];
    require(tensor.scalar_type() == place.type && tensor.sizes() == place.sizes,
            "{} saved a {} of [{}] as tensor {} for backward, and a {} of [{}] when it ran again: {}", name_,
            c10::toString(place.type), fmt::join(place.sizes, ", "), at, c10::toString(tensor.scalar_type()),
            fmt::join(tensor.sizes(), ", "), must_repeat);
    require(!place.version || tensor._version() == *place.version,
            "a parameter of {} was changed in place between its forward and the backward that runs it again", name_);
    if (place.wanted) place.made = tensor.detach();
  }

 private:
  static constexpr const char* must_repeat = "it must do the same both times";

  struct Saved {
    std::vector<std::int64_t> sizes{};
    at::ScalarType type = at::kFloat;
    std::optional<std::uint32_t> version{};  // of a parameter
    bool wanted = true;
    Tensor made{};
  };
  struct Input {
    SavedVariable tensor;  // unless it is kept
    std::shared_ptr<HostInputs::Kept> on_host;
    bool differentiable;
  };

  std::vector<Tensor> inputs_again() {
    std::vector<Tensor> inputs;
    const auto fail_changed = [&] {
      fail("input {} of {} was changed in place between its forward and the backward that runs it again", inputs.size(),
           name_);
    };
    for (auto& [kept, on_host, differentiable] : inputs_) {
      if (on_host && on_host->changed()) fail_changed();
      try {
        inputs.push_back((on_host ? on_host->take() : kept.unpack().detach()).set_requires_grad(differentiable));
      } catch (const c10::Error&) {
        if (on_host || kept.has_hooks()) throw;
        fail_changed();
      }
    }
    inputs_.clear();
    return inputs;
  }

  // Also those that autograd has no use for: they make what it saves.
  void require_same_parameters() const {
    if (!module_) return;
    std::size_t next = 0;
    for (const auto& item : module_->named_parameters())
      require(next == parameters_.size() || item.value()._version() == parameters_[next++],
              "parameter '{}' of {} was changed in place between its forward and the backward that runs it again",
              item.key(), name_);
  }

  void run_again();

  std::string name_;
  Autocast autocast_;
  std::vector<GeneratorState> generators_;  // that forward has used
  std::vector<DropoutThen> dropout_;
  RepeatedScales scales_;
  torch::nn::Module* module_;
  std::shared_ptr<torch::nn::Module> alive_;
  std::vector<std::uint32_t> parameters_;           // their versions
  std::function<void(std::vector<Tensor>)> again_;  // null: it has run again
  std::vector<Input> inputs_;
  std::vector<Saved> saved_;
  bool recorded_ = false;
  std::size_t next_ = 0;
  std::recursive_mutex mutex_;  // a graph on several devices runs backward in as many threads
};

// In the graph of the first run.
class ComesLater final : public SavedVariableHooks {
 public:
  explicit ComesLater(std::shared_ptr<Frame> frame) : frame_(std::move(frame)), at_(frame_->add()) {}
  ~ComesLater() override { frame_->forget(at_); }
  void call_pack_hook(const Tensor& tensor) override { frame_->saved(at_, tensor); }
  Tensor call_unpack_hook() override { return frame_->made_again(at_); }

 private:
  std::shared_ptr<Frame> frame_;
  std::size_t at_;
};

// In that of the second, which nobody goes through.
class IsThere final : public SavedVariableHooks {
 public:
  explicit IsThere(Frame& frame) : frame_(frame), at_(frame.next()) {}
  void call_pack_hook(const Tensor& tensor) override { frame_.made(at_, tensor); }
  Tensor call_unpack_hook() override { fail("a backward inside of a forward that runs again"); }

 private:
  Frame& frame_;
  std::size_t at_;
};

class FirstRun final : public SaveListener {
 public:
  explicit FirstRun(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<ComesLater>(frame_); }
  void repeat_with(const std::shared_ptr<DropoutState>& state) override { frame_->repeat_with(state); }

 private:
  std::shared_ptr<Frame> frame_;
};

class SecondRun final : public SaveListener {
 public:
  explicit SecondRun(Frame& frame) : frame_(frame) {}
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<IsThere>(frame_); }
  bool runs_again() const override { return true; }

 private:
  Frame& frame_;
};

void Frame::run(detail::Recomputation& what) {
  std::vector<std::uint32_t> versions;
  for (const auto& input : what.inputs) versions.push_back(input._version());
  const auto inputs = what.inputs;
  const auto generators = what.options.torch_random ? torch_generators(inputs) : std::vector<GeneratorState>();
  {
    FirstRun first(shared_from_this());
    const RepeatedScales::Scope scales(scales_, RepeatedScales::Run::first);
    const SaveScope scope(first);
    what.run(std::move(what.inputs));
  }
  recorded_ = true;
  for (std::size_t at = 0; at < inputs.size(); ++at)
    require(inputs[at]._version() == versions[at],
            "{} writes in place to its input {}, from which it is to be recomputed; allowed: a forward that leaves its "
            "inputs as they are (give it a clone)",
            name_, at);
  for (auto [generator, before] : generators) {
    const std::lock_guard lock(generator.mutex());
    if (!at::equal(generator.get_state(), before)) generators_.push_back({generator, before});
  }
}

void Frame::run_again() {
  require(again_ != nullptr, "{}: what it saved for backward is gone; keep the graph the first time (retain_graph)", name_);
  require_same_parameters();
  const at::AutoGradMode differentiate(true);
  auto inputs = inputs_again();
  const auto again = std::exchange(again_, nullptr);
  next_ = 0;
  {
    const BuffersAsNow buffers(module_);
    const AutocastAsThen autocast(autocast_);
    const GeneratorsAsThen generators(generators_);
    const DropoutAsThen dropout(dropout_);
    const RepeatedScales::Scope scales(scales_, RepeatedScales::Run::again);
    SecondRun second(*this);
    const SaveScope scope(second);
    again(std::move(inputs));
  }
  alive_.reset();
  require(next_ == saved_.size(), "{} saved {} tensors for backward, and {} when it ran again: {}", name_, saved_.size(),
          next_, must_repeat);
}

class RecomputeHook final : public UnitHook {
 public:
  explicit RecomputeHook(RecomputeOptions options) : options_(std::move(options)) {}

  bool innermost() const override { return true; }
  std::vector<Tensor> around(UnitCall& call, std::vector<Tensor> inputs) override {
    if (!at::GradMode::is_enabled()) return call.run(std::move(inputs));
    std::vector<Tensor> outputs;
    const std::shared_ptr<RepeatableCall> repeatable = call.repeatable();
    detail::run_recomputed({.inputs = std::move(inputs),
                            .run = [&](std::vector<Tensor> given) { outputs = call.run(std::move(given)); },
                            .again = [repeatable](std::vector<Tensor> given) { repeatable->run(std::move(given)); },
                            .module = &call.unit().module(),
                            .options = options_});
    return outputs;
  }

 private:
  RecomputeOptions options_;
};

}  // namespace

bool running_again() {
  for (const auto* scope = SaveScope::innermost(); scope; scope = scope->outer())
    if (scope->listener().runs_again()) return true;
  return false;
}

void repeat_with(const std::shared_ptr<DropoutState>& state) {
  for (const auto* scope = SaveScope::innermost(); scope; scope = scope->outer()) scope->listener().repeat_with(state);
}

void detail::run_recomputed(Recomputation what) {
  if (!at::GradMode::is_enabled()) return what.run(std::move(what.inputs));
  const auto frame = std::make_shared<Frame>(what);
  frame->run(what);
}

RecomputedUnits::RecomputedUnits(torch::nn::Module& module, const Which& which, const RecomputeOptions& options) {
  std::vector<const UnitSeam*> seen;
  const auto look_at = [&](const std::string& path, torch::nn::Module& child, UnitSeam* unit) {
    // A module at several places is one Unit.
    if (!unit || std::find(seen.begin(), seen.end(), unit) != seen.end()) return;
    seen.push_back(unit);
    if (!(which ? which(path, child) : !path.empty())) return;
    auto own = options;
    if (own.name.empty()) own.name = fmt::format("Unit '{}'", path.empty() ? unit->type_name() : path);
    auto hook = std::make_unique<RecomputeHook>(std::move(own));
    unit->hooks().add(*hook);
    units_.push_back({unit->shared_hooks(), std::move(hook)});
  };
  look_at("", module, unit_of(module));
  std::vector<std::pair<std::string, torch::nn::Module*>> open = {{"", &module}};
  for (std::size_t at = 0; at < open.size(); ++at)
    for (const auto& child : open[at].second->named_children()) {
      const auto [path, parent] = open[at];
      std::string name = path.empty() ? child.key() : path + "." + child.key();
      look_at(name, *child.value(), unit_of(*child.value(), *parent));
      open.emplace_back(std::move(name), child.value().get());
    }
}

void RecomputedUnits::take_off() {
  for (const auto& one : units_) one.hooks->remove(*one.hook);
  units_.clear();
}

RecomputedUnits::~RecomputedUnits() { take_off(); }

RecomputedUnits& RecomputedUnits::operator=(RecomputedUnits&& other) noexcept {
  take_off();
  units_ = std::move(other.units_);
  return *this;
}

}  // namespace bonfire
