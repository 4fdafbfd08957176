#include "tests/server/replay.h"

#include <map>
#include <optional>
#include <utility>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

namespace bonfire::testing {
namespace {

constexpr std::int64_t aligned = 64;

std::int64_t up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }

using Units = std::vector<at::Tensor>;  // of one server: its part of each

// Each parameter begins at a multiple of 64 elements; a Unit is cut into as many equal parts as there are servers, of a
// multiple of 64 elements each.
at::Tensor flat(const std::vector<at::Tensor>& parameters, std::int64_t servers) {
  std::int64_t elements = 0;
  for (const auto& parameter : parameters) elements += up(parameter.numel(), aligned);
  auto whole = at::zeros({up(elements, aligned * servers)}, at::kDouble);
  std::int64_t begin = 0;
  for (const auto& parameter : parameters) {
    whole.narrow(0, begin, parameter.numel()).copy_(parameter.reshape({-1}));
    begin += up(parameter.numel(), aligned);
  }
  return whole;
}

void unflatten(const at::Tensor& whole, const std::vector<at::Tensor>& parameters) {
  std::int64_t begin = 0;
  for (const auto& parameter : parameters) {
    parameter.detach().copy_(whole.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
    begin += up(parameter.numel(), aligned);
  }
}

struct Weights {
  std::vector<Units> versions;  // from 0
  Units now;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

}  // namespace

std::vector<at::Tensor> Replay::run(const std::vector<std::vector<ServerUpdate>>& updates) const {
  const auto count = static_cast<std::int64_t>(updates.size());
  const auto module = make();
  const auto all = module->parameters();
  const auto of_unit = [&](std::size_t unit, bool gradients) {
    std::vector<at::Tensor> tensors;
    for (const auto at : units[unit]) tensors.push_back(gradients ? all[at].grad() : all[at].detach());
    return tensors;
  };
  std::vector<Weights> servers(updates.size());
  for (std::size_t server = 0; server < servers.size(); ++server) {
    auto& of = servers[server];
    Units start;
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      const auto part = flat(of_unit(unit, false), count).chunk(count)[static_cast<std::int64_t>(server)].clone();
      start.push_back(part);
      of.now.push_back(part.clone().requires_grad_(true));
    }
    of.versions.push_back(start);
    of.optimizer = optimizer(of.now);
  }
  // Where each push stands in the updates of each server: what its worker had read there.
  std::map<std::pair<int, std::int64_t>, std::vector<const Push*>> pushes;
  for (std::size_t server = 0; server < servers.size(); ++server)
    for (const auto& update : updates[server])
      for (const auto& push : update.pushes) {
        auto& everywhere = pushes[{push.worker, push.step}];
        everywhere.resize(servers.size());
        everywhere[server] = &push;
      }
  std::map<std::pair<int, std::int64_t>, Units> gradients;  // whole Units
  const auto gradient_of = [&](const Push& push) -> const Units* {
    const std::pair key{push.worker, push.step};
    if (const auto known = gradients.find(key); known != gradients.end()) return &known->second;
    const auto& read = pushes.at(key);
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      std::vector<at::Tensor> parts;
      for (std::size_t server = 0; server < servers.size(); ++server) {
        if (!read[server]) return nullptr;
        const auto version = static_cast<std::size_t>(read[server]->versions.at(unit));
        if (version >= servers[server].versions.size()) return nullptr;
        parts.push_back(servers[server].versions[version][unit]);
      }
      unflatten(at::cat(parts), of_unit(unit, false));
    }
    module->zero_grad();
    backward(*module, push.worker, push.step);
    Units made;
    for (std::size_t unit = 0; unit < units.size(); ++unit) made.push_back(flat(of_unit(unit, true), count));
    return &(gradients[key] = made);
  };
  std::vector<std::size_t> next(servers.size());
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t server = 0; server < servers.size(); ++server) {
      auto& of = servers[server];
      while (next[server] < updates[server].size()) {
        const auto& update = updates[server][next[server]];
        std::vector<const Units*> made;
        for (const auto& push : update.pushes) made.push_back(gradient_of(push));
        if (std::find(made.begin(), made.end(), nullptr) != made.end()) break;
        for (std::size_t unit = 0; unit < units.size(); ++unit) {
          auto mean = at::zeros_like(of.now[unit]);
          for (const auto* one : made)
            mean.add_((*one)[unit].chunk(count)[static_cast<std::int64_t>(server)], 1.0 / static_cast<double>(made.size()));
          of.now[unit].mutable_grad() = mean;
        }
        if (update.applied) of.optimizer->step();
        Units copy;
        for (const auto& unit : of.now) copy.push_back(unit.detach().clone());
        of.versions.push_back(copy);
        ++next[server];
        moved = true;
      }
    }
  }
  for (std::size_t server = 0; server < servers.size(); ++server)
    EXPECT_EQ(next[server], updates[server].size()) << "server " << server << ": an update reads weights that never were";
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    std::vector<at::Tensor> parts;
    for (const auto& server : servers) parts.push_back(server.now[unit].detach());
    unflatten(at::cat(parts), of_unit(unit, false));
  }
  std::vector<at::Tensor> result;
  for (const auto& parameter : all) result.push_back(parameter.detach().clone());
  return result;
}

void put_slices(const std::vector<Slice>& slices, torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  const auto parameters = module.named_parameters();
  for (const auto& slice : slices) {
    if (slice.kind != "value") continue;
    auto box = parameters[slice.name].detach();
    for (std::size_t dim = 0; dim < slice.box.begin.size(); ++dim)
      box = box.narrow(static_cast<std::int64_t>(dim), slice.box.begin[dim], slice.box.end[dim] - slice.box.begin[dim]);
    auto values = box.reshape({-1}).clone();
    values.narrow(0, slice.begin, slice.length).copy_(slice.read());
    box.copy_(values.view(box.sizes()));
  }
}

}  // namespace bonfire::testing
