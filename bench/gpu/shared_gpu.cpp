// What kernels take where others have some of the multiprocessors, as NCCL does beside computing; and sums into few rows.
//
//   bench_shared_gpu [--taken 16] [--repeats 15]
//
// Each kernel alone and while a kernel that computes nothing has `taken` multiprocessors: medians. "Fair" is what would be
// if all of the time went by multiprocessors; what waits for memory takes less, and shares that are fixed up to twice the
// time. A sum over the bits of what a kernel made is the same in all runs, or a line says so.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "bench/gpu/occupier.h"
#include "bonfire/comm/cuda_plugin.h"
#include "bonfire/comm/device.h"
#include "bonfire/kernels/activated_product.h"
#include "bonfire/kernels/activation.h"
#include "bonfire/kernels/product.h"

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

const c10::Device gpu(c10::kCUDA, 0);

struct Arguments {
  int taken = 16, repeats = 15;
};

template <class Signature, class... Given>
auto call(const char* name, Given... given) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>().call(given...);
}

using Work = std::function<Tensor()>;  // something that all of its result shows in

double median_us(const Work& work, int repeats) {
  const c10::impl::VirtualGuardImpl device(c10::kCUDA);
  const c10::Stream stream = device.getStream(gpu);
  const auto flag = c10::EventFlag::BACKEND_DEFAULT;
  std::vector<c10::Event> marks;
  for (int i = 0; i <= repeats; ++i) marks.emplace_back(c10::kCUDA, flag);
  marks[0].record(stream);
  for (int i = 0; i < repeats; ++i) {
    work();
    marks[static_cast<std::size_t>(i) + 1].record(stream);
  }
  marks.back().synchronize();
  std::vector<double> times;
  for (std::size_t i = 0; i + 1 < marks.size(); ++i) times.push_back(marks[i].elapsedTime(marks[i + 1]) * 1e3);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

std::int64_t bits_of(const Tensor& x) {
  const auto type = x.element_size() == 2 ? at::kShort : x.element_size() == 4 ? at::kInt : at::kLong;
  const Tensor bits = x.contiguous().view(type).flatten();
  return (bits.to(at::kLong) * at::arange(1, bits.numel() + 1, bits.options().dtype(at::kLong))).sum().item<std::int64_t>();
}

void measure(const Arguments& arguments, const std::string& name, const Work& work) {
  for (int i = 0; i < 3; ++i) work();  // loads kernels, finds the fastest product, fills the allocator
  const std::int64_t bits = bits_of(work());
  const double alone = median_us(work, arguments.repeats);
  double beside = 0;
  Tensor made;
  {
    const Occupier others(arguments.taken);
    beside = median_us(work, arguments.repeats);
    made = work();
  }
  std::printf("%-52s %9.1f us alone %9.1f us beside %6.2f times%s\n", name.c_str(), alone, beside, beside / alone,
              bits_of(made) == bits ? "" : "   OTHER BITS");
  std::fflush(stdout);
}

// Kernels whose blocks draw.
void measure_draws(const Arguments& arguments, const std::string& name, const Work& work) {
  measure(arguments, name, work);
  bonfire::cuda_plugin().plugin->draw_shares(false);
  measure(arguments, "  with fixed shares", work);
  bonfire::cuda_plugin().plugin->draw_shares(true);
}

// cuBLASLt's.
void measure_told(const Arguments& arguments, const std::string& name, const Work& work) {
  bonfire::cuda_plugin().plugin->leave_multiprocessors(arguments.taken);
  measure(arguments, name, work);
  bonfire::cuda_plugin().plugin->leave_multiprocessors(0);
  measure(arguments, "  without telling it", work);
}

Tensor random(at::IntArrayRef sizes, at::ScalarType type = at::kBFloat16) {
  return at::randn(sizes, at::TensorOptions(gpu).dtype(type));
}

void measure_norms(const Arguments& arguments) {
  using OfRms = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                                   const Tensor&, bool);
  using OfLayer =
      std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                                         const Tensor&, const Tensor&, const OptionalTensor&, bool);
  for (const auto& [rows, columns] : {std::pair<std::int64_t, std::int64_t>{4096, 2048}, {16384, 2048}, {65536, 768}}) {
    const Tensor dy = random({rows, columns}), ds = random({rows, columns}), x = random({rows, columns}),
                 weight = random({columns}), rstd = random({rows}, at::kFloat).abs() + 0.5,
                 mean = random({rows}, at::kFloat);
    const auto name = [&, rows = rows, columns = columns](const char* what) {
      return std::string(what) + " " + std::to_string(rows) + " x " + std::to_string(columns);
    };
    measure(arguments, name("rms_norm_backward"), [&] {
      return std::get<1>(call<OfRms>("bonfire::rms_norm_backward", dy, OptionalTensor(ds), x, weight, rstd, true));
    });
    measure(arguments, name("layer_norm_backward"), [&] {
      return std::get<4>(call<OfLayer>("bonfire::layer_norm_backward", dy, OptionalTensor(ds), x, weight, mean, rstd,
                                       OptionalTensor(weight), true));
    });
    measure(arguments, name("column_sums"), [&] { return call<Tensor(const Tensor&)>("bonfire::column_sums", x); });
  }
}

