#include "bonfire/comm/environment.h"

#include <set>

#include <gtest/gtest.h>

#include "bonfire/base/error.h"

namespace bonfire::environment_test {
namespace {

using Hosts = std::vector<std::string>;

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"GROUP_RANK", "1"},
                             {"MASTER_ADDR", "node0"},
                             {"MASTER_PORT", "29400"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"},
                             {"TORCHELASTIC_RUN_ID", "job7"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                             {"TORCHELASTIC_ERROR_FILE", "/tmp/e.json"}};

const Variables kSlurm = {{"SLURM_PROCID", "5"},          {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "1"},
                          {"SLURM_NTASKS_PER_NODE", "4"}, {"SLURM_NODEID", "1"}, {"SLURM_JOB_NODELIST", "gpu[07-08]"},
                          {"SLURM_JOB_ID", "1234567"}};

const Variables kOpenMpi = {
    {"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}, {"MASTER_PORT", "29500"},      {"PMIX_NAMESPACE", "12345"}};

const Variables kMpich = {{"PMI_RANK", "3"},        {"PMI_SIZE", "4"},        {"MPI_LOCALRANKID", "1"},
                          {"MPI_LOCALNRANKS", "2"}, {"MASTER_ADDR", "hostA"}, {"MASTER_PORT", "29500"}};

const Variables kKubeflow = {{"PET_NNODES", "3"},
                             {"PET_NPROC_PER_NODE", "2"},
                             {"PET_NODE_RANK", "1"},
                             {"PET_MASTER_ADDR", "job-node-0-0.job"},
                             {"PET_MASTER_PORT", "29400"}};

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

Variables both(Variables a, const Variables& b) {
  for (const auto& [name, value] : b) a[name] = value;
  return a;
}

std::string refusal(const Variables& variables) {
  try {
    resolve_environment(variables);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Environment, NothingMeansAlone) {
  const Environment alone = resolve_environment({});
  EXPECT_EQ(alone.source, LaunchSource::none);
  EXPECT_EQ(alone.size, 1);
  EXPECT_EQ(alone.rank, 0);
}

TEST(Environment, Torchrun) {
  const Environment at = resolve_environment(kTorchrun);
  EXPECT_EQ(at.source, LaunchSource::torchrun);
  EXPECT_EQ(at.rank, 5);
  EXPECT_EQ(at.size, 8);
  EXPECT_EQ(at.local_rank, 1);
  EXPECT_EQ(at.local_size, 4);
  EXPECT_EQ(at.node, 1);
  EXPECT_EQ(at.address, "node0");
  EXPECT_EQ(at.port, 29400);
  EXPECT_EQ(at.restarts, 2);
  EXPECT_EQ(at.run_id, "job7");
  EXPECT_EQ(at.error_file, "/tmp/e.json");
  EXPECT_TRUE(at.hosted);
  EXPECT_FALSE(resolve_environment(without(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE")).hosted);
}

TEST(Environment, OurLauncherSpeaksTorchrun) {
  const Environment at = resolve_environment(both(kTorchrun, {{"BONFIRE_LAUNCHER", "1"}, {"BONFIRE_TOKEN", "secret"}}));
  EXPECT_EQ(at.source, LaunchSource::bonfire);
  EXPECT_EQ(at.token, "secret");
  EXPECT_TRUE(at.hosted);
}

TEST(Environment, Slurm) {
  const Environment at = resolve_environment(kSlurm);
  EXPECT_EQ(at.source, LaunchSource::slurm);
  EXPECT_EQ(at.rank, 5);
  EXPECT_EQ(at.size, 8);
  EXPECT_EQ(at.local_rank, 1);
  EXPECT_EQ(at.local_size, 4);
  EXPECT_EQ(at.node, 1);
  EXPECT_EQ(at.address, "gpu07");
  EXPECT_EQ(resolve_environment(with(kSlurm, "SLURM_JOB_ID", "42")).port, 15000 + 42 * 1009 % 17000);
  EXPECT_EQ(resolve_environment(with(kSlurm, "MASTER_PORT", "7000")).port, 7000);
}

// Steps of one job may run at the same time, each on a part of its nodes.
TEST(Environment, StepsOfASlurmJobMeetApart) {
  const Variables step = both(kSlurm, {{"SLURM_STEP_NODELIST", "gpu[09-10]"}, {"SLURM_STEP_ID", "2"}});
  EXPECT_EQ(resolve_environment(step).address, "gpu09");
  const auto port = [&](const std::string& job, const std::string& number) {
    return resolve_environment(with(with(step, "SLURM_JOB_ID", job), "SLURM_STEP_ID", number)).port;
  };
  // No two of them, be they of one job or of one that runs beside it.
  std::set<int> ports;
  for (int number = 0; number < 50; ++number)
    for (const char* job : {"1234567", "1000", "2000", "1001", "11234567"}) ports.insert(port(job, std::to_string(number)));
  EXPECT_EQ(ports.size(), 5u * 50);
  EXPECT_GE(*ports.begin(), 15000);
  EXPECT_LT(*ports.rbegin(), 32000);
  // Slurm's own numbers: a batch script.
  EXPECT_EQ(port("1234567", "4294967291"), resolve_environment(kSlurm).port);
  EXPECT_GE(port("18446744073709551615", "0"), 15000);
}

TEST(Environment, SlurmCountsTasksOfThisNode) {
  Variables uneven = without(kSlurm, "SLURM_NTASKS_PER_NODE");
  uneven["SLURM_TASKS_PER_NODE"] = "3(x2),2";
  EXPECT_EQ(resolve_environment(uneven).local_size, 3);
  EXPECT_EQ(resolve_environment(with(uneven, "SLURM_NODEID", "2")).local_size, 2);
  EXPECT_NE(refusal(with(uneven, "SLURM_NODEID", "3")).find("node 3"), std::string::npos);
  EXPECT_NE(refusal(without(uneven, "SLURM_TASKS_PER_NODE")).find("SLURM_NTASKS_PER_NODE"), std::string::npos);
}

TEST(Environment, OpenMpi) {
  const Environment at = resolve_environment(kOpenMpi);
  EXPECT_EQ(at.source, LaunchSource::open_mpi);
  EXPECT_EQ(at.rank, 1);
  EXPECT_EQ(at.local_size, 4);
  EXPECT_EQ(at.address, "127.0.0.1");
  EXPECT_EQ(at.port, 29500);
}

TEST(Environment, MpirunInsideASlurmJobIsMpi) {
  // The shell's SLURM_PROCID is 0 in every one of mpirun's processes.
  Variables inside = both(kOpenMpi, with(kSlurm, "SLURM_PROCID", "0"));
  inside.erase("MASTER_PORT");
  const Environment at = resolve_environment(inside);
  EXPECT_EQ(at.source, LaunchSource::open_mpi);
  EXPECT_EQ(at.rank, 1);
  EXPECT_EQ(at.address, "gpu07");
  EXPECT_EQ(at.port, resolve_environment(kSlurm).port);
}

TEST(Environment, Mpich) {
  const Environment at = resolve_environment(kMpich);
  EXPECT_EQ(at.source, LaunchSource::mpich);
  EXPECT_EQ(at.rank, 3);
  EXPECT_EQ(at.size, 4);
  EXPECT_EQ(at.local_rank, 1);
  EXPECT_EQ(at.local_size, 2);
  EXPECT_EQ(at.node, 1);
}

TEST(Environment, KubeflowLaunchesItself) {
  const Environment at = resolve_environment(kKubeflow);
  EXPECT_EQ(at.source, LaunchSource::kubeflow);
  EXPECT_TRUE(at.launches_itself);
  EXPECT_EQ(at.nodes, 3);
  EXPECT_EQ(at.local_size, 2);
  EXPECT_EQ(at.size, 6);
  EXPECT_EQ(at.node, 1);
  EXPECT_EQ(at.address, "job-node-0-0.job");
  EXPECT_EQ(at.port, 29400);
}

TEST(Environment, FirstInTheOrderWins) {
  Variables all = both(both(both(kKubeflow, kMpich), kSlurm), kTorchrun);
  EXPECT_EQ(resolve_environment(all).source, LaunchSource::torchrun);
  all.erase("RANK");
  EXPECT_EQ(resolve_environment(all).source, LaunchSource::slurm);
  all.erase("SLURM_PROCID");
  EXPECT_EQ(resolve_environment(both(all, kOpenMpi)).source, LaunchSource::open_mpi);
  EXPECT_EQ(resolve_environment(all).source, LaunchSource::mpich);
  all.erase("PMI_RANK");
  EXPECT_EQ(resolve_environment(all).source, LaunchSource::kubeflow);
}

TEST(Environment, RefusalsNameTheVariableAndItsValue) {
  struct Case {
    Variables variables;
    std::string name, value;
  };
  const std::vector<Case> cases = {
      {with(kTorchrun, "RANK", "8"), "RANK", "8"},
      {with(kTorchrun, "RANK", "-1"), "RANK", "-1"},
      {with(kTorchrun, "WORLD_SIZE", "eight"), "WORLD_SIZE", "eight"},
      {without(kTorchrun, "WORLD_SIZE"), "WORLD_SIZE", "RANK"},
      {with(kTorchrun, "LOCAL_RANK", "4"), "LOCAL_RANK", "4"},
      {without(kTorchrun, "MASTER_ADDR"), "MASTER_ADDR", "not set"},
      {with(kTorchrun, "MASTER_PORT", "70000"), "MASTER_PORT", "70000"},
      {with(kTorchrun, "MASTER_PORT", "29400x"), "MASTER_PORT", "29400x"},
      {with(kSlurm, "SLURM_JOB_ID", "abc"), "SLURM_JOB_ID", "abc"},
      {with(kSlurm, "SLURM_JOB_NODELIST", "gpu[1-"), "gpu[1-", "hosts"},
      {without(kOpenMpi, "MASTER_PORT"), "MASTER_PORT", "mpirun -x"},
      {with(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "2"), "MASTER_ADDR", "OMPI_COMM_WORLD_RANK"},
      {without(kMpich, "MPI_LOCALRANKID"), "MPI_LOCALRANKID", "PMI_RANK"},
      {with(kKubeflow, "PET_NNODES", "1:4"), "PET_NNODES", "1:4"},
      {with(kKubeflow, "PET_NPROC_PER_NODE", "auto"), "PET_NPROC_PER_NODE", "auto"},
      {without(kKubeflow, "PET_MASTER_PORT"), "PET_MASTER_PORT", "PET_NNODES"},
  };
  for (const Case& bad : cases) {
    const std::string message = refusal(bad.variables);
    EXPECT_NE(message.find(bad.name), std::string::npos) << bad.name << ": " << message;
    EXPECT_NE(message.find(bad.value), std::string::npos) << bad.name << ": " << message;
  }
}

TEST(Hosts, Expand) {
  EXPECT_EQ(expand_hosts("a"), (Hosts{"a"}));
  EXPECT_EQ(expand_hosts("a,b"), (Hosts{"a", "b"}));
  EXPECT_EQ(expand_hosts("a[5-9,12]"), (Hosts{"a5", "a6", "a7", "a8", "a9", "a12"}));
  EXPECT_EQ(expand_hosts("n[08-10]-ib,login"), (Hosts{"n08-ib", "n09-ib", "n10-ib", "login"}));
  EXPECT_EQ(expand_hosts("r[1-2]n[01,03]"), (Hosts{"r1n01", "r1n03", "r2n01", "r2n03"}));
}

TEST(Hosts, Refuse) {
  for (const char* bad :
       {"", ",", "a,", "a[", "a]", "a[]", "a[9-5]", "a[1-2", "a[[1]]", "a[x]", "a[1-99999999999]", "a[0-999999999]"})
    EXPECT_THROW(expand_hosts(bad), ConfigError) << bad;
}

TEST(Threads, ShareTheCoresUnlessTold) {
  EXPECT_EQ(threads_per_rank({}, 2, 8), 4);
  EXPECT_EQ(threads_per_rank({}, 16, 8), 1);
  EXPECT_EQ(threads_per_rank({{"OMP_NUM_THREADS", "3"}}, 2, 8), 3);
  EXPECT_EQ(threads_per_rank({{"OMP_NUM_THREADS", "4,2"}}, 2, 8), 4);
  EXPECT_THROW(threads_per_rank({{"OMP_NUM_THREADS", "many"}}, 2, 8), ConfigError);
}

}  // namespace
}  // namespace bonfire::environment_test
