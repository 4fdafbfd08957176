// Which Units run, and in which order, may change from step to step and from rank to rank: that costs time, and nothing
// else.
#include <algorithm>
#include <chrono>
#include <mutex>
#include <numeric>

#include "tests/shard/twins.h"

namespace bonfire::orders_test {
namespace {

using testing::Chain;
using testing::chain_input;
using testing::gathering_shardings;
using testing::Order;
using testing::run_ranks;
using testing::Sharding;
using testing::Twins;

constexpr int steps = 4;

Order all_of(std::size_t length) {
  Order order(length);
  std::iota(order.begin(), order.end(), std::size_t{0});
  return order;
}

Order reversed(Order order) {
  std::reverse(order.begin(), order.end());
  return order;
}

struct Words {
  Log log() {
    return Log([this](LogLevel level, std::string_view text) {
      const std::lock_guard lock(mutex);
      if (level == LogLevel::warning) warnings.emplace_back(text);
    });
  }
  std::mutex mutex;
  std::vector<std::string> warnings;
};

// With this, ranks that wait for each other without need wait longer than a collective may take.
constexpr std::chrono::minutes for_ever{1};
constexpr std::chrono::milliseconds briefly{100};

// `order_of` gives what a rank runs in a step.
template <class OrderOf>
void train(std::size_t length, const OrderOf& order_of, ShardOptions options = {.patience = for_ever}) {
  run_ranks(testing::sharding_ranks, [&](World& world) {
    for (const Sharding& sharding : gathering_shardings()) {
      Twins<Chain> twins(
          world, sharding, [&] { return Chain(length); }, options);
      for (int step = 0; step < steps; ++step)
        twins.step(
            [&](Chain& net, int rank) { return net->forward(chain_input(rank, step), order_of(step, rank)).pow(2).mean(); });
      twins.expect_equal();
    }
  });
}

TEST(Orders, MayChangeOnAllRanks) {
  train(5, [](int step, int) {
    return std::vector<Order>{{0, 1, 2, 3, 4}, {4, 1, 3, 2, 0}, {0, 2, 1, 4, 3}, {0, 1, 2, 3, 4}}[step];
  });
}

TEST(Orders, UnitsMayBeLeftOutOnAllRanks) {
  train(5, [](int step, int) { return std::vector<Order>{{0, 1, 2, 3, 4}, {0, 2, 4}, {3}, {0, 1, 2, 3, 4}}[step]; });
  // The first step has not seen all of them.
  train(4, [](int step, int) { return std::vector<Order>{{0, 2}, {0, 1, 2, 3}, {1, 3}, {0, 1, 2, 3}}[step]; });
}

TEST(Orders, UnitsMayRunOnceMoreOnAllRanks) {
  Words words;
  train(4,
        [](int step, int) {
          return std::vector<Order>{{0, 1, 2, 3}, {0, 1, 1, 2, 3, 0}, {0, 1, 2, 3}, {3, 3, 2, 1, 0, 2}}[step];
        },
        {.patience = for_ever, .log = words.log()});
  EXPECT_TRUE(std::any_of(words.warnings.begin(), words.warnings.end(), [](const std::string& warning) {
    return warning.starts_with("Unit 'block0' ran more often than in the first step");
  })) << words.warnings.size();
}

TEST(Orders, RanksMayDisagreeFromTheFirstStepOn) {
  Words words;
  train(8, [](int, int rank) { return rank % 2 ? reversed(all_of(8)) : all_of(8); },
        {.patience = for_ever, .log = words.log()});
  ASSERT_FALSE(words.warnings.empty());
  for (const auto& warning : words.warnings) {
    EXPECT_NE(warning.find("ranks disagree about which Unit runs next: '"), std::string::npos) << warning;
    EXPECT_NE(warning.find("'block0'"), std::string::npos) << warning;
    EXPECT_NE(warning.find("'block7'"), std::string::npos) << warning;
  }
}

TEST(Orders, RanksMayDisagreeLater) {
  Words words;
  train(8, [](int step, int rank) { return step > 0 && rank % 2 ? reversed(all_of(8)) : all_of(8); },
        {.patience = briefly, .log = words.log()});
  ASSERT_FALSE(words.warnings.empty());
  for (const auto& warning : words.warnings) {
    EXPECT_TRUE(warning.starts_with("rank 1 runs Unit 'block7'") || warning.starts_with("rank 3 runs Unit 'block7'"))
        << warning;
    EXPECT_NE(warning.find("where the first step ran 'block"), std::string::npos) << warning;
  }
  const ShardOptions options{.patience = briefly, .log = Log::silent()};
  // Each rank its own.
  train(
      6,
      [](int step, int rank) {
        auto order = all_of(6);
        std::rotate(order.begin(), order.begin() + (step * rank) % 6, order.end());
        return order;
      },
      options);
  // Past two gathers of one Unit.
  train(
      3,
      [](int step, int rank) {
        return step > 0 && rank % 2 ? Order{2, 0, 1, 0} : Order{0, 1, 0, 2};
      },
      options);
}

TEST(Orders, RanksMayLeaveOutUnitsOfTheirOwn) {
  train(10, [](int step, int rank) {
    auto order = all_of(10);
    if (step > 0) order.erase(order.begin() + (2 + 3 * rank + step) % 10);
    if (step > 1 && rank == 2) order.resize(3);
    return order;
  });
}

TEST(Orders, RanksMayDisagreeAndRunUnitsOnceMore) {
  train(5,
        [](int step, int rank) {
          if (step < 2) return all_of(5);
          // They find out at different places of the course.
          return rank % 2 ? Order{4, 4, 4, 0, 1, 2, 3} : Order{0, 1, 2, 3, 4, 4, 4};
        },
        {.patience = briefly, .log = Log::silent()});
}

// Forwards with gradients that nobody differentiates: what all ranks do next waits for those that still gather.
TEST(Orders, RanksMayMeetBetweenForwardAndBackward) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : gathering_shardings()) {
      Twins<Chain> twins(world, sharding, [] { return Chain(5); }, {.patience = for_ever, .log = Log::silent()});
      const auto run_apart = [&](int step) {
        return twins.ours->forward(chain_input(world.rank(), step), world.rank() % 2 ? all_of(5) : Order{0, 2});
      };
      // In the first round before there is an order to follow.
      for (int step = 0; step < 3; ++step) {
        run_apart(step);
        twins.engine.check_equal();
        run_apart(step);
        twins.expect_equal();
        run_apart(step);
        EXPECT_THROW(twins.optimizer.step(), Error);
        twins.backward([&](Chain& net, int rank) { return net->forward(chain_input(rank, step), all_of(5)).pow(2).mean(); });
        // What all are refused, too.
        EXPECT_THROW(twins.engine.backward(run_apart(step).sum()), Error);
        twins.update();
      }
      twins.expect_equal();
    }
  });
}