void measure_products(const Arguments& arguments) {
  struct Shape {
    bonfire::Activation activation;
    std::int64_t rows, columns, inner;
  };
  for (const auto& [activation, rows, columns, inner] : {Shape{bonfire::Activation::swiglu, 4096, 5632, 2048},
                                                         {bonfire::Activation::swiglu, 65536, 2048, 768},
                                                         {bonfire::Activation::gelu, 65536, 3072, 768}}) {
    const bool gated = activation == bonfire::Activation::swiglu;
    const Tensor x = random({rows, inner}), weight = random({gated ? 2 * columns : columns, inner}),
                 bias = gated ? Tensor() : random({columns}), down = random({inner, columns});
    const std::string shape = std::string(gated ? "swiglu " : "gelu ") + std::to_string(rows) + " x " +
                              std::to_string(columns) + " x " + std::to_string(inner);
    const auto made = bonfire::activated_product(activation, x, weight, bias);
    if (!made) {
      std::printf("%s: this GPU has no such kernel\n", shape.c_str());
      continue;
    }
    measure_draws(arguments, "product, " + shape,
                  [&, activation = activation] { return bonfire::activated_product(activation, x, weight, bias)->active; });
    measure_draws(arguments, "its gradient, " + shape, [&, activation = activation] {
      return bonfire::activated_product_backward(activation, {.dy = x, .weight = down, .wide = made->wide, .again = true})
          ->d.wide;
    });
  }
  for (const auto& [rows, columns, inner] :
       {std::tuple<std::int64_t, std::int64_t, std::int64_t>{4096, 2048, 2048}, {16384, 2048, 5632}, {65536, 768, 3072}}) {
    const Tensor a = random({rows, inner}), b = random({inner, columns});
    const std::string shape = std::to_string(rows) + " x " + std::to_string(columns) + " x " + std::to_string(inner);
    measure_told(arguments, "cuBLASLt " + shape, [&] { return bonfire::product(a, b); });
  }
}

void measure_losses(const Arguments& arguments) {
  for (const std::int64_t classes : {50304, 128256}) {
    const std::int64_t rows = 4096;
    const Tensor given = random({rows, classes}), logits = given.clone(),
                 target = at::randint(classes, {rows}, at::TensorOptions(gpu).dtype(at::kLong));
    // The gradient takes the place of the logits, so later runs have other numbers than the first: the same ones each time
    // would cost a copy. Bits are of the losses of the first run.
    measure_draws(arguments, "cross_entropy_ 4096 x " + std::to_string(classes), [&] {
      call<Tensor(Tensor, const Tensor&, std::int64_t)>("bonfire::cross_entropy_", logits, target, std::int64_t{-100});
      return target;
    });
  }
}

void measure_embeddings(const Arguments& arguments) {
  const std::int64_t rows = 65536, columns = 768, tokens = 50304;
  const auto longs = at::TensorOptions(gpu).dtype(at::kLong);
  const Tensor gradient = random({rows, columns}), out = at::zeros({tokens, columns}, gpu);
  const Tensor uniform = at::randint(tokens, {rows}, longs);
  const Tensor half = at::where(at::rand({rows}, gpu) < 0.5, at::full({rows}, 7, longs), uniform);
  // As words of a language are: the n-th of them n times as rare as the first.
  const Tensor zipf =
      at::rand({rows}, gpu).mul(std::log(static_cast<double>(tokens))).exp().to(at::kLong).clamp(0, tokens - 1);
  for (const auto& [name, given] : {std::pair<const char*, Tensor>{"tokens all alike often", uniform},
                                    {"tokens of a language", zipf},
                                    {"half of them one token", half},
                                    {"all of them one token", at::full({rows}, 7, longs)}})
    measure(arguments, std::string("embedding_add_, ") + name, [&, given = given] {
      call<void(Tensor, const Tensor&, const Tensor&)>("bonfire::embedding_add_", out, given, gradient);
      return given;
    });
}

}  // namespace

int main(int count, char** words) {
  Arguments arguments;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = words[i];
    if (name == "--taken") arguments.taken = std::atoi(words[i + 1]);
    if (name == "--repeats") arguments.repeats = std::atoi(words[i + 1]);
  }
  if (!bonfire::gpu_available()) {
    std::fprintf(stderr, "%s\n", bonfire::gpu_unavailable_reason().c_str());
    return 1;
  }
  bonfire::set_current(gpu);
  at::manual_seed(5);
  std::printf("%d multiprocessors are others'\n", arguments.taken);
  measure_norms(arguments);
  measure_products(arguments);
  measure_losses(arguments);
  measure_embeddings(arguments);
}
