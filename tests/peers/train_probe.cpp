#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/comm/join.h"
#include "bonfire/models/model.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/shard/engine.h"
#include "tests/peers/probes.h"

namespace bonfire::peers {
namespace {

using Words = std::map<std::string, std::string>;

at::Tensor tokens_of_step(std::int64_t step, std::int64_t batch, std::int64_t length, std::int64_t vocab) {
  const Random random = Random(11).fork(static_cast<std::uint64_t>(step));
  auto tokens = at::empty({batch, length}, at::kLong);
  for (std::int64_t at = 0; at < tokens.numel(); ++at)
    // Some tokens are more likely than others, so that there is something to learn.
    tokens.data_ptr<std::int64_t>()[at] =
        static_cast<std::int64_t>(random.uniform(static_cast<std::uint64_t>(2 * at)) *
                                  random.uniform(static_cast<std::uint64_t>(2 * at + 1)) * static_cast<double>(vocab));
  return tokens;
}

}  // namespace

// In fp32: what training itself is done in.
void train_model(const Arguments& arguments) {
  const std::filesystem::path folder = arguments.at(1);
  Words words;
  for (std::size_t at = 2; at < arguments.size(); ++at) {
    const auto equals = arguments[at].find('=');
    require(equals != std::string::npos, "'{}' is not KEY=VALUE", arguments[at]);
    words[arguments[at].substr(0, equals)] = arguments[at].substr(equals + 1);
  }
  const auto number = [&](const char* key) { return std::stod(words.at(key)); };
  const int steps = static_cast<int>(number("steps")), microbatches = static_cast<int>(number("microbatches"));
  const auto batch = static_cast<std::int64_t>(number("batch"));
  constexpr std::int64_t sequence = 32;

  const World world = world_from_environment();
  const Mesh mesh =
      world.mesh({.replicate = static_cast<int>(number("replicate")), .shard = static_cast<int>(number("shard"))});
  const auto spec = plan::resolve(probe_spec(arguments.at(0)));
  const auto model = build_model(spec, {.seed = 3});
  nlohmann::json index = index_of(spec);
  for (const auto& parameter : model->public_parameters()) {
    const bool frozen = !words.at("frozen").empty() && parameter.name.find(words.at("frozen")) != std::string::npos;
    if (frozen) model->named_parameters()[parameter.inside].set_requires_grad(false);
    index["parameters"].push_back({{"name", parameter.name}, {"shape", parameter.tensor.sizes().vec()}, {"frozen", frozen}});
    if (world.rank() == 0) write_raw(folder / parameter.name, parameter.tensor);
  }

  Engine engine =
      shard(mesh, *model, {.what = plan::sharded_of(words.at("what")), .reshard_after_forward = words.at("free") == "true"});
  AdamW optimizer(engine, {.lr = number("lr"), .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1});
  const std::int64_t mine = batch / world.size() / microbatches;
  for (int step = 0; step < steps; ++step) {
    const auto tokens = tokens_of_step(step, batch, sequence + 1, spec.vocab);
    if (world.rank() == 0) write_raw(folder / ("tokens" + std::to_string(step)), tokens);
    double sum = 0;
    for (int micro = 0; micro < microbatches; ++micro) {
      const auto part = tokens.narrow(0, (world.rank() * microbatches + micro) * mine, mine);
      const auto loss = model->loss(part.slice(1, 0, sequence).contiguous(), part.slice(1, 1).contiguous());
      sum += loss.item<double>() / microbatches;
      micro + 1 < microbatches ? engine.accumulate(loss / microbatches) : engine.backward(loss / microbatches);
    }
    index["losses"].push_back(world.group().sum(sum) / world.size());
    index["norms"].push_back(optimizer.step({.clip = number("clip")}).gradient_norm);
  }
  if (world.rank() == 0) std::ofstream(folder / "index.json") << index.dump(1);
}

}  // namespace bonfire::peers
