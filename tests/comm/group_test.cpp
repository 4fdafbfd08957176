#include "bonfire/comm/group.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "tests/support/ranks.h"

namespace bonfire::group_test {
namespace {

using testing::run_ranks;

// Every collective in every dtype that can take part, against values computed from the ranks' numbers.
class Collectives : public ::testing::TestWithParam<std::tuple<int, at::ScalarType>> {
 protected:
  int ranks() const { return std::get<0>(GetParam()); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
  bool reducible() const { return dtype() != at::kByte; }

  // Small whole numbers, so that every dtype holds them and their sums exactly: rank r has r + 1 + (element modulo 5).
  at::Tensor value(int rank, std::int64_t elements) const { return (at::arange(elements) % 5 + rank + 1).to(dtype()); }
  at::Tensor reduced(std::int64_t elements, Reduce op) const {
    auto sum = at::zeros({elements}, at::kDouble);
    for (int rank = 0; rank < ranks(); ++rank) {
      const auto one = value(rank, elements).to(at::kDouble);
      sum = op == Reduce::max ? at::maximum(sum, one) : sum + one;
    }
    if (op == Reduce::average) sum /= ranks();
    return sum.to(dtype());
  }
};

// As far apart as two ways to round an average of small numbers may be: one step of the dtype.
void expect_one_rounding(const at::Tensor& got, const at::Tensor& want) {
  const double step = got.scalar_type() == at::kDouble     ? 0x1p-52
                      : got.scalar_type() == at::kFloat    ? 0x1p-23
                      : got.scalar_type() == at::kBFloat16 ? 0x1p-7
                                                           : 0x1p-10;
  EXPECT_TRUE(at::allclose(got.to(at::kDouble), want.to(at::kDouble), step, 0)) << "got " << got << "\nwant " << want;
}

void expect_equal(const at::Tensor& got, const at::Tensor& want) {
  EXPECT_TRUE(at::equal(got, want)) << "got " << got << "\nwant " << want;
}

TEST_P(Collectives, Reductions) {
  if (!reducible()) GTEST_SKIP() << "raw bytes are not reduced";
  run_ranks(ranks(), [&](World& world) {
    const Group& group = world.group();
    const std::int64_t part = 7, whole = part * ranks();
    for (const Reduce op : {Reduce::sum, Reduce::average, Reduce::max}) {
      if (op == Reduce::average && dtype() == at::kLong) continue;
      auto all = value(group.rank(), whole);
      group.all_reduce(all, op).wait();
      auto want = reduced(whole, op);
      if (op == Reduce::average)
        expect_one_rounding(all, want);
      else
        expect_equal(all, want);

      auto scattered = at::empty({part}, dtype());
      group.reduce_scatter(scattered, value(group.rank(), whole), op).wait();
      if (op == Reduce::average)
        expect_one_rounding(scattered, want.narrow(0, part * group.rank(), part));
      else
        expect_equal(scattered, want.narrow(0, part * group.rank(), part));

      const int root = ranks() - 1;
      auto rooted = value(group.rank(), whole);
      if (op == Reduce::average) continue;
      group.reduce(rooted, root, op).wait();
      if (group.rank() == root) expect_equal(rooted, want);
    }
  });
}

TEST_P(Collectives, Movements) {
  run_ranks(ranks(), [&](World& world) {
    const Group& group = world.group();
    const std::int64_t part = 6;
    std::vector<at::Tensor> values;
    for (int rank = 0; rank < ranks(); ++rank) values.push_back(value(rank, part));
    const auto everything = at::cat(values);

    auto gathered = at::empty({ranks(), part}, dtype());
    group.all_gather(gathered, values[group.rank()]).wait();
    expect_equal(gathered.view(-1), everything);

    const int root = ranks() / 2;
    auto sent = values[group.rank()].clone();
    group.broadcast(sent, root).wait();
    expect_equal(sent, values[root]);

    auto at_root = group.rank() == root ? at::empty({ranks() * part}, dtype()) : at::Tensor();
    group.gather(at_root, values[group.rank()], root).wait();
    if (group.rank() == root) expect_equal(at_root, everything);

    auto mine = at::empty({part}, dtype());
    group.scatter(mine, group.rank() == root ? everything : at::Tensor(), root).wait();
    expect_equal(mine, values[group.rank()]);

    // Rank r sends to rank i the i-th part of its own numbers.
    auto input = at::empty({ranks(), part}, dtype());
    for (int to = 0; to < ranks(); ++to) input.select(0, to).copy_(value(group.rank() + to, part));
    auto output = at::empty({ranks(), part}, dtype());
    group.all_to_all(output, input).wait();
    for (int from = 0; from < ranks(); ++from) expect_equal(output.select(0, from), value(from + group.rank(), part));

    group.barrier().wait();
  });
}

TEST_P(Collectives, Messages) {
  if (ranks() == 1) GTEST_SKIP() << "nobody to talk to";
  run_ranks(ranks(), [&](World& world) {
    const Group& group = world.group();
    const int next = (group.rank() + 1) % ranks(), before = (group.rank() + ranks() - 1) % ranks();
    // Everybody sends and receives at once, two messages each way: a blocking send would never end.
    auto a = at::empty({100}, dtype()), b = at::empty({3}, dtype());
    const std::vector<Message> messages{{Message::Way::send, value(group.rank(), 100), next},
                                        {Message::Way::send, value(group.rank() + 1, 3), next},
                                        {Message::Way::receive, a, before},
                                        {Message::Way::receive, b, before}};
    group.batch(messages).wait();
    expect_equal(a, value(before, 100));
    expect_equal(b, value(before + 1, 3));

    if (group.rank() == 0) group.send(value(5, 9), 1).wait();
    if (group.rank() == 1) {
      auto got = at::empty({9}, dtype());
      group.receive(got, 0).wait();
      expect_equal(got, value(5, 9));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, Collectives,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong,
                                                              at::kByte)),
                         [](const auto& info) {
                           return "ranks" + std::to_string(std::get<0>(info.param)) + "_" +
                                  c10::toString(std::get<1>(info.param));
                         });

TEST(Group, CollectivesOverlapAndEndInAnyOrder) {
  run_ranks(3, [](World& world) {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int i = 0; i < 8; ++i) {
      tensors.push_back(at::full({1000}, world.rank() + i, at::kFloat));
      works.push_back(world.group().all_reduce(tensors.back()));
    }
    for (int i = 7; i >= 0; --i) {
      works[i].wait();
      works[i].wait();
      EXPECT_TRUE(works[i].done());
      EXPECT_EQ(tensors[i][0].item<float>(), 3 + 3 * i);
    }
  });
}

TEST(Group, SumsInRankOrderGiveEqualBitsTwice) {
  std::vector<at::Tensor> results(2);
  for (auto& result : results)
    run_ranks(4, [&](World& world) {
      auto values = at::sin(at::arange(4096).to(at::kFloat) * (world.rank() + 1));
      auto part = at::empty({1024});
      world.group().reduce_scatter(part, values).wait();
      if (world.rank() == 2) result = part;
    });
  EXPECT_TRUE(at::equal(results[0], results[1]));
}

std::string error_of(const std::function<void(const Group&)>& call) {
  std::string message;
  run_ranks(2, [&](World& world) {
    try {
      call(world.group());
    } catch (const Error& error) {
      if (world.rank() == 0) message = error.what();
    }
    world.group().barrier().wait();  // a rank that leaves closes its connections, and the other may not have made its own
  });
  return message;
}

TEST(Group, RefusesWhatWouldGoWrong) {
  const auto strided = at::zeros({4, 4}).t();
  EXPECT_NE(error_of([&](const Group& group) { group.all_reduce(strided).wait(); }).find("has strides [1, 4]"),
            std::string::npos);
  EXPECT_NE(
      error_of([](const Group& group) { group.all_reduce(at::zeros({2}, at::kByte)).wait(); }).find("cannot be reduced"),
      std::string::npos);
  EXPECT_NE(error_of([](const Group& group) {
              group.all_reduce(at::zeros({2}, at::kLong), Reduce::average).wait();
            }).find("int64 has no average"),
            std::string::npos);
  EXPECT_NE(error_of([](const Group& group) {
              group.all_reduce(at::zeros({2}, at::kInt)).wait();
            }).find("dtype Int cannot be sent"),
            std::string::npos);
  EXPECT_NE(error_of([](const Group& group) { group.broadcast(at::zeros({2}), 2).wait(); }).find("rank 2 is not in 0..1"),
            std::string::npos);
  EXPECT_NE(error_of([](const Group& group) {
              group.all_gather(at::zeros({5}), at::zeros({2})).wait();
            }).find("one must be 2 times the other"),
            std::string::npos);
  EXPECT_NE(error_of([](const Group& group) { group.send(at::zeros({5}), group.rank()).wait(); }).find("with itself"),
            std::string::npos);
}

TEST(Group, OfOneAnswersItself) {
  World world;
  auto part = at::empty({3});
  world.group().reduce_scatter(part, at::ones({3})).wait();
  EXPECT_EQ(part.sum().item<float>(), 3);
  EXPECT_EQ(world.group().sum(2.5), 2.5);
  EXPECT_THROW((void)world.group().all_reduce(at::zeros({4, 4}).t()), Error);
}

}  // namespace
}  // namespace bonfire::group_test
