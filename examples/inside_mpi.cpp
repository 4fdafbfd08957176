// Training inside an existing MPI program, which has its own main, assigns the ranks, and continues after training. MPI is
// used only to exchange an address and a token; gradients go over Bonfire's own connections.
//   mpirun -n 2 inside_mpi
#include <mpi.h>

#include <cstdio>

#include <bonfire/comm/mpi.h>

#include "examples/teacher.h"

namespace {

double train(const bonfire::World& world) {
  constexpr std::int64_t steps = 151, batch = 64;
  const std::int64_t mine = batch / world.size();
  auto model = example::Mlp(1);
  model->to(world.device());
  auto engine = bonfire::shard(world.mesh({.replicate = world.size()}), model);
  auto optimizer = bonfire::AdamW(engine, {.lr = 1e-2});
  double last = 0;
  for (std::int64_t step = 0; step < steps; ++step) {
    auto [x, y] = example::samples(step * batch + world.rank() * mine, mine, world.device());
    auto loss = (model->forward(x) - y).pow(2).mean();
    engine.backward(loss);
    optimizer.step();
    last = loss.item<double>();
    const double mean = world.group().sum(last) / world.size();
    if (world.rank() == 0 && step % 75 == 0) std::printf("step %lld  loss %.9f\n", static_cast<long long>(step), mean);
  }
  return last;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const double mine = train(bonfire::world_from_mpi(MPI_COMM_WORLD));

  // MPI still works as before.
  double worst = 0;
  int rank = 0;
  MPI_Reduce(&mine, &worst, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0) std::printf("largest loss of a rank: %.6f\n", worst);
  MPI_Finalize();
}
