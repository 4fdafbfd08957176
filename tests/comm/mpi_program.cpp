// A World over a communicator that is not MPI_COMM_WORLD and numbers its ranks the other way round.
#include <cstdio>

#include "bonfire/comm/mpi.h"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm reversed;
  MPI_Comm_split(MPI_COMM_WORLD, 0, size - rank, &reversed);
  {
    const bonfire::World world = bonfire::world_from_mpi(reversed);
    MPI_Comm_free(&reversed);  // it is not kept
    std::printf("MPI's %d is rank %d of %d, local %d of %d, node %d, sum %g\n", rank, world.rank(), world.size(),
                world.local_rank(), world.local_size(), world.node(), world.group().sum(1));
  }
  MPI_Finalize();
}
