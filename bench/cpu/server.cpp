// How much faster does training become with more workers, with a parameter server and with an all-reduce? Units that sleep
// instead of computing, over emulated network cards: one for each rank, so that a server's card is the bottleneck that it
// is.
//
//   bench_server [--repeats 5] [--svg FILE] [--workers N] [--servers K]
//
// Ranks are threads. "Predicted" is the plan's time of a step on the clock, from the measured forward and backward times of
// a Unit in the same run and the card's time for each message. FILE gets how fast the parameter server is beside the
// all-reduce as a drawing: what was measured over what was predicted, and predictions for clusters of up to 64 workers.
// N and K measure those alone.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "bonfire/base/clock.h"
#include "bonfire/comm/world.h"
#include "bonfire/nn/unit.h"
#include "bonfire/optim/optimizer.h"
#include "bonfire/plan/server.h"
#include "bonfire/plan/step_time.h"
#include "bonfire/server/server.h"
#include "bonfire/server/worker.h"
#include "bonfire/shard/engine.h"

namespace {

using namespace bonfire;

constexpr int blocks = 6, warmup = 2;
constexpr double forward_seconds = 0.020, backward_seconds = 0.040;
constexpr std::int64_t elements = 12 * 1024;  // 48 KiB a Unit: real ranks move it in no time

// What sleeping really took, over all ranks and steps that count.
struct Slept {
  std::atomic<std::int64_t> nanoseconds{0}, times{0};

  void sleep(double seconds) {
    const auto start = now_ns();
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    nanoseconds += now_ns() - start;
    ++times;
  }
  void forget() { nanoseconds = times = 0; }
  double mean() const {
    return 1e-9 * static_cast<double>(nanoseconds) / static_cast<double>(std::max<std::int64_t>(times, 1));
  }
};

struct Costs {
  Slept forward, backward;
};

struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            Costs* costs) {
    costs->forward.sleep(forward_seconds);
    context->save_for_backward({weight});
    context->saved_data["costs"] = reinterpret_cast<std::int64_t>(costs);
    return x + weight.sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    reinterpret_cast<Costs*>(context->saved_data["costs"].toInt())->backward.sleep(backward_seconds);
    return {gradients[0], at::ones_like(context->get_saved_variables()[0]), at::Tensor()};
  }
};

struct SleeperImpl : torch::nn::Module {
  explicit SleeperImpl(Costs& costs) : costs_(&costs), weight_(register_parameter("weight", at::zeros({elements}))) {}
  at::Tensor forward(at::Tensor x) { return Sleep::apply(x, weight_, costs_); }

 private:
  Costs* costs_;
  at::Tensor weight_;
};
BONFIRE_UNIT(Sleeper);

struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(Costs& costs) {
    for (int at = 0; at < blocks; ++at) sleepers_.push_back(register_module(std::to_string(at), Sleeper(costs)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : sleepers_) x = block->forward(x);
    return x.sum();
  }

 private:
  std::vector<Sleeper> sleepers_;
};
BONFIRE_UNIT(Chain);

struct Timing {
  double median = 0;
  plan::UnitCost unit{};
};

