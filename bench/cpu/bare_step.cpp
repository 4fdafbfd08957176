// The steps of bench/small_llama.toml as a bare loop: the same module, forward, backward, clipping and AdamW, and nothing
// else. No engine, no ranks, no loader, no metrics: what `bonfire bench step --ranks 1` takes longer than this is overhead.
//
//   bench_bare_step [--steps 20]       prints one JSON object, as `bonfire bench step --json` does
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <ATen/ATen.h>

#include "bench/cpu/small_llama.h"
#include "bonfire/base/clock.h"
#include "bonfire/kernels/optimizer.h"
#include "bonfire/kernels/sum_of_squares.h"
#include "bonfire/models/model.h"

int main(int argc, char** argv) {
  using namespace bonfire;
  int steps = 20;
  for (int at = 1; at + 1 < argc; ++at)
    if (std::strcmp(argv[at], "--steps") == 0) steps = std::max(1, std::atoi(argv[at + 1]));
  constexpr std::int64_t batch = 8;
  const auto spec = bench::small_llama();
  const std::int64_t sequence = spec.positions, vocab = spec.vocab;

  auto model = build_model(spec, {.seed = 1});
  std::vector<AdamBuffers> buffers;
  for (const auto& parameter : model->parameters())
    buffers.push_back({.parameters = parameter.detach().view(-1),
                       .exp_avg = at::zeros({parameter.numel()}),
                       .exp_avg_sq = at::zeros({parameter.numel()})});

  std::vector<double> seconds;
  for (int step = 0; step <= steps; ++step) {
    const auto tokens = at::randint(vocab, {batch, sequence + 1}, at::kLong);
    const auto start = now_ns();
    for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
    model->loss(tokens.narrow(1, 0, sequence).contiguous(), tokens.narrow(1, 1, sequence).contiguous()).backward();
    const auto parameters = model->parameters();
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : parameters) gradients.push_back(parameter.grad().contiguous().view(-1));
    const double scale = std::min(1.0, 1.0 / (std::sqrt(sum_of_squares(gradients).item<double>()) + 1e-6));
    for (std::size_t at = 0; at < parameters.size(); ++at) {
      buffers[at].gradients = gradients[at];
      adam_(buffers[at],
            {.lr = 3e-4, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1, .step = step + 1, .gradient_scale = scale});
    }
    if (step > 0) seconds.push_back(seconds_since(start));
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  std::printf("{\"tokens_per_second\": %.1f, \"step_ms\": %.3f}\n", batch * sequence / median, median * 1e3);
}
