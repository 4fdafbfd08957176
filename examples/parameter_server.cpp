// Data parallelism with a parameter server. Rank 0 is the server, the others are workers: start it on at least two ranks,
// such as `bonfire launch -n 3 -- parameter_server`. In synchronous mode, which is the default, the loss is that of
// data_parallel.
#include <cstdio>

#include "examples/teacher.h"

int main(int argc, char** argv) {
  return bonfire::launch(argc, argv, [](bonfire::World& world) {
    const bonfire::ServerOptions options{.servers = 1};
    if (bonfire::is_server(world, options)) {
      bonfire::Server server(world, options, [](bonfire::Shares& shares) {
        return std::make_unique<bonfire::AdamW>(shares, bonfire::AdamOptions{.lr = 1e-2});
      });
      server.serve();
      return;
    }

    constexpr std::int64_t steps = 151, batch = 64;
    const int workers = world.size() - options.servers, me = world.rank() - options.servers;
    const std::int64_t mine = batch / workers;

    auto model = example::Mlp(1);
    model->to(world.device());
    bonfire::Worker worker(world, model, options);
    for (std::int64_t step = 0; step < steps; ++step) {
      auto [x, y] = example::samples(step * batch + me * mine, mine, world.device());
      auto loss = (model->forward(x) - y).pow(2).mean();
      worker.backward(loss);             // gradients leave meanwhile
      worker.step(loss.item<double>());  // new weights arrive while the next forward begins

      if (me == 0 && step % 75 == 0)
        std::printf("step %lld  loss %.9f\n", static_cast<long long>(step), worker.report().number);
    }
  });
}