// `servers` of 0: an all-reduce.
Timing measure(int workers, int servers, const Link& link, int repeats) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  Costs costs;
  std::vector<std::vector<double>> ends(static_cast<std::size_t>(workers));
  std::vector<std::thread> threads;
  const ServerOptions options{.servers = std::max(1, servers), .link = link};
  for (int rank = 0; rank < workers + servers; ++rank)
    threads.emplace_back([&, rank] {
      World world = World::from_store(store, rank, workers + servers);
      if (rank < servers) {
        Server server(world, options, [](Shares& shares) { return std::make_unique<Sgd>(shares); });
        server.serve();
        return;
      }
      Chain model(costs);
      auto& mine = ends[static_cast<std::size_t>(rank - servers)];
      const auto note = [&](int repeat) {
        if (repeat == -1 && rank == servers) costs.forward.forget(), costs.backward.forget();
        if (repeat >= -1) mine.push_back(1e-9 * static_cast<double>(now_ns()));
      };
      const auto input = at::zeros({1}).set_requires_grad(true);
      if (servers > 0) {
        Worker worker(world, model, options);
        for (int repeat = -warmup; repeat < repeats; ++repeat) {
          worker.backward(model->forward(input));
          worker.step();
          note(repeat);
        }
        worker.finish();
        return;
      }
      Mesh mesh = world.mesh({.replicate = workers});
      if (workers > 1) mesh = mesh.over(Axis::replicate, link);
      Engine engine = shard(mesh, model, {.buckets = {.bucket_bytes = 1, .first_bucket_bytes = 1}});
      for (int repeat = -warmup; repeat < repeats; ++repeat) {
        engine.backward(model->forward(input));
        engine.spend_gradients();
        note(repeat);
      }
    });
  for (auto& thread : threads) thread.join();
  // Of the slowest worker.
  std::vector<double> seconds;
  for (std::size_t at = 1; at < ends.front().size(); ++at) {
    double before = 0, now = 0;
    for (const auto& of : ends) before = std::max(before, of[at - 1]), now = std::max(now, of[at]);
    seconds.push_back(now - before);
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], {costs.forward.mean(), costs.backward.mean()}};
}

double seconds_of(const Link& link, double bytes) { return link.latency_seconds + bytes / link.bytes_per_second; }

double predict_served(int workers, int servers, const Link& link, const plan::UnitCost& unit, double bytes, int units) {
  plan::ServedCosts costs;
  const double share = seconds_of(link, bytes / servers);
  costs.units.assign(static_cast<std::size_t>(units),
                     {.forward = unit.forward, .backward = unit.backward, .push = share, .pull = share});
  return plan::served_step_seconds(costs, {.workers = workers, .servers = servers});
}

double predict_all_reduce(int workers, const Link& link, const plan::UnitCost& unit, double bytes, int units) {
  std::vector<plan::StepUnit> steps;
  const auto count = static_cast<std::size_t>(units);
  for (std::size_t at = 0; at < count; ++at) steps.push_back({.flat = count - 1 - at, .writes = {count - 1 - at}});
  plan::StepCosts costs{.units = std::vector<plan::UnitCost>(count, unit)};
  const double across =
      workers == 1
          ? 0
          : seconds_over(link, {CollectiveKind::all_reduce, Axis::replicate, static_cast<std::int64_t>(bytes)}, workers);
  costs.flats.assign(count, {.across = across});
  plan::DataParallel layout{.replicate = workers};
  return plan::time_of_step(steps, layout, costs).seconds;
}

// VGG16 and a transformer in fp32 on cards of data centres: so many Units of these bytes, and seconds for forward and
// backward of all of them on one worker.
struct Cluster {
  const char* name;
  int units;
  double bytes, forward, backward;
  Link link;
};

const Cluster clusters[] = {
    {"VGG16 (553 MB), 0.3 s, 10 Gbit/s", 16, 553e6, 0.1, 0.2, {50e-6, 1.25e9}},
    {"VGG16 (553 MB), 0.3 s, 100 Gbit/s", 16, 553e6, 0.1, 0.2, {10e-6, 12.5e9}},
    {"GPT-2 124M (498 MB), 1.2 s, 100 Gbit/s", 14, 498e6, 0.4, 0.8, {10e-6, 12.5e9}},
};
constexpr int cluster_workers[] = {1, 2, 4, 8, 16, 32, 64};

double cluster_seconds(const Cluster& on, int workers, int servers) {
  const plan::UnitCost unit{on.forward / on.units, on.backward / on.units};
  return servers == 0 ? predict_all_reduce(workers, on.link, unit, on.bytes / on.units, on.units)
                      : predict_served(workers, servers, on.link, unit, on.bytes / on.units, on.units);
}

// How many times as fast as the all-reduce the parameter server is, for so many workers of each server.
struct Point {
  double workers_of_server = 0, ratio = 0;
};
struct Curve {
  std::string name, colour, dashes;
  std::vector<Point> line, dots;  // predicted, measured
};

