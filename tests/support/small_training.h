#pragma once

#include <optional>
#include <utility>

#include <ATen/ATen.h>

#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/support/small_net.h"

namespace bonfire::testing {

struct SmallTrainingOptions {
  at::ScalarType type = at::kDouble;
  int frozen_steps = 0;  // for which the gain of the second layer is frozen
};

// SmallNet with a buffer, on all ranks of the world, divided by `division`: its state is saved and loaded.
struct SmallTraining {
  SmallTraining(World& world, const Division& division, ShardOptions options = {}, SmallTrainingOptions how = {})
      : net(how.type), frozen_steps(how.frozen_steps) {
    statistics = net->register_buffer("statistics", at::arange(6, at::kDouble).view({2, 3}).t());
    if (frozen_steps > 0) net->second->gain.set_requires_grad(false);
    options.what = division.what;
    options.buckets = {.bucket_bytes = 700, .first_bucket_bytes = 300};
    engine.emplace(
        shard(world.mesh({.replicate = world.size() / division.shard, .shard = division.shard}), net, std::move(options)));
    optimizer.emplace(*engine, AdamOptions{.lr = 0.01, .weight_decay = 0.1, .amsgrad = true});
  }
  // All ranks have the same samples, so that their average is a single rank's gradient to the bit.
  double step(int number) {
    if (frozen_steps > 0 && number == frozen_steps) net->second->gain.set_requires_grad(true);
    const auto loss = small_loss(net, number);
    engine->backward(loss);
    optimizer->step();
    statistics.add_(1);
    return loss.item<double>();
  }

  SmallNet net;
  int frozen_steps;
  at::Tensor statistics;
  std::optional<Engine> engine;
  std::optional<AdamW> optimizer;
};

}  // namespace bonfire::testing
