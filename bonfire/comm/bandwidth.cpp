#include "bonfire/comm/bandwidth.h"

#include <algorithm>
#include <cmath>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>

#include "bonfire/base/clock.h"
#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/comm/device.h"

namespace bonfire {
namespace {

// Small whole numbers that every dtype holds exactly, as do sums over a few ranks: rank r has r + 1 + (element modulo 4).
at::Tensor numbers_of(int rank, std::int64_t elements, const at::TensorOptions& options) {
  return at::arange(elements, options.dtype(at::kLong)).remainder_(4).add_(rank + 1).to(options.dtype().toScalarType());
}

// One kind of collective: what goes in, how it is run, and what must come out.
struct Trial {
  at::Tensor input, output;
  std::function<Work()> run;
  std::function<void()> refill;
  at::Tensor want;  // undefined: this rank gets nothing
};

// `whole` and `part` as several pairs, each of which is contiguous: together they are the same memory, but not its order.
std::vector<Transfer> cut(const at::Tensor& whole, const at::Tensor& part, int ranks, int transfers) {
  std::vector<Transfer> pairs;
  for (std::int64_t at = 0, length = 0; at < part.numel(); at += length) {
    length = std::min<std::int64_t>((part.numel() + transfers - 1) / transfers, part.numel() - at);
    pairs.push_back({whole.narrow(0, at * ranks, length * ranks), part.narrow(0, at, length)});
  }
  return pairs;
}

Trial make_trial(const Group& group, const BandwidthOptions& wanted, std::int64_t elements,
                 const at::TensorOptions& options) {
  const auto kind = wanted.kind;
  const int ranks = group.size(), me = group.rank();
  const std::int64_t part = elements / ranks;
  Trial trial;
  const auto sum_of_ranks = [&] {
    auto sum = numbers_of(0, elements, options);
    for (int rank = 1; rank < ranks; ++rank) sum.add_(numbers_of(rank, elements, options));
    return sum;
  };
  const auto parts_of_ranks = [&] {
    auto all = at::empty({ranks, part}, options);
    for (int rank = 0; rank < ranks; ++rank) all.select(0, rank).copy_(numbers_of(rank, part, options));
    return all.view(-1);
  };
  trial.output = at::empty({elements}, options);
  switch (kind) {
    case CollectiveKind::all_reduce:
    case CollectiveKind::reduce:
    case CollectiveKind::broadcast: {
      trial.input = numbers_of(me, elements, options);
      trial.refill = [out = trial.output, in = trial.input]() mutable { out.copy_(in); };
      if (kind == CollectiveKind::broadcast) {
        trial.run = [=, out = trial.output] { return group.broadcast(out, 0); };
        trial.want = numbers_of(0, elements, options);
      } else if (kind == CollectiveKind::all_reduce) {
        trial.run = [=, out = trial.output] { return group.all_reduce(out); };
        trial.want = sum_of_ranks();
      } else {
        trial.run = [=, out = trial.output] { return group.reduce(out, 0); };
        if (me == 0) trial.want = sum_of_ranks();
      }
      return trial;
    }
    case CollectiveKind::all_gather:
      trial.input = numbers_of(me, part, options);
      trial.run = [=, pairs = cut(trial.output, trial.input, ranks, wanted.transfers)] { return group.all_gather(pairs); };
      trial.want = at::empty({elements}, options);
      for (int rank = 0; rank < ranks; ++rank) {
        const auto theirs = numbers_of(rank, part, options);
        for (const auto& [whole, own] : cut(trial.want, theirs, ranks, wanted.transfers))
          whole.narrow(0, rank * own.numel(), own.numel()).copy_(own);
      }
      break;
    case CollectiveKind::gather:
      trial.input = numbers_of(me, part, options);
      trial.run = [=, out = trial.output, in = trial.input] { return group.gather(me == 0 ? out : at::Tensor(), in, 0); };
      if (me == 0) trial.want = parts_of_ranks();
      break;
    case CollectiveKind::reduce_scatter:
      trial.input = numbers_of(me, elements, options);
      trial.output = at::empty({part}, options);
      trial.run = [=, pairs = cut(trial.input, trial.output, ranks, wanted.transfers)] {
        return group.reduce_scatter(pairs);
      };
      trial.want = at::empty({part}, options);
      for (const auto& [whole, own] : cut(sum_of_ranks(), trial.want, ranks, wanted.transfers))
        own.copy_(whole.narrow(0, me * own.numel(), own.numel()));
      break;
    case CollectiveKind::scatter:
      trial.input = parts_of_ranks();
      trial.output = at::empty({part}, options);
      trial.run = [=, out = trial.output, in = trial.input] { return group.scatter(out, me == 0 ? in : at::Tensor(), 0); };
      trial.want = numbers_of(me, part, options);
      break;
    case CollectiveKind::all_to_all: {
      const auto to_each = [&](int from, int to) { return numbers_of(from + to, part, options); };
      trial.input = at::empty({ranks, part}, options);
      trial.want = at::empty({ranks, part}, options);
      for (int rank = 0; rank < ranks; ++rank) {
        trial.input.select(0, rank).copy_(to_each(me, rank));
        trial.want.select(0, rank).copy_(to_each(rank, me));
      }
      trial.want = trial.want.view(-1);
      trial.run = [=, out = trial.output, in = trial.input] { return group.all_to_all(out, in); };
      break;
    }
    case CollectiveKind::send:
    case CollectiveKind::receive: {
      // Everybody sends to the next and receives from the one before.
      trial.input = numbers_of(me, elements, options);
      const int next = (me + 1) % ranks, before = (me + ranks - 1) % ranks;
      trial.run = [=, out = trial.output, in = trial.input] {
        const Message messages[]{{Message::Way::send, in, next}, {Message::Way::receive, out, before}};
        return group.batch(messages);
      };
      trial.want = numbers_of(before, elements, options);
      break;
    }
    case CollectiveKind::barrier: trial.run = [=] { return group.barrier(); }; break;
  }
  trial.refill = [out = trial.output]() mutable { out.fill_(0); };
  return trial;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

std::vector<BandwidthRow> measure_bandwidth(const World& world, const BandwidthOptions& options,
                                            const std::function<void(const BandwidthRow&)>& report) {
  const Group& group = world.group();
  const bool messages = options.kind == CollectiveKind::send || options.kind == CollectiveKind::receive;
  require(group.size() > 1 || !messages, "a message needs at least 2 ranks; there is {}", group.size());
  require(options.least_bytes > 0 && options.most_bytes >= options.least_bytes && options.factor > 1 && options.repeats > 0,
          "sizes from {} to {} bytes by a factor of {}, {} repeats: sizes must be positive and grow, repeats at least 1",
          options.least_bytes, options.most_bytes, options.factor, options.repeats);
  const bool in_pairs = options.kind == CollectiveKind::all_gather || options.kind == CollectiveKind::reduce_scatter;
  require(options.transfers == 1 || (options.transfers > 1 && in_pairs),
          "{} transfers of {}: only all_gather and reduce_scatter can be several, at least 1", options.transfers,
          name_of(options.kind));
  const auto tensor = at::TensorOptions().dtype(options.dtype).device(world.device());
  const auto element = static_cast<std::int64_t>(c10::elementSize(options.dtype));
  std::vector<BandwidthRow> rows;
  for (std::int64_t bytes = options.least_bytes; bytes <= options.most_bytes; bytes *= options.factor) {
    const std::int64_t elements = round_up(std::max<std::int64_t>(bytes / element, 1), group.size());
    Trial trial = make_trial(group, options, elements, tensor);
    std::vector<double> seconds, issue;
    for (int repeat = -options.warmups; repeat < options.repeats; ++repeat) {
      trial.refill();
      synchronize(world.device());
      group.barrier().wait();
      synchronize(world.device());
      const auto start = now_ns();
      Work work = trial.run();
      const double issued = seconds_since(start);
      work.wait();
      synchronize(world.device());
      if (repeat < 0) continue;
      seconds.push_back(seconds_since(start));
      issue.push_back(issued);
    }
    BandwidthRow row{.bytes = elements * element, .elements = elements};
    row.seconds = group.max(median(std::move(seconds)));
    row.issue_seconds = group.max(median(std::move(issue)));
    row.wrong =
        std::llround(group.sum(trial.want.defined() ? at::ne(trial.output.view(-1), trial.want).sum().item<double>() : 0));
    row.algorithm_bytes = static_cast<double>(row.bytes) / row.seconds;
    row.bus_bytes = row.algorithm_bytes * bus_factor(options.kind, group.size());
    rows.push_back(row);
    if (report) report(row);
  }
  return rows;
}

}  // namespace bonfire