// One frame of a drawing: both axes begin at `left` and `bottom`, the ratio is linear, the workers of a server in powers of
// two.
struct Frame {
  double left, first, last;
  static constexpr double bottom = 330, width = 400, height = 260, most = 1.3;
  double x(double workers) const { return left + width * std::log2(workers / first) / std::log2(last / first); }
  static double y(double ratio) { return bottom - height * ratio / most; }
};

void draw(std::ostream& svg, const Frame& on, const std::string& title, const std::vector<Curve>& curves) {
  svg << "<text x=\"" << on.left << "\" y=\"28\" font-weight=\"bold\">" << title << "</text>\n";
  for (double workers = on.first; workers <= on.last; workers *= 2) {
    svg << "<line x1=\"" << on.x(workers) << "\" y1=\"" << on.y(0) << "\" x2=\"" << on.x(workers) << "\" y2=\""
        << on.y(on.most) << "\" stroke=\"#eee\"/><text x=\"" << on.x(workers) << "\" y=\"348\" text-anchor=\"middle\">";
    workers < 1 ? svg << "1/" << 1 / workers : svg << workers;
    svg << "</text>\n";
  }
  for (int tenths = 0; tenths <= 12; tenths += 2)
    svg << "<line x1=\"" << on.left << "\" y1=\"" << on.y(tenths / 10.0) << "\" x2=\"" << on.left + on.width << "\" y2=\""
        << on.y(tenths / 10.0) << "\" stroke=\"" << (tenths == 10 ? "#000" : "#eee") << "\"/><text x=\"" << on.left - 8
        << "\" y=\"" << on.y(tenths / 10.0) + 4 << "\" text-anchor=\"end\">" << tenths / 10.0 << "</text>\n";
  svg << "<text x=\"" << on.left + on.width / 2
      << "\" y=\"370\" text-anchor=\"middle\">workers of each server (n/K)</text>\n";
  double label = 396;
  for (const auto& curve : curves) {
    svg << "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" << curve.colour << "\" stroke-dasharray=\"" << curve.dashes
        << "\" points=\"";
    for (const auto& at : curve.line) svg << on.x(at.workers_of_server) << ',' << on.y(at.ratio) << ' ';
    svg << "\"/>\n";
    for (const auto& at : curve.dots)
      svg << "<circle r=\"4\" cx=\"" << on.x(at.workers_of_server) << "\" cy=\"" << on.y(at.ratio) << "\" fill=\""
          << curve.colour << "\"/>\n";
    svg << "<line x1=\"" << on.left << "\" y1=\"" << label - 4 << "\" x2=\"" << on.left + 30 << "\" y2=\"" << label - 4
        << "\" stroke-width=\"2\" stroke=\"" << curve.colour << "\" stroke-dasharray=\"" << curve.dashes << "\"/><text x=\""
        << on.left + 38 << "\" y=\"" << label << "\">" << curve.name << "</text>\n";
    label += 18;
  }
}

void draw(const std::string& file, const std::vector<Curve>& measured) {
  std::vector<Curve> predicted;
  const char* const colours[] = {"#d33", "#e90", "#36c"};
  for (const bool slow : {true, false})
    for (const int servers : {1, 4, 16}) {
      const auto& on = clusters[slow ? 0 : 1];
      auto& curve = predicted.emplace_back();
      curve.name = std::to_string(servers) + (servers == 1 ? " server, " : " servers, ") + (slow ? "10" : "100") + " Gbit/s";
      curve.colour = colours[servers == 1 ? 0 : servers == 4 ? 1 : 2];
      curve.dashes = slow ? "" : "6 4";
      for (const int workers : cluster_workers)
        curve.line.push_back(
            {1.0 * workers / servers, cluster_seconds(on, workers, 0) / cluster_seconds(on, workers, servers)});
    }
  std::ofstream svg(file);
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 500\" font-family=\"sans-serif\" font-size=\"13\">\n"
      << "<rect width=\"960\" height=\"500\" fill=\"white\"/>\n<text x=\"50\" y=\"52\">speed / speed of the "
         "all-reduce</text>\n";
  draw(svg, {50, 0.5, 8}, "Synthetic Units: predicted (lines) and measured (dots)", measured);
  draw(svg, {530, 1.0 / 16, 64}, "VGG16, predicted", predicted);
  svg << "</svg>\n";
}

}  // namespace

