#include "bonfire/plan/convolution.h"

#include <algorithm>
#include <cmath>

namespace bonfire::plan {
namespace {

constexpr std::int64_t taps = 9;

std::int64_t divide_up(std::int64_t number, std::int64_t by) { return (number + by - 1) / by; }
std::int64_t round_up(std::int64_t number, std::int64_t to) { return divide_up(number, to) * to; }

// A weight's gradient in two bytes, as oneDNN makes it with AVX512-BF16. Threads divide the samples, or rows of them, into
// parts, or they divide the channels. Each part has the gradient's sum in fp32, and its sample's input and output with
// neighbouring columns side by side.
struct NarrowGradient {
  static constexpr std::int64_t block = 16;
  std::int64_t samples, side, in_blocks, out_blocks, in_block;
  bool from_image;  // few channels are read as they lie
  // Elements of a sample, or of the weight.
  std::int64_t input, output, weight;

  NarrowGradient(const Convolution& of, std::int64_t given)
      : samples(given),
        side(std::llround(std::sqrt(static_cast<double>(of.pixels)))),
        in_blocks(divide_up(of.input_channels, block)),
        out_blocks(divide_up(of.output_channels, block)),
        in_block(of.input_channels < block ? of.input_channels : block),
        from_image(of.input_channels < block),
        input(in_blocks * in_block * side * (from_image ? side : round_up(side + 2, 2))),
        output(out_blocks * block * side * round_up(side, 2)),
        weight(in_blocks * in_block * out_blocks * block * taps) {}

  // What a thread reads and writes, as oneDNN weighs it: it takes the cheapest division.
  double cost(std::int64_t parts, std::int64_t by_output, std::int64_t by_input) const {
    constexpr std::int64_t whole_samples = 128;  // input channels from which on it does not divide a sample
    const std::int64_t pieces = in_blocks * in_block >= whole_samples ? samples : samples * side;
    const auto part = [](std::int64_t number, std::int64_t by) {
      return static_cast<double>(divide_up(number, by)) / static_cast<double>(number);
    };
    const double of_samples = part(pieces, parts), of_input = part(in_blocks, by_input),
                 of_output = part(out_blocks, by_output);
    const double read = static_cast<double>(samples * input), came = static_cast<double>(samples * output),
                 made = static_cast<double>(weight),
                 ratio = static_cast<double>(out_blocks) / static_cast<double>(in_blocks),
                 scale = (read + came) / (4 * made);
    return std::max(1 / ratio, 1.) * (scale < 1 ? 4 : 1) * read * of_samples * of_input +
           std::max(ratio, 1.) * came * of_samples * of_output + std::max(scale, 1.) * made * of_input * of_output;
  }

  std::int64_t parts(std::int64_t threads) const {
    std::int64_t best = 1;
    double least = cost(1, 1, 1);
    for (std::int64_t parts = 1; parts <= std::min(threads, samples * side); ++parts)
      for (std::int64_t by_output = 1; by_output <= std::min(threads / parts, out_blocks); ++by_output) {
        const double next = cost(parts, by_output, std::min(threads / parts / by_output, in_blocks));
        if (next > least) continue;
        best = parts;
        least = next;
      }
    return best > threads / 2 ? std::min(threads, samples * side) : best;
  }

  std::int64_t bytes(std::int64_t threads) const {
    return parts(threads) * (4 * (weight + out_blocks * block) + 2 * ((from_image ? 0 : input) + output));
  }
};

}  // namespace

// oneDNN works in blocks of eight channels and copies what it reads into that order, but for an input of a few channels.
// Single small samples in four bytes, and all in two bytes that this CPU's oneDNN does not know, are multiplied as columns
// of their nine neighbours; in two bytes the sum of a bias is then made of an fp32 copy.
ConvolutionWorkspace convolution_workspace(const Convolution& of, Dtype compute, const MemoryOptions& options) {
  constexpr std::int64_t block = 8, few = 4, small = 20480;
  const bool narrow = compute != Dtype::fp32;
  if (narrow && !options.narrow_convolutions) return {.elements = std::max(taps * of.input(), 2 * of.output())};
  if (!narrow && options.tokens == 1 && of.input() <= small) return {.elements = taps * of.input()};
  const auto blocked = [&](std::int64_t channels) { return round_up(channels, block) * of.pixels; };
  return {.elements = blocked(of.output_channels) + (of.input_channels < few ? 0 : blocked(of.input_channels)),
          .gradient_bytes = narrow ? NarrowGradient(of, options.tokens).bytes(options.threads) : 0};
}

}  // namespace bonfire::plan
