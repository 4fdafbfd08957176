#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include <c10/core/ScalarType.h>

#include "bonfire/base/api.h"

namespace bonfire {

// The size of a source that never ends.
inline constexpr std::uint64_t unbounded = std::numeric_limits<std::uint64_t>::max();

// One sample's part of a tensor: its sizes, without the batch, and its type.
struct SampleField {
  std::vector<std::int64_t> sizes;
  c10::ScalarType dtype = c10::ScalarType::Long;

  std::int64_t elements() const;
};

// Where samples come from. A sample is a pure function of its index: any thread may read any sample at any time.
class BONFIRE_API Source {
 public:
  virtual ~Source() = default;

  // Number of samples, or `unbounded`.
  virtual std::uint64_t size() const = 0;
  virtual SampleField input() const = 0;
  virtual SampleField target() const = 0;
  // Writes the sample into buffers of the two fields' type and number of elements. REQUIRES: index < size().
  virtual void read(std::uint64_t index, void* input, void* target) const = 0;
  // Whether samples consist of documents that keep to themselves.
  virtual bool separates_documents() const { return false; }
  // For each position of a sample's input, the position at which its document begins; 0 where that is before the sample.
  // REQUIRES: index < size(), separates_documents(), as many starts as the input has positions.
  virtual void document_starts(std::uint64_t index, std::span<std::int64_t> starts) const;
};

// A source of language: a sample is a window of sequence() + 1 tokens below vocab(). The input is all but the last of
// them, the target all but the first.
class BONFIRE_API TokenSource : public Source {
 public:
  virtual std::int64_t vocab() const = 0;
  virtual std::int64_t sequence() const = 0;
  // REQUIRES: index < size(), tokens.size() == sequence() + 1.
  virtual void window(std::uint64_t index, std::span<std::int64_t> tokens) const = 0;

  SampleField input() const final { return {{sequence()}, c10::ScalarType::Long}; }
  SampleField target() const final { return input(); }
  void read(std::uint64_t index, void* input, void* target) const final;
};

// Samples [first, first + count) of another source.
class BONFIRE_API SourceSlice : public Source {
 public:
  SourceSlice(std::shared_ptr<const Source> whole, std::uint64_t first, std::uint64_t count);

  std::uint64_t size() const override { return count_; }
  SampleField input() const override { return whole_->input(); }
  SampleField target() const override { return whole_->target(); }
  void read(std::uint64_t index, void* input, void* target) const override;
  bool separates_documents() const override { return whole_->separates_documents(); }
  void document_starts(std::uint64_t index, std::span<std::int64_t> starts) const override;

 private:
  std::shared_ptr<const Source> whole_;
  std::uint64_t first_;
  std::uint64_t count_;
};

struct SourceSplit {
  std::shared_ptr<const Source> train;
  std::shared_ptr<const Source> held_out;
};

// Cuts the last `fraction` of the samples off, at least one of them. The two parts of an unbounded source are the halves of
// the indices, whatever the fraction: neither ends. REQUIRES: 0 < fraction < 1.
BONFIRE_API SourceSplit split(std::shared_ptr<const Source> source, double fraction);

}  // namespace bonfire
