#include "bonfire/shard/wrap.h"

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include "bonfire/base/error.h"
#include "bonfire/nn/sequential.h"
#include "bonfire/nn/unit.h"

namespace bonfire::wrap_test {
namespace {

using at::Tensor;
using torch::nn::Linear;
using Names = std::vector<std::string>;
using Groups = std::map<std::string, Names>;

struct InnerImpl : torch::nn::Module {
  InnerImpl() { weight = register_parameter("weight", at::ones({5})); }
  Tensor forward(Tensor x) { return x; }
  Tensor weight;
};
BONFIRE_UNIT(Inner);

// 2 + 6 parameters of its own and a Unit with 5 inside.
struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    scale = register_parameter("scale", at::ones({2}, at::kDouble));
    linear = register_module("linear", Linear(torch::nn::LinearOptions(2, 3).bias(false)));
    inner = register_module("inner", Inner());
    statistics = register_buffer("statistics", at::zeros({1}));
  }
  Tensor forward(Tensor x) { return x; }
  Tensor scale, statistics;
  Linear linear{nullptr};
  Inner inner{nullptr};
};
BONFIRE_UNIT(Block);

struct HeadImpl : torch::nn::Module {
  HeadImpl() { weight = register_parameter("weight", at::ones({4, 2})); }
  Tensor forward(Tensor x) { return x; }
  Tensor weight;
};
BONFIRE_UNIT(Head);

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    weight = register_parameter("weight", at::ones({3}));
    register_parameter("steps", at::zeros({1}, at::kLong), /*requires_grad=*/false);
    blocks = register_module("blocks", torch::nn::ModuleList(Block(), Block()));
    head = register_module("head", Head());
    statistics = register_buffer("statistics", at::zeros({1}));
  }
  Tensor forward(Tensor x) { return x; }
  BlockImpl& block(std::size_t at) { return *blocks[at]->as<BlockImpl>(); }
  Tensor weight, statistics;
  torch::nn::ModuleList blocks{nullptr};
  Head head{nullptr};
};
BONFIRE_UNIT(Model);
struct Unmarked : ModelImpl {};

Groups names_of(torch::nn::Module& module, const Wrapping& wrapping = {}) {
  Groups groups;
  for (const auto& group : groups_of(module, wrapping)) {
    EXPECT_FALSE(groups.contains(group.name)) << group.name;
    for (const auto& member : group.members) groups[group.name].push_back(member.name);
  }
  return groups;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "nothing was refused";
}
std::string refusal(torch::nn::Module& module, const Wrapping& wrapping = {}) {
  return refusal([&] { groups_of(module, wrapping); });
}

const Groups each{{"", {"weight"}},
                  {"blocks.0", {"blocks.0.scale", "blocks.0.linear.weight"}},
                  {"blocks.0.inner", {"blocks.0.inner.weight"}},
                  {"blocks.1", {"blocks.1.scale", "blocks.1.linear.weight"}},
                  {"blocks.1.inner", {"blocks.1.inner.weight"}},
                  {"head", {"head.weight"}}};
const Names everything{"weight",         "blocks.0.scale",         "blocks.0.linear.weight", "blocks.0.inner.weight",
                       "blocks.1.scale", "blocks.1.linear.weight", "blocks.1.inner.weight",  "head.weight"};

TEST(Wrap, EveryUnitByItselfAndTheRestIsTheRoots) {
  Model model;
  EXPECT_EQ(names_of(*model), each);
  const auto groups = groups_of(*model);
  Names order;
  for (const auto& group : groups) {
    order.push_back(group.name);
    ASSERT_TRUE(group.unit);
  }
  EXPECT_EQ(order, (Names{"", "blocks.0", "blocks.0.inner", "blocks.1", "blocks.1.inner", "head"}));
  EXPECT_EQ(groups[0].unit, unit_of(*model));
  EXPECT_EQ(&groups[1].unit->module(), model->blocks[0].get());
  EXPECT_NE(groups[1].members[0].parameter.scalar_type(), groups[1].members[1].parameter.scalar_type())
      << "dtypes do not part what a Unit needs at once";
  Unmarked unmarked;
  EXPECT_EQ(names_of(unmarked), each);
  EXPECT_EQ(groups_of(unmarked)[0].unit, nullptr);
}

TEST(Wrap, EveryPolicyPlacesEveryParameterOnce) {
  Model model;
  const auto by = [&](Wrapping wrapping) {
    Names all;
    for (const auto& [name, members] : names_of(*model, wrapping)) all.insert(all.end(), members.begin(), members.end());
    std::sort(all.begin(), all.end());
    return all;
  };
  Names sorted = everything;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(by({}), sorted);
  EXPECT_EQ(by({.types = {"Block"}}), sorted);
  EXPECT_EQ(by({.all_in_one = true}), sorted);
  for (std::int64_t least = 0; least < 40; ++least) EXPECT_EQ(by({.min_parameters = least}), sorted) << least;
}

