#include "bonfire/comm/environment.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "bonfire/base/error.h"

extern char** environ;

namespace bonfire {
namespace {

constexpr std::size_t kMostHosts = 1 << 20;

// Reads variables by name and complains by name.
class Reader {
 public:
  explicit Reader(const Variables& variables) : variables_(variables) {}

  bool has(const std::string& name) const { return variables_.contains(name) && !variables_.at(name).empty(); }
  std::string text(const std::string& name) const { return has(name) ? variables_.at(name) : std::string(); }

  // An integer in [least, most].
  int number(const std::string& name, int least, int most) const {
    if (!has(name)) fail_config("{} is not set, but {} is: a number from {} to {} is needed", name, trigger_, least, most);
    const std::string& value = variables_.at(name);
    int number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size() || number < least || number > most)
      fail_config("{} is '{}': a number from {} to {} is needed", name, value, least, most);
    return number;
  }

  int number_or(const std::string& name, int least, int most, int otherwise) const {
    return has(name) ? number(name, least, most) : otherwise;
  }

  // The variable by which its launcher was recognised, for messages.
  void recognised_by(std::string name) { trigger_ = std::move(name); }

 private:
  const Variables& variables_;
  std::string trigger_;
};

constexpr int kMostRanks = 1 << 20;

void read_place(const Reader& reader, Environment& environment, const std::string& rank, const std::string& size) {
  environment.size = reader.number(size, 1, kMostRanks);
  environment.rank = reader.number(rank, 0, environment.size - 1);
}

void read_local_place(const Reader& reader, Environment& environment, const std::string& rank, const std::string& size) {
  environment.local_size = reader.number(size, 1, environment.size);
  environment.local_rank = reader.number(rank, 0, environment.local_size - 1);
}

// The user's own words about where to meet win over what a launcher implies.
void read_meeting_place(const Reader& reader, Environment& environment) {
  if (reader.has("MASTER_ADDR")) environment.address = reader.text("MASTER_ADDR");
  environment.port = reader.number_or("MASTER_PORT", 1, 65535, environment.port);
}

Environment from_torchrun(Reader& reader) {
  Environment environment;
  reader.recognised_by("RANK");
  environment.source = LaunchSource::torchrun;
  read_place(reader, environment, "RANK", "WORLD_SIZE");
  read_local_place(reader, environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  environment.node = reader.number_or("GROUP_RANK", 0, kMostRanks, environment.rank / environment.local_size);
  environment.address = reader.text("MASTER_ADDR");
  if (environment.address.empty())
    fail_config("MASTER_ADDR is not set, but RANK is: the host where rank 0 listens is needed");
  environment.port = reader.number("MASTER_PORT", 1, 65535);
  environment.restarts = reader.number_or("TORCHELASTIC_RESTART_COUNT", 0, kMostRanks, 0);
  environment.run_id = reader.text("TORCHELASTIC_RUN_ID");
  environment.hosted = reader.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  environment.error_file = reader.text("TORCHELASTIC_ERROR_FILE");
  if (reader.has("BONFIRE_LAUNCHER")) {
    environment.source = LaunchSource::bonfire;
    environment.hosted = true;
  }
  return environment;
}

// "4(x2),3": four tasks on each of the first two nodes, three on the third.
int tasks_on_node(const std::string& name, const std::string& value, int node) {
  int first = 0;
  std::size_t at = 0;
  const auto read = [&] {
    int number = 0;
    const auto [end, error] = std::from_chars(value.data() + at, value.data() + value.size(), number);
    if (error != std::errc() || number < 1) fail_config("{} is '{}': tasks such as '4(x2),3' are needed", name, value);
    at = static_cast<std::size_t>(end - value.data());
    return number;
  };
  while (at < value.size()) {
    const int tasks = read();
    int repeat = 1;
    if (value.compare(at, 2, "(x") == 0) {
      at += 2;
      repeat = read();
      if (at >= value.size() || value[at] != ')') fail_config("{} is '{}': tasks such as '4(x2),3' are needed", name, value);
      ++at;
    }
    if (node < first + repeat) return tasks;
    first += repeat;
    if (at < value.size() && value[at] != ',') fail_config("{} is '{}': tasks such as '4(x2),3' are needed", name, value);
    ++at;
  }
  fail_config("{} is '{}', which says nothing of node {}", name, value, node);
}

bool is_number(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// The number, whose remainder is all that counts here, however many digits it has.
std::int64_t rest_of_number(const std::string& digits, std::int64_t divisor) {
  std::int64_t rest = 0;
  for (const char digit : digits) rest = (rest * 10 + (digit - '0')) % divisor;
  return rest;
}

// Jobs that share a node differ in their numbers, and steps of one job that run at the same time in theirs: of one job, the
// steps' ports are one after the other; jobs begin far from each other. Below the ports that the system gives away itself.
// `step`: empty where whoever asks is none; Slurm gives the batch script and others of its own numbers beyond all steps.
int slurm_port(const Reader& reader, const std::string& step) {
  const std::string job = reader.text("SLURM_JOB_ID");
  if (!is_number(job)) fail_config("SLURM_JOB_ID is '{}': a number is needed, or MASTER_PORT", job);
  constexpr std::int64_t first = 15000, ports = 17000, apart = 1009;  // a prime, so that jobs in a row take all ports
  const std::int64_t number = is_number(step) && step.size() < 9 ? rest_of_number(step, ports) : 0;
  return static_cast<int>(first + (rest_of_number(job, ports) * apart + number) % ports);
}

void read_slurm_meeting_place(const Reader& reader, Environment& environment, bool as_step) {
  std::string list = as_step ? reader.text("SLURM_STEP_NODELIST") : "";
  if (list.empty()) list = reader.text("SLURM_JOB_NODELIST");
  if (!list.empty()) environment.address = expand_hosts(list).front();
  if (!reader.has("MASTER_PORT")) environment.port = slurm_port(reader, as_step ? reader.text("SLURM_STEP_ID") : "");
}

Environment from_slurm(Reader& reader) {
  Environment environment;
  reader.recognised_by("SLURM_PROCID");
  environment.source = LaunchSource::slurm;
  read_place(reader, environment, "SLURM_PROCID", "SLURM_NTASKS");
  environment.node = reader.number_or("SLURM_NODEID", 0, kMostRanks, 0);
  // What Slurm counted for this step is exact; what the user asked for per node may be of the whole job.
  environment.local_size = 0;
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    if (!reader.has(name)) continue;
    environment.local_size = std::string(name) == "SLURM_NTASKS_PER_NODE"
                                 ? reader.number(name, 1, kMostRanks)
                                 : tasks_on_node(name, reader.text(name), environment.node);
    break;
  }
  if (environment.local_size == 0)
    fail_config("SLURM_NTASKS_PER_NODE is not set, but SLURM_PROCID is: start with srun --ntasks-per-node");
  environment.local_size = std::min(environment.local_size, environment.size);
  environment.local_rank = reader.number("SLURM_LOCALID", 0, environment.local_size - 1);
  read_slurm_meeting_place(reader, environment, /*as_step=*/true);
  read_meeting_place(reader, environment);
  if (environment.address.empty()) fail_config("SLURM_JOB_NODELIST is not set, but SLURM_PROCID is: set it, or MASTER_ADDR");
  environment.restarts = reader.number_or("SLURM_RESTART_COUNT", 0, kMostRanks, 0);
  environment.run_id = reader.text("SLURM_JOB_ID");
  if (reader.has("SLURM_STEP_ID")) environment.run_id += "." + reader.text("SLURM_STEP_ID");
  return environment;
}

// The two families of MPI tell the same four numbers by other names, and not where to meet.
struct MpiNames {
  LaunchSource source;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  const char* how;
};

constexpr MpiNames kOpenMpi = {LaunchSource::open_mpi,       "OMPI_COMM_WORLD_RANK",       "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "mpirun -x MASTER_PORT=29500"};
constexpr MpiNames kMpich = {LaunchSource::mpich, "PMI_RANK",        "PMI_SIZE",
                             "MPI_LOCALRANKID",   "MPI_LOCALNRANKS", "mpiexec -genv MASTER_PORT 29500"};

Environment from_mpi(Reader& reader, const MpiNames& names) {
  Environment environment;
  reader.recognised_by(names.rank);
  environment.source = names.source;
  read_place(reader, environment, names.rank, names.size);
  read_local_place(reader, environment, names.local_rank, names.local_size);
  environment.node = environment.rank / environment.local_size;
  if (environment.local_size == environment.size) environment.address = "127.0.0.1";
  // mpirun inside a Slurm job: the nodes and the port are known from there.
  if (reader.has("SLURM_JOB_ID")) read_slurm_meeting_place(reader, environment, /*as_step=*/false);
  read_meeting_place(reader, environment);
  if (environment.size > 1 && environment.address.empty())
    fail_config("MASTER_ADDR is not set, but {} is '{}': name the host of rank 0, which MPI does not tell", names.rank,
                environment.rank);
  if (environment.size > 1 && environment.port == 0)
    fail_config("MASTER_PORT is not set, but {} is '{}': give a port that is free on rank 0's host, as in {}", names.rank,
                environment.rank, names.how);
  environment.run_id = reader.text("PMIX_NAMESPACE");
  return environment;
}

Environment from_kubeflow(Reader& reader) {
  Environment environment;
  reader.recognised_by("PET_NNODES");
  environment.source = LaunchSource::kubeflow;
  environment.launches_itself = true;
  environment.nodes = reader.number("PET_NNODES", 1, kMostRanks);
  const std::string ranks = reader.text("PET_NPROC_PER_NODE");
  if (ranks == "cpu" || ranks == "auto" || ranks == "gpu")
    fail_config("PET_NPROC_PER_NODE is '{}': a number of ranks is needed", ranks);
  environment.local_size = reader.number_or("PET_NPROC_PER_NODE", 1, kMostRanks, 1);
  environment.size = environment.nodes * environment.local_size;
  environment.node = environment.nodes == 1 ? reader.number_or("PET_NODE_RANK", 0, 0, 0)
                                            : reader.number("PET_NODE_RANK", 0, environment.nodes - 1);
  environment.rank = environment.node * environment.local_size;
  environment.address = reader.text("PET_MASTER_ADDR");
  environment.port = reader.number_or("PET_MASTER_PORT", 1, 65535, 0);
  if (environment.nodes > 1) {
    if (environment.address.empty()) fail_config("PET_MASTER_ADDR is not set, but PET_NNODES is '{}'", environment.nodes);
    if (environment.port == 0) fail_config("PET_MASTER_PORT is not set, but PET_NNODES is '{}'", environment.nodes);
  }
  environment.run_id = reader.text("PET_RDZV_ID");
  return environment;
}

// In an allocation of Slurm, mpirun's processes inherit SLURM_PROCID from the shell that called it.
bool mpirun_inside_slurm(const Reader& reader) {
  return reader.has("OMPI_COMM_WORLD_RANK") && (reader.text("OMPI_COMM_WORLD_RANK") != reader.text("SLURM_PROCID") ||
                                                reader.text("OMPI_COMM_WORLD_SIZE") != reader.text("SLURM_NTASKS"));
}

Environment recognise(const Variables& variables) {
  Reader reader(variables);
  if (reader.has("RANK")) return from_torchrun(reader);
  if (reader.has("SLURM_PROCID") && reader.has("SLURM_NTASKS") && !mpirun_inside_slurm(reader)) return from_slurm(reader);
  if (reader.has("OMPI_COMM_WORLD_RANK")) return from_mpi(reader, kOpenMpi);
  if (reader.has("PMI_RANK")) return from_mpi(reader, kMpich);
  if (reader.has("PET_NNODES")) return from_kubeflow(reader);
  return {};
}

}  // namespace

Variables process_variables() {
  Variables variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::size_t equals = text.find('=');
    if (equals != std::string::npos) variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  return variables;
}

const char* name_of(LaunchSource source) {
  switch (source) {
    case LaunchSource::none: return "none";
    case LaunchSource::bonfire: return "bonfire launch";
    case LaunchSource::torchrun: return "torchrun";
    case LaunchSource::slurm: return "Slurm";
    case LaunchSource::open_mpi: return "Open MPI";
    case LaunchSource::mpich: return "MPICH";
    case LaunchSource::kubeflow: return "Kubeflow";
  }
  return "?";
}

Environment resolve_environment(const Variables& variables) {
  Environment environment = recognise(variables);
  const Reader reader(variables);
  environment.token = reader.text("BONFIRE_TOKEN");
  if (reader.has("BONFIRE_ERROR_FILE")) environment.error_file = reader.text("BONFIRE_ERROR_FILE");
  return environment;
}

std::optional<int> asked_ranks(const Variables& variables) {
  const Reader reader(variables);
  if (!reader.has("BONFIRE_RANKS")) return std::nullopt;
  return reader.number("BONFIRE_RANKS", 1, 4096);
}

namespace {

[[noreturn]] void fail_hosts(const std::string& list) {
  fail_config("'{}' is not a list of hosts such as 'a[5-9,12]' or 'a,b'", list);
}

// "5-9,12" with the zeros of the first number kept.
std::vector<std::string> expand_range(const std::string& list, const std::string& range) {
  std::vector<std::string> numbers;
  std::size_t at = 0;
  while (at <= range.size()) {
    const std::size_t comma = std::min(range.find(',', at), range.size());
    const std::string part = range.substr(at, comma - at);
    const std::size_t dash = part.find('-');
    const std::string low = part.substr(0, dash);
    const std::string high = dash == std::string::npos ? low : part.substr(dash + 1);
    const auto digits = [](const std::string& text) {
      return !text.empty() && text.size() <= 9 &&
             std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
    };
    if (!digits(low) || !digits(high) || std::stoi(low) > std::stoi(high)) fail_hosts(list);
    if (static_cast<std::size_t>(std::stoi(high) - std::stoi(low)) >= kMostHosts) fail_hosts(list);
    for (int number = std::stoi(low); number <= std::stoi(high); ++number)
      numbers.push_back(fmt::format("{:0{}}", number, low.size()));
    at = comma + 1;
  }
  return numbers;
}

// One comma-separated piece, whose brackets multiply: "rack[1-2]n[01-03]".
std::vector<std::string> expand_piece(const std::string& list, const std::string& piece) {
  std::vector<std::string> hosts = {""};
  std::size_t at = 0;
  while (at < piece.size()) {
    if (piece[at] != '[') {
      const std::size_t bracket = std::min(piece.find('[', at), piece.size());
      for (std::string& host : hosts) host += piece.substr(at, bracket - at);
      at = bracket;
      continue;
    }
    const std::size_t close = piece.find(']', at);
    if (close == std::string::npos) fail_hosts(list);
    const std::vector<std::string> numbers = expand_range(list, piece.substr(at + 1, close - at - 1));
    if (hosts.size() * numbers.size() > kMostHosts) fail_hosts(list);
    std::vector<std::string> longer;
    for (const std::string& host : hosts)
      for (const std::string& number : numbers) longer.push_back(host + number);
    hosts = std::move(longer);
    at = close + 1;
  }
  return hosts;
}

}  // namespace

std::vector<std::string> expand_hosts(const std::string& list) {
  std::vector<std::string> hosts;
  std::string piece;
  int depth = 0;
  const auto finish_piece = [&] {
    if (piece.empty() || depth != 0) fail_hosts(list);
    for (std::string& host : expand_piece(list, piece)) hosts.push_back(std::move(host));
    piece.clear();
  };
  for (const char c : list) {
    if (c == ',' && depth == 0) {
      finish_piece();
      continue;
    }
    if (c == '[') ++depth;
    if (c == ']') --depth;
    if (depth < 0 || depth > 1) fail_hosts(list);
    piece += c;
  }
  finish_piece();
  return hosts;
}

int threads_per_rank(const Variables& variables, int local_size, int cores) {
  const Reader reader(variables);
  // OpenMP allows a list, one number for each level of nesting: the first one counts here.
  if (reader.has("OMP_NUM_THREADS")) {
    const std::string value = reader.text("OMP_NUM_THREADS");
    const Variables first = {{"OMP_NUM_THREADS", value.substr(0, value.find(','))}};
    return Reader(first).number("OMP_NUM_THREADS", 1, 1 << 16);
  }
  return std::max(1, cores / std::max(1, local_size));
}

}  // namespace bonfire
