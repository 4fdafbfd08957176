#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "bonfire/nn/dropout_state.h"

// What is as it was while a forward runs again: each is set for the lifetime of an object, and put back at its end.
namespace bonfire {

struct Autocast {
  struct OfDevice {
    at::DeviceType device;
    bool enabled;
    at::ScalarType type;
  };
  std::vector<OfDevice> devices;
  bool caches;

  static Autocast now() {
    Autocast now{.devices = {}, .caches = at::autocast::is_autocast_cache_enabled()};
    for (const auto device : {at::kCPU, at::kCUDA})
      now.devices.push_back({device, at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)});
    return now;
  }
  void set() const {
    for (const auto& of : devices) {
      at::autocast::set_autocast_enabled(of.device, of.enabled);
      at::autocast::set_autocast_dtype(of.device, of.type);
    }
    at::autocast::set_autocast_cache_enabled(caches);
  }
};

class AutocastAsThen {
 public:
  explicit AutocastAsThen(const Autocast& then) : now_(Autocast::now()) {
    then.set();
    at::autocast::increment_nesting();
  }
  ~AutocastAsThen() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    now_.set();
  }
  AutocastAsThen(const AutocastAsThen&) = delete;
  AutocastAsThen& operator=(const AutocastAsThen&) = delete;

 private:
  Autocast now_;
};

struct GeneratorState {
  at::Generator generator;
  at::Tensor state;
};

inline std::vector<GeneratorState> torch_generators(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Device> devices = {at::kCPU};
  for (const auto& input : inputs)
    if (std::find(devices.begin(), devices.end(), input.device()) == devices.end()) devices.push_back(input.device());
  std::vector<GeneratorState> states;
  for (const auto device : devices) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    states.push_back({generator, generator.get_state()});
  }
  return states;
}

// Gives generators other states, and at the end those that they had.
class GeneratorsAsThen {
 public:
  explicit GeneratorsAsThen(const std::vector<GeneratorState>& then) {
    for (auto [generator, state] : then) {
      const std::lock_guard lock(generator.mutex());
      now_.push_back({generator, generator.get_state()});
      generator.set_state(state);
    }
  }
  ~GeneratorsAsThen() {
    for (auto& [generator, state] : now_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }
  GeneratorsAsThen(const GeneratorsAsThen&) = delete;
  GeneratorsAsThen& operator=(const GeneratorsAsThen&) = delete;

 private:
  std::vector<GeneratorState> now_;
};

struct DropoutThen {
  std::shared_ptr<DropoutState> state;
  DropoutState then;
};

class DropoutAsThen {
 public:
  explicit DropoutAsThen(std::vector<DropoutThen>& all) : all_(all) { swap(); }
  ~DropoutAsThen() { swap(); }
  DropoutAsThen(const DropoutAsThen&) = delete;
  DropoutAsThen& operator=(const DropoutAsThen&) = delete;

 private:
  void swap() {
    for (auto& [state, other] : all_) std::swap(*state, other);
  }
  std::vector<DropoutThen>& all_;
};

// A module's running statistics have seen the forward already.
class BuffersAsNow {
 public:
  explicit BuffersAsNow(const torch::nn::Module* module) {
    if (module)
      for (auto& buffer : module->buffers()) kept_.emplace_back(buffer, buffer.clone());
  }
  ~BuffersAsNow() {
    const at::NoGradGuard no_grad;
    for (auto& [buffer, kept] : kept_) buffer.copy_(kept);
  }
  BuffersAsNow(const BuffersAsNow&) = delete;
  BuffersAsNow& operator=(const BuffersAsNow&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

}  // namespace bonfire