TEST(Wrap, ByType) {
  Model model;
  EXPECT_EQ(names_of(*model, {.types = {"Block"}}),
            (Groups{{"", {"weight", "head.weight"}},
                    {"blocks.0", {"blocks.0.scale", "blocks.0.linear.weight", "blocks.0.inner.weight"}},
                    {"blocks.1", {"blocks.1.scale", "blocks.1.linear.weight", "blocks.1.inner.weight"}}}));
  const auto inner = names_of(*model, {.types = {"Inner", "Head"}});
  EXPECT_EQ(inner.at(""),
            (Names{"weight", "blocks.0.scale", "blocks.0.linear.weight", "blocks.1.scale", "blocks.1.linear.weight"}));
  EXPECT_EQ(inner.size(), 4U);
}

TEST(Wrap, SmallUnitsJoinTheOneAroundThem) {
  Model model;
  EXPECT_EQ(names_of(*model, {.min_parameters = 5}), each);
  // The inner ones have 5, and with them their blocks have 13: more than the head's 8.
  const auto nine = names_of(*model, {.min_parameters = 9});
  EXPECT_EQ(nine.at(""), (Names{"weight", "head.weight"}));
  EXPECT_EQ(nine.at("blocks.1"), (Names{"blocks.1.scale", "blocks.1.linear.weight", "blocks.1.inner.weight"}));
  EXPECT_EQ(nine.size(), 3U);
  EXPECT_EQ(names_of(*model, {.min_parameters = 14}), (Groups{{"", everything}}));
  EXPECT_EQ(names_of(*model, {.types = {"Inner"}, .min_parameters = 6}), (Groups{{"", everything}}));
}

TEST(Wrap, ByPredicateAndAllInOne) {
  Model model;
  const auto second = names_of(*model, {.predicate = [](const std::string& path, torch::nn::Module& module) {
    EXPECT_TRUE(unit_of(module));
    return path == "blocks.1";
  }});
  EXPECT_EQ(second.size(), 2U);
  EXPECT_EQ(second.at("blocks.1"), (Names{"blocks.1.scale", "blocks.1.linear.weight", "blocks.1.inner.weight"}));
  EXPECT_EQ(names_of(*model, {.all_in_one = true}), (Groups{{"", everything}}));
  EXPECT_EQ(groups_of(*model, {.all_in_one = true})[0].unit, unit_of(*model));
}

TEST(Wrap, WithoutUnitsEachParameterIsAGroup) {
  Linear linear(2, 3);
  EXPECT_EQ(names_of(*linear), (Groups{{"weight", {"weight"}}, {"bias", {"bias"}}}));
  EXPECT_EQ(groups_of(*linear)[0].unit, nullptr);
  EXPECT_EQ(names_of(*linear, {.all_in_one = true}), (Groups{{"", {"weight", "bias"}}}));
}

// Two towers in a Unit, each with Units of its own, whose tensors the tests tie.
struct LeafImpl : torch::nn::Module {
  explicit LeafImpl(Tensor given = at::ones({4, 2})) { weight = register_parameter("weight", std::move(given)); }
  Tensor forward(Tensor x) { return x; }
  Tensor weight;
};
BONFIRE_UNIT(Leaf);
struct TowerImpl : torch::nn::Module {
  TowerImpl(const Leaf& first, const Leaf& second) {
    register_module("first", first);
    register_module("second", second);
    register_parameter("own", at::ones({1}));
  }
  Tensor forward(Tensor x) { return x; }
};
BONFIRE_UNIT(Tower);
struct CityImpl : torch::nn::Module {
  CityImpl(const Tower& left, const Tower& right) {
    register_module("left", left);
    register_module("right", right);
  }
  Tensor forward(Tensor x) { return x; }
};
BONFIRE_UNIT(City);

// With these weights in the Leaves; an undefined one is made anew.
City city_of(const Tensor& a, const Tensor& b, const Tensor& c, const Tensor& d) {
  const auto leaf = [](const Tensor& weight) { return Leaf(weight.defined() ? weight : at::ones({4, 2})); };
  return City(Tower(leaf(a), leaf(b)), Tower(leaf(c), leaf(d)));
}

const ModuleGroup& group_named(const std::vector<ModuleGroup>& groups, const std::string& name) {
  const auto at = std::find_if(groups.begin(), groups.end(), [&](const auto& group) { return group.name == name; });
  EXPECT_NE(at, groups.end()) << name;
  return *at;
}

