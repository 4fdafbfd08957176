#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/kernels/attention_parts.h"
#include "bonfire/kernels/qkv.h"

// Which positions of its samples a rank has, and which of them see which.
namespace bonfire {

// One of several ranks that share samples. A sequence is cut into 2 * ranks chunks of one length, and rank r has chunks r
// and 2 * ranks - 1 - r: an early one, whose rows see few others, and a late one, whose rows see many. So all ranks have as
// much to do under the causal mask. One rank has everything.
struct ContextPart {
  int rank = 0;
  int ranks = 1;

  bool operator<(const ContextPart& other) const { return ranks != other.ranks ? ranks < other.ranks : rank < other.rank; }
};

// Consecutive positions of a sequence: from `place` on in the sequence, from `own` on among those that a rank has.
struct Stretch {
  std::int64_t place = 0, own = 0, count = 0;
};
// Those of a rank that has `count` positions. Throws Error where these are not its chunks.
BONFIRE_API std::vector<Stretch> stretches_of(const ContextPart& part, std::int64_t count);
// The same of the positions [begin, begin + count) that it has, of `own`.
BONFIRE_API std::vector<Stretch> stretches_of(const ContextPart& part, std::int64_t own, std::int64_t begin,
                                              std::int64_t count);

// What a rank has of x [samples, positions, ...]: x itself where it has all. Throws Error where the positions cannot be cut.
BONFIRE_API at::Tensor own_positions(const at::Tensor& x, const ContextPart& part);

// A rank's positions of some samples.
class BONFIRE_API SequencePlaces {
 public:
  // `starts` [samples, positions of a whole sequence], int64 on the CPU: where each position's document begins. Undefined:
  // each sample is one document.
  SequencePlaces(const ContextPart& part, std::int64_t own, const at::Tensor& starts);

  // Where its positions are in their documents: [own], or [samples, own] where samples have documents. On the CPU.
  const at::Tensor& places() const { return places_; }
  // The same on a device.
  at::Tensor places(at::Device device) const;
  // Whether attention takes the samples as one row of positions, one behind the other.
  bool in_one_row() const { return places_.dim() == 2; }
  // What its rows see of the keys of rank `from`. Of its own every row sees itself, and is in one part.
  const std::vector<AttentionPart>& seen(int from) const { return seen_.at(static_cast<std::size_t>(from)); }
  // The rows of a table that belong to its positions, in the order of the one row.
  RotaryTable rows_of(const RotaryTable& all) const;

 private:
  std::vector<AttentionPart> parts_between(const ContextPart& part, int from, const at::Tensor& starts) const;

  std::int64_t own_;
  at::Tensor places_;
  std::vector<std::vector<AttentionPart>> seen_;
  mutable at::Tensor on_device_;
  mutable RotaryTable table_, rows_;  // of the last one that was asked for
};

// The documents of a microbatch's samples, and what follows from them for whoever has which positions.
class BONFIRE_API Documents {
 public:
  // Each sample is one document.
  Documents() = default;
  // `starts` as in SequencePlaces. Throws Error where it cannot be.
  explicit Documents(at::Tensor starts);

  bool separate() const { return starts_.defined(); }
  // REQUIRES: one thread at a time.
  std::shared_ptr<const SequencePlaces> places(const ContextPart& part, std::int64_t own) const;

 private:
  at::Tensor starts_;
  mutable std::map<std::pair<ContextPart, std::int64_t>, std::shared_ptr<const SequencePlaces>> known_;
};

}  // namespace bonfire