int main(int argc, char** argv) {
  int repeats = 5, only_workers = 0, only_servers = 0;
  std::string svg;
  for (int at = 1; at + 1 < argc; ++at) {
    if (std::strcmp(argv[at], "--repeats") == 0) repeats = std::max(1, std::atoi(argv[at + 1]));
    if (std::strcmp(argv[at], "--svg") == 0) svg = argv[at + 1];
    if (std::strcmp(argv[at], "--workers") == 0) only_workers = std::atoi(argv[at + 1]);
    if (std::strcmp(argv[at], "--servers") == 0) only_servers = std::atoi(argv[at + 1]);
  }
  at::set_num_threads(1);

  const double bytes = elements * 4;
  std::printf(
      "%d synthetic Units that sleep for %.0f ms in forward and %.0f ms in backward. Every rank has a card that takes the "
      "given time for the weights of one Unit in each direction. Median step of %d, of the slowest worker; speed-up: "
      "workers "
      "x the Units' own time / step.\n\n",
      blocks, forward_seconds * 1e3, backward_seconds * 1e3, repeats);
  std::printf(
      "| a Unit on the card | workers | servers | step | speed-up | predicted | difference | all-reduce | speed-up | "
      "predicted "
      "| difference |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
  double worst = 0;
  std::vector<Curve> curves;
  for (const double unit_seconds : {0.008, 0.016})
    for (const int servers : {1, 2}) {
      auto& curve = curves.emplace_back();
      curve.name = std::to_string(servers) + (servers == 1 ? " server, " : " servers, ") +
                   std::to_string(static_cast<int>(unit_seconds * 1e3)) + " ms for a Unit on the card";
      curve.colour = servers == 1 ? "#d33" : "#e90";
      curve.dashes = unit_seconds < 0.01 ? "6 4" : "";
      for (const int workers : {1, 2, 4, 8}) {
        if ((only_workers > 0 && workers != only_workers) || (only_servers > 0 && servers != only_servers)) continue;
        const Link link{0, bytes / unit_seconds};
        const auto served = measure(workers, servers, link, repeats), reduced = measure(workers, 0, link, repeats);
        const double expected = predict_served(workers, servers, link, served.unit, bytes, blocks);
        const double expected_reduced = predict_all_reduce(workers, link, reduced.unit, bytes, blocks);
        const double alone = blocks * (served.unit.forward + served.unit.backward);
        const double off = served.median / expected - 1, off_reduced = reduced.median / expected_reduced - 1;
        curve.line.push_back({1.0 * workers / servers, expected_reduced / expected});
        curve.dots.push_back({1.0 * workers / servers, reduced.median / served.median});
        worst = std::max({worst, std::abs(off), std::abs(off_reduced)});
        std::printf("| %.0f ms | %d | %d | %.1f ms | %.2f | %.1f ms | %+.1f %% | %.1f ms | %.2f | %.1f ms | %+.1f %% |\n",
                    unit_seconds * 1e3, workers, servers, served.median * 1e3, workers * alone / served.median,
                    expected * 1e3, off * 1e2, reduced.median * 1e3, workers * alone / reduced.median,
                    expected_reduced * 1e3, off_reduced * 1e2);
        std::fflush(stdout);
      }
    }
  std::printf("\nLargest difference from the prediction: %.1f %%.\n\n", worst * 1e2);

  std::printf(
      "Predicted speed-ups over one worker:\n\n| cluster | workers | all-reduce | 1 server | 4 servers | 16 servers "
      "|\n|---|---|---|---|---|---|\n");
  for (const auto& on : clusters)
    for (const int workers : cluster_workers) {
      const double alone = on.forward + on.backward;
      std::printf("| %s | %d |", on.name, workers);
      for (const int servers : {0, 1, 4, 16})
        std::printf(" %.2f |", workers * alone / cluster_seconds(on, workers, servers));
      std::printf("\n");
    }
  if (!svg.empty()) draw(svg, curves);
}
