#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"

namespace bonfire {

// Environment variables as a value, so that a test can give any.
using Variables = std::map<std::string, std::string>;
BONFIRE_API Variables process_variables();

// Who started this process.
enum class LaunchSource { none, bonfire, torchrun, slurm, open_mpi, mpich, kubeflow };
BONFIRE_API const char* name_of(LaunchSource source);

// A process's place in a run, as the one who started it says.
struct Environment {
  LaunchSource source = LaunchSource::none;
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  int node = 0;
  std::string address;     // where the ranks meet; empty: nobody said
  int port = 0;            // 0: nobody said
  int restarts = 0;        // how often the run was started again
  std::string run_id;      // the same on all ranks of a run; empty: nobody said
  std::string token;       // BONFIRE_TOKEN, the job's secret; empty: nobody said
  std::string error_file;  // where the first words of a failure belong; empty: nobody asks
  bool hosted = false;     // a store already listens at address:port: our launcher's, or torchrun's agent's
  // Kubeflow starts one process a node, which must start its own ranks: `local_size` of them on each of `nodes` nodes.
  bool launches_itself = false;
  int nodes = 1;
};

// The first of torchrun (and our own launcher, which speaks its language), Slurm, Open MPI, MPICH, Kubeflow that the
// variables tell of. Throws ConfigError that names the variable and its value where they contradict each other.
BONFIRE_API Environment resolve_environment(const Variables& variables);

// BONFIRE_RANKS: how many ranks to start on this machine where nobody else has started any; nothing where it is not set.
// Throws ConfigError.
BONFIRE_API std::optional<int> asked_ranks(const Variables& variables);

// Slurm's short form of a list of hosts: "a[5-9,12]", "a,b", "rack[1-2]n[01-03]". Throws ConfigError.
BONFIRE_API std::vector<std::string> expand_hosts(const std::string& list);

// OMP_NUM_THREADS where it is set, else this machine's cores shared between its ranks; at least 1.
BONFIRE_API int threads_per_rank(const Variables& variables, int local_size, int cores);

}  // namespace bonfire
