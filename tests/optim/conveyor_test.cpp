#include "bonfire/optim/conveyor.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

namespace bonfire::conveyor_test {
namespace {

// Where everything is on the host already, a load's own tensors are handed out: nothing is copied.
TEST(Conveyor, HandsOutWhatIsAtHome) {
  std::vector<Conveyor::Load> loads;
  for (int at = 0; at < 3; ++at)
    loads.push_back(
        {at::full({4}, at, at::kFloat), at == 1 ? at::Tensor() : at::zeros({4}, at::kBFloat16), at::zeros({4}, at::kFloat)});
  Conveyor conveyor;
  for (int round = 0; round < 2; ++round) {
    conveyor.begin(loads);
    for (const auto& load : loads) {
      const auto piece = conveyor.next();
      EXPECT_TRUE(piece.in.is_same(load.in));
      EXPECT_TRUE(piece.out.is_same(load.out));
      conveyor.send();
      conveyor.flush();
    }
    conveyor.end();
  }
  EXPECT_EQ(loads[0].in.use_count(), 1);
}

}  // namespace
}  // namespace bonfire::conveyor_test
