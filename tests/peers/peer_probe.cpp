// Does one thing of Bonfire's, for a test in Python to look at with somebody else's software.
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bonfire/base/error.h"
#include "bonfire/comm/join.h"
#include "bonfire/train/tensorboard.h"
#include "tests/peers/probes.h"

namespace bonfire::peers {

void write_events(const Arguments& arguments) {
  EventWriter writer(arguments.at(0));
  for (int step = 1; step <= 100; ++step) writer.scalars(step, {{"loss", 8.0 / step}, {"lr", 1e-3 * step}});
}

void join_world(const Arguments&) {
  const World world = world_from_environment();
  std::printf("rank %d of %d: local rank %d, sum %g\n", world.rank(), world.size(), world.local_rank(),
              world.group().sum(world.rank()));
}

}  // namespace bonfire::peers

int main(int argc, char** argv) {
  using namespace bonfire::peers;
  const std::map<std::string, std::function<void(const Arguments&)>> probes{
      {"events", write_events}, {"model", dump_model}, {"train", train_model}, {"world", join_world}};
  const Arguments arguments(argv + 1, argv + argc);
  const auto probe = arguments.empty() ? probes.end() : probes.find(arguments[0]);
  if (probe == probes.end()) {
    std::fputs("peer_probe PROBE ARGUMENTS...\n", stderr);
    return 2;
  }
  try {
    probe->second({arguments.begin() + 1, arguments.end()});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