TEST(Wrap, TiedParametersBelongToTheInnermostUnitAroundAllTheirUses) {
  const Tensor shared = at::ones({4, 2}), far = at::ones({4, 2});
  City city = city_of(shared, shared, far, {});
  EXPECT_EQ(names_of(*city), (Groups{{"left", {"left.own", "left.first.weight"}},
                                     {"right", {"right.own"}},
                                     {"right.first", {"right.first.weight"}},
                                     {"right.second", {"right.second.weight"}}}));
  const auto groups = groups_of(*city);
  const auto& tied = group_named(groups, "left").members.at(1).tied;
  ASSERT_EQ(tied.size(), 1U);
  EXPECT_EQ(tied[0].name, "left.second.weight");
  EXPECT_TRUE(tied[0].parameter.is_same(shared));

  City across = city_of(shared, far, {}, shared);
  EXPECT_EQ(names_of(*across).at(""), Names{"left.first.weight"});
  // Where the towers are no group, the root is the innermost that is one.
  EXPECT_EQ(names_of(*city, {.types = {"Leaf"}}).at(""), (Names{"left.own", "left.first.weight", "right.own"}));
}

TEST(Wrap, TensorsOverTheSameMemoryAreTied) {
  const Tensor shared = at::ones({4, 2});
  City city = city_of(shared, shared.detach(), {}, {});
  const auto groups = groups_of(*city);
  const auto& member = group_named(groups, "left").members.at(1);
  ASSERT_EQ(member.tied.size(), 1U);
  EXPECT_EQ(member.tied[0].name, "left.second.weight");
  EXPECT_FALSE(member.tied[0].parameter.is_same(member.parameter));
}

TEST(Wrap, UnitAtSeveralPlacesIsOne) {
  Leaf everywhere;
  City city(Tower(everywhere, Leaf()), Tower(everywhere, everywhere));
  const auto groups = groups_of(*city);
  const auto& group = group_named(groups, "left.first");
  EXPECT_EQ(group.members.size(), 1U);
  EXPECT_EQ(group.members[0].tied.size(), 2U);
  EXPECT_EQ(group.unit, unit_of(*everywhere));
  EXPECT_EQ(groups.size(), 4U);
}

TEST(Wrap, SizeCountsWhatAUnitGathersItself) {
  const Tensor shared = at::ones({4, 2});
  City city = city_of(shared, {}, shared, {});
  // The tied weight is the root's, so that its Leaves have nothing; a Tower has 1 without its Leaf's 8.
  EXPECT_EQ(names_of(*city, {.min_parameters = 2}), (Groups{{"", {"left.own", "left.first.weight", "right.own"}},
                                                            {"left.second", {"left.second.weight"}},
                                                            {"right.second", {"right.second.weight"}}}));
}

TEST(Wrap, PartsOfOneStorageAreRefusedOnlyWhereTheyOverlap) {
  const Tensor memory = at::ones({16, 2});
  City apart = city_of(memory.narrow(0, 0, 4), memory.narrow(0, 4, 4), memory.narrow(0, 12, 4), memory.narrow(0, 8, 4));
  EXPECT_EQ(groups_of(*apart).size(), 6U);
  City overlap = city_of({}, memory.narrow(0, 4, 4), memory.narrow(0, 12, 4), memory.narrow(0, 7, 4));
  EXPECT_EQ(
      refusal(*overlap),
      "parameters 'left.second.weight' and 'right.second.weight' share a part of their memory: tie them as one tensor, or "
      "give each its own");
  City transposed = city_of({}, memory, {}, memory.detach().t());
  EXPECT_NE(refusal(*transposed).find("share a part"), std::string::npos);
  EXPECT_NE(refusal(*overlap, {.ignored_parameters = {"left.second.weight"}}).find("share a part"), std::string::npos);
  EXPECT_FALSE(
      names_of(*overlap, {.ignored_parameters = {"left.second.weight", "right.second.weight"}}).contains("right.second"));
}