// One of two halves, so that a rank does not use all parameters of a Unit.
struct ChoiceImpl : torch::nn::Module {
  ChoiceImpl() {
    for (int at = 0; at < 2; ++at)
      halves.push_back(register_module(fmt::format("half{}", at), torch::nn::Linear(width, width)));
  }
  at::Tensor forward(const at::Tensor& x, std::size_t which) { return x + halves[which]->forward(x).tanh(); }
  static constexpr std::int64_t width = testing::ChainImpl::width;
  std::vector<torch::nn::Linear> halves;
};
BONFIRE_UNIT(Choice);

struct ChoicesImpl : torch::nn::Module {
  ChoicesImpl() {
    for (int at = 0; at < 8; ++at) choices.push_back(register_module(fmt::format("choice{}", at), Choice()));
    testing::initialise(*this);
  }
  at::Tensor forward(at::Tensor x, std::size_t which) {
    for (std::size_t at = 0; at < choices.size(); ++at) x = choices[at]->forward(x, (which + at) % 2);
    return x;
  }
  std::vector<Choice> choices;
};
BONFIRE_UNIT(Choices);

TEST(Orders, RanksMayUseDifferentParametersOfAUnit) {
  run_ranks(testing::sharding_ranks, [](World& world) {
    for (const Sharding& sharding : testing::shardings()) {
      Twins<Choices> twins(world, sharding, [] { return Choices(); }, {.patience = for_ever});
      for (int step = 0; step < steps; ++step)
        twins.step([&](Choices& net, int rank) {
          return net->forward(chain_input(rank, step), static_cast<std::size_t>(step * rank)).pow(2).mean();
        });
      twins.expect_equal();
    }
  });
}

// Nothing is the same twice.
TEST(Orders, MayBeLeftToChance) {
  Words words;
  train(8,
        [](int step, int rank) {
          Order order;
          for (std::size_t at = 0; at < 8; ++at)
            for (std::uint64_t uses = Random(17).bits(static_cast<std::uint64_t>((step * 4 + rank) * 8) + at) % 3; uses > 0;
                 --uses)
              order.push_back(at);
          return order;
        },
        {.negotiate_order = true, .patience = for_ever, .log = words.log()});
  EXPECT_TRUE(words.warnings.empty()) << words.warnings.front();  // it was said beforehand
}

}  // namespace
}  // namespace bonfire::orders_test
