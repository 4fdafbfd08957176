// A training loop inside a program that is MPI's: it has its own main, its own communicators and its own launcher, and
// trains for a while in between.
//
//   mpirun -n 2 ./mpi_program
#include <cstdio>

#include <mpi.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "bonfire/bonfire.h"
#include "bonfire/comm/mpi.h"

namespace {

// Learns y = |x|^2 of points that every rank draws for itself. Returns the first and the last loss, averaged over ranks.
std::pair<double, double> train(bonfire::World& world) {
  torch::manual_seed(1);  // the same weights everywhere
  torch::nn::Sequential model(torch::nn::Linear(4, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  auto engine = bonfire::shard(world.mesh({.replicate = world.size()}), model);
  auto optimizer = bonfire::AdamW(engine, {.lr = 1e-2});

  torch::manual_seed(100 + world.rank());  // other points everywhere
  double first = 0, last = 0;
  for (int step = 0; step < 100; ++step) {
    const auto x = torch::rand({64, 4});
    const auto y = x.square().sum(1, true);
    const auto loss = torch::nn::functional::mse_loss(model->forward(x), y);
    engine.backward(loss);
    optimizer.step();
    last = world.group().sum(loss.item<double>()) / world.size();
    if (step == 0) first = last;
  }
  return {first, last};
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  {
    bonfire::World world = bonfire::world_from_mpi(MPI_COMM_WORLD);
    const auto [first, last] = train(world);
    if (rank == 0) std::printf("%d ranks: loss %.4f -> %.4f\n", world.size(), first, last);
  }
  // MPI goes on as if nothing had happened.
  int ranks = 1, sum = 0;
  MPI_Reduce(&ranks, &sum, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank == 0) std::printf("MPI counts %d\n", sum);
  MPI_Finalize();
}
