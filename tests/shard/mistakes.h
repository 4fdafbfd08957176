#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/shard/twins.h"

// Programs that make a mistake, and what they are told.
namespace bonfire::testing {

inline std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// In one line.
inline void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const auto& word : words) EXPECT_NE(message.find(word), std::string::npos) << "expected: " << word << "\n" << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

inline Engine shard_chain(const World& world, const Sharding& sharding, Chain& net, const ShardOptions& options = {}) {
  return shard(world.mesh({.replicate = world.size() / sharding.factor, .shard = sharding.factor}), net,
               sharding.options(options));
}

inline at::Tensor loss_of(Chain& net, int step = 0) { return net->forward(chain_input(0, step), {0, 1, 2}).pow(2).mean(); }

}  // namespace bonfire::testing
