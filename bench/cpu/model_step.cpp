// Forward and backward of our Llama against the same function composed of plain torch operators, with the same weights, in
// one process on one thread, interleaved. Prints medians in milliseconds of processor time and checks that both losses
// agree.
//
//   bench_model_step [repeats] [microbatch]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "bonfire/models/model.h"
#include "bonfire/nn/gradient_slots.h"

using at::Tensor;

namespace {

const bonfire::plan::ModelSpec kSpec{.dim = 256, .layers = 6, .heads = 8, .ffn = 1024, .vocab = 4096, .positions = 256};

// What a careful user of torch writes: separate products, eager operators, autograd's own gradients.
struct PlainLlama {
  std::map<std::string, Tensor> weights;
  Tensor cosine, sine;

  explicit PlainLlama(const bonfire::Model& model) {
    for (const auto& parameter : model.public_parameters())
      weights[parameter.name] = parameter.tensor.clone().set_requires_grad(true);
    const std::int64_t size = kSpec.dim / kSpec.heads;
    const Tensor frequency = at::pow(kSpec.rope_theta, at::arange(0, size, 2, at::kDouble).div(-static_cast<double>(size)));
    const Tensor angle = at::outer(at::arange(kSpec.positions, at::kDouble), frequency);
    cosine = at::cat({angle.cos(), angle.cos()}, 1).to(at::kFloat);
    sine = at::cat({angle.sin(), angle.sin()}, 1).to(at::kFloat);
  }

  Tensor norm(const Tensor& x, const Tensor& weight) const { return at::rms_norm(x, {x.size(-1)}, weight, kSpec.norm_eps); }

  Tensor rotate(const Tensor& x) const {
    const auto halves = x.chunk(2, -1);
    return x * cosine + at::cat({-halves[1], halves[0]}, -1) * sine;
  }

  Tensor loss(const Tensor& tokens, const Tensor& target) {
    const std::int64_t batch = tokens.size(0), sequence = tokens.size(1);
    Tensor x = at::embedding(weights["model.embed_tokens.weight"], tokens);
    for (std::int64_t i = 0; i < kSpec.layers; ++i) {
      const auto w = [&](const char* name) { return weights["model.layers." + std::to_string(i) + "." + name + ".weight"]; };
      const Tensor h = norm(x, w("input_layernorm"));
      const auto heads = [&](const Tensor& y) { return y.view({batch, sequence, kSpec.heads, -1}).transpose(1, 2); };
      const Tensor q = rotate(heads(at::linear(h, w("self_attn.q_proj"))));
      const Tensor k = rotate(heads(at::linear(h, w("self_attn.k_proj"))));
      const Tensor v = heads(at::linear(h, w("self_attn.v_proj")));
      const Tensor mixed = at::scaled_dot_product_attention(q, k, v, {}, 0, true);
      x = x + at::linear(mixed.transpose(1, 2).reshape({batch, sequence, -1}), w("self_attn.o_proj"));
      const Tensor g = norm(x, w("post_attention_layernorm"));
      x = x + at::linear(at::silu(at::linear(g, w("mlp.gate_proj"))) * at::linear(g, w("mlp.up_proj")), w("mlp.down_proj"));
    }
    const Tensor logits = at::linear(norm(x, weights["model.norm.weight"]), weights["lm_head.weight"]);
    return at::cross_entropy_loss(logits.view({-1, kSpec.vocab}), target.flatten());
  }
};

// One flat buffer, as the data-parallel engine gives each parameter a part of it.
struct Sink : bonfire::GradientSink {
  Tensor memory;
  bool written = false;
  Tensor buffer(bool& fresh) override {
    fresh = !written;
    written = true;
    return memory;
  }
  void arrived() override {}
};

// Processor time of this thread, which does all the work: what else runs on the machine does not count.
double milliseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

struct Timing {
  std::vector<double> forward, backward;

  static double median(std::vector<double> values) {
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
  }
  double total() const { return median(forward) + median(backward); }
};

template <class Loss>
double time_step(Timing& timing, const Loss& loss) {
  double start = milliseconds();
  const Tensor value = loss();
  timing.forward.push_back(milliseconds() - start);
  start = milliseconds();
  value.backward();
  timing.backward.push_back(milliseconds() - start);
  return value.item<double>();
}

}  // namespace

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::atoi(argv[1]) : 9;
  const std::int64_t microbatch = argc > 2 ? std::atoi(argv[2]) : 4;
  at::set_num_threads(1);
  const auto with_sinks = bonfire::build_model(kSpec, {}), without = bonfire::build_model(kSpec, {});
  PlainLlama plain(*without);
  std::vector<std::shared_ptr<Sink>> sinks;
  for (const auto& item : with_sinks->named_parameters()) {
    sinks.push_back(std::make_shared<Sink>());
    sinks.back()->memory = at::zeros_like(item.value());
    bonfire::set_gradient_sink(*with_sinks, item.key(), sinks.back());
  }
  const Tensor tokens = at::randint(kSpec.vocab, {microbatch, 256}, at::kLong);
  const Tensor target = at::randint(kSpec.vocab, {microbatch, 256}, at::kLong);
  Timing torch_time, ours, ours_with_sinks;
  for (int i = 0; i < repeats + 2; ++i) {
    if (i == 2) torch_time = ours = ours_with_sinks = {};
    // Each as its training loop would leave it: gradients set to none, buffers fresh.
    for (auto& [name, weight] : plain.weights) weight.mutable_grad() = Tensor();
    const double a = time_step(torch_time, [&] { return plain.loss(tokens, target); });
    for (auto& parameter : without->parameters()) parameter.mutable_grad() = Tensor();
    const double b = time_step(ours, [&] { return without->loss(tokens, target); });
    for (auto& sink : sinks) sink->written = false;
    const double c = time_step(ours_with_sinks, [&] { return with_sinks->loss(tokens, target); });
    if (std::abs(a - b) > 1e-5 * a || std::abs(a - c) > 1e-5 * a) {
      std::fprintf(stderr, "the losses differ: torch %.8f, ours %.8f, with sinks %.8f\n", a, b, c);
      return 1;
    }
  }
  const auto line = [&](const char* name, const Timing& t) {
    std::printf("%-28s forward %7.1f  backward %7.1f  total %7.1f ms  %7.0f tokens/s  %.3fx\n", name,
                Timing::median(t.forward), Timing::median(t.backward), t.total(),
                1e3 * static_cast<double>(tokens.numel()) / t.total(), torch_time.total() / t.total());
  };
  line("torch operators", torch_time);
  line("ours", ours);
  line("ours, gradients in place", ours_with_sinks);
}
