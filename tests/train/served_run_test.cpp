// What a run with parameter servers works out before anything is sent.
#include "bonfire/train/served_run.h"

#include <gtest/gtest.h>

namespace bonfire::served_run_test {
namespace {

// Every worker of a node gets a place of its own there, from 0 on, and servers none.
TEST(ServedRun, WorkersOfANodeTakeItsFirstPlaces) {
  for (const int nodes : {1, 2, 3})
    for (const int ranks_of_node : {1, 2, 8})
      for (int servers = 1; servers < nodes * ranks_of_node; ++servers) {
        int workers = 0;
        for (int node = 0; node < nodes; ++node) {
          int next = 0;
          for (int local = 0; local < ranks_of_node; ++local) {
            const int rank = node * ranks_of_node + local;
            if (rank < servers) continue;
            EXPECT_EQ(place_among_workers(rank, local, servers), next++)
                << nodes << " nodes of " << ranks_of_node << ", " << servers << " servers, rank " << rank;
            ++workers;
          }
        }
        EXPECT_EQ(workers, nodes * ranks_of_node - servers);
      }
}

}  // namespace
}  // namespace bonfire::served_run_test