TEST(Wrap, IgnoredStaysTheUsers) {
  Model model;
  Groups expected = each;
  expected.erase("head");
  expected["blocks.0"] = {"blocks.0.scale"};
  EXPECT_EQ(names_of(*model, {.ignored_modules = {"head", "blocks.0.linear"}}), expected);
  EXPECT_EQ(names_of(*model, {.ignored_modules = {"blocks.0.linear"}, .ignored_parameters = {"head.weight"}}), expected);
  EXPECT_EQ(
      names_of(*model,
               {.ignored = [](const std::string& path) { return path == "blocks.0.linear" || path == "head.weight"; }}),
      expected);
  EXPECT_EQ(buffers_of(*model).size(), 3U);
  const auto buffers = buffers_of(*model, {.types = {"Inner"}, .ignored_modules = {"head"}});
  EXPECT_EQ(buffers.size(), 3U);
  const Wrapping without_blocks{.types = {"Head"}, .ignored_modules = {"blocks"}};
  EXPECT_EQ(names_of(*model, without_blocks), (Groups{{"", {"weight"}}, {"head", {"head.weight"}}}));
  ASSERT_EQ(buffers_of(*model, without_blocks).size(), 1U);
  EXPECT_TRUE(buffers_of(*model, without_blocks)[0].tensor.is_same(model->statistics));

  const Tensor shared = at::ones({4, 2});
  City city = city_of(shared, {}, shared, {});
  EXPECT_FALSE(names_of(*city, {.ignored_parameters = {"right.first.weight"}}).contains(""))
      << "a tied parameter is ignored as a whole";
}

TEST(Wrap, ChildrenOfASequentialAreUnitsWhereTheyAreWrapped) {
  Linear first(2, 3), second(3, 3), third(3, 1);
  UnitSequential root({{"first", first}, {"second", second}, {"third", third}});
  EXPECT_EQ(names_of(*root).size(), 1U);
  wrap_children(*root, [](const std::string& name, torch::nn::Module&) { return name != "third"; });
  EXPECT_EQ(names_of(*root), (Groups{{"", {"third.weight", "third.bias"}},
                                     {"first", {"first.weight", "first.bias"}},
                                     {"second", {"second.weight", "second.bias"}}}));
  EXPECT_EQ(groups_of(*root)[1].unit, unit_of(*first, *root));
  EXPECT_EQ(names_of(*root, {.types = {"Linear"}, .min_parameters = 10}).size(), 2U);

  // A child that somebody else calls as well does not pass the seam there: its parameters belong to who contains both.
  struct OutsideImpl : torch::nn::Module {
    explicit OutsideImpl(Linear direct, torch::nn::Sequential sequence) {
      register_module("direct", std::move(direct));
      register_module("sequence", std::move(sequence));
    }
    Tensor forward(Tensor x) { return x; }
  };
  Linear shared(2, 2);
  torch::nn::Sequential sequence(shared, Linear(2, 2));
  wrap_children(sequence);
  Unit<OutsideImpl> outside(shared, sequence);
  EXPECT_EQ(names_of(outside),
            (Groups{{"", {"direct.weight", "direct.bias"}}, {"sequence.1", {"sequence.1.weight", "sequence.1.bias"}}}));
}

TEST(Wrap, BadInputIsRefusedInOneLine) {
  Model model;
  EXPECT_EQ(
      refusal(*model, {.ignored_modules = {"blocks"}}),
      "Unit 'blocks.0' (Block) lies inside the ignored module 'blocks': ignore less, or keep it out of the wrapping by "
      "types or predicate");
  EXPECT_EQ(refusal(*model, {.ignored_modules = {"block.0"}}),
            "ignored module 'block.0' does not exist; did you mean 'blocks.0'?");
  EXPECT_EQ(refusal(*model, {.ignored_parameters = {"head.wieght"}}),
            "ignored parameter 'head.wieght' does not exist; did you mean 'head.weight'?");
  EXPECT_EQ(refusal(*model, {.ignored_parameters = {"tokenizer.table.of.merges"}}),
            "ignored parameter 'tokenizer.table.of.merges' does not exist");
  EXPECT_EQ(refusal(*model, {.types = {"Blok"}}),
            "wrapping type 'Blok' is not a Unit of this module; there are: Block, Head, Inner, Model");
  Linear linear(1, 1);
  EXPECT_EQ(refusal(*linear, {.types = {"Linear"}}), "wrapping type 'Linear' is not a Unit of this module; there are: none");
  EXPECT_EQ(refusal(*model, {.min_parameters = -1}), "wrapping min_parameters is -1; allowed: 0 and more");
  const auto any = [](const std::string&, torch::nn::Module&) { return true; };
  EXPECT_EQ(refusal(*model, {.types = {"Block"}, .predicate = any}),
            "wrapping has both a predicate and types or min_parameters, which the predicate replaces: choose one");
  EXPECT_EQ(refusal(*model, {.min_parameters = 3, .all_in_one = true}),
            "wrapping has both all_in_one and types, min_parameters or a predicate, which all_in_one replaces: choose one");
  Unmarked unmarked;
  EXPECT_EQ(refusal([&] { require_marked_root(unmarked); }),
            "the root (Unmarked) is not a Unit, so the engine is not told when it runs: declare it with BONFIRE_UNIT");
  EXPECT_EQ(refusal([&] { require_marked_root(*model); }), "nothing was refused");
}

}  // namespace
}  // namespace bonfire::wrap_test
