#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/collective.h"
#include "bonfire/plan/dtype.h"
#include "bonfire/plan/model.h"
#include "bonfire/plan/placement.h"
#include "bonfire/plan/sharding.h"

// Layout arithmetic: where each parameter lies, which buffers are reduced together, and so every byte and every collective
// of a step. The engine asks this for its layout; nobody else decides one.
namespace bonfire::plan {

// One parameter as the arithmetic sees it.
struct ParameterSize {
  std::string name;
  std::int64_t elements = 0;
  std::vector<std::int64_t> shape{};  // PowerSGD looks at it
  bool trained = true;
  Dtype compute = Dtype::fp32;  // what forward reads
  Dtype master = Dtype::fp32;   // what the optimizer updates
  std::int64_t scales = 0;      // that go with what forward reads: of eight bits alone, one for all of it or for each row
  Placement placement{};
};

// Parameters that stay together: those of one Unit, or a single one of a module without Units.
struct ParameterGroup {
  std::string name;
  std::vector<ParameterSize> parameters;
};

// How what forward reads is made of the masters that are updated.
enum class Codec {
  same,     // it is the masters
  rounded,  // each element by itself
  scaled,   // to eight bits, with scales that the largest elements decide
};

// A stretch of a flat buffer whose parameters are alike: in their types, and in who else holds them. Every region can be cut
// into equal parts, one for each rank of a shard group, so a rank holds the same share of each.
struct Region {
  Dtype compute = Dtype::fp32;
  Dtype master = Dtype::fp32;
  bool trained = true;
  bool split = false;  // of all its parameters this module holds a part, and others the rest
  std::string tie{};   // see Placement
  int copy = 0;
  std::int64_t begin = 0;     // in the flat buffer, in bytes
  std::int64_t elements = 0;  // with padding

  std::int64_t bytes() const { return elements * bytes_of(compute); }
  Codec codec() const { return compute == Dtype::fp8 ? Codec::scaled : compute == master ? Codec::same : Codec::rounded; }
  bool operator==(const Region&) const = default;
};

// Where one parameter lies: in which region, and from which of its elements on; and what it is in the whole model.
struct Segment {
  std::string name;  // in the module
  std::size_t region = 0;
  std::int64_t offset = 0;
  std::int64_t elements = 0;
  std::int64_t scales = 0;
  Placement placement{};
  bool operator==(const Segment&) const = default;
};

// One flat buffer: trained regions first, then the frozen ones, each with aligned segments. Gradients, reduction and
// optimizer state exist for trained regions only.
struct FlatLayout {
  std::vector<std::size_t> groups;  // which of the given groups it holds, in their order of arrival in backward
  std::vector<Segment> segments;
  std::vector<Region> regions;
  std::int64_t bytes = 0;  // of the whole buffer

  bool trained(std::size_t segment) const { return regions[segments[segment].region].trained; }
  BONFIRE_API std::int64_t trained_elements() const;  // with padding
  BONFIRE_API std::int64_t trained_bytes() const;     // of them, as forward reads them
  BONFIRE_API bool any_trained() const;
  BONFIRE_API std::int64_t scales() const;  // of all segments, each with its own aligned
};

// Whether both hold the same parameters in the same regions, in whatever order.
BONFIRE_API bool same_parameters(const FlatLayout& a, const FlatLayout& b);

enum class Compression { none, bf16, fp16, powersgd };

struct BucketOptions {
  std::int64_t bucket_bytes = 25 << 20;
  // The first to be reduced is small, so that communication begins early in backward.
  std::int64_t first_bucket_bytes = 1 << 20;
  Dtype gradient = Dtype::fp32;  // in which they are counted
  // Regions can be cut into this many equal parts: the data-parallel ranks, whatever the sharding factor, so that the same
  // bytes move with each.
  int parts = 1;
  // Each group in a buffer of its own, whatever its size: where buffers come and go with their Units.
  bool one_per_group = false;
};

// Segments and parts of regions begin at multiples of this many elements, so that vector instructions and messages are
// aligned in every dtype.
inline constexpr std::int64_t segment_alignment = 64;
// The same of the scales of a segment in eight bits, in fp32 numbers: products on a GPU read them from multiples of 16
// bytes.
inline constexpr std::int64_t scale_alignment = 4;

// Puts groups, given in the order in which backward finishes them, into flat buffers: a buffer is closed when it has reached
// its size, frozen parameters counted like trained ones, and a group is never split.
BONFIRE_API std::vector<FlatLayout> bucket(const std::vector<ParameterGroup>& in_backward_order,
                                           const BucketOptions& options);

// The groups of a model in the order in which its backward finishes them; those with nothing to finish come last.
BONFIRE_API std::vector<ParameterGroup> groups_in_backward_order(const ModelDescription& model);

// When, in backward, Units are gathered ahead: before or after the reductions of the one that runs are issued.
enum class BackwardPrefetch { before_reduction, after_reduction };

// How ranks that share samples see each other's positions: keys and values go round, or ranks exchange heads for positions.
enum class ContextWay { ring, heads };

// The ranks along the context axis: each has its part of the positions of the same samples.
struct ContextLayout {
  int ranks = 1;
  ContextWay way = ContextWay::ring;
  bool documents = false;  // samples are divided into documents that keep to themselves, on one rank too
};

// What a data-parallel step depends on, beside the model.
struct DataParallel {
  int replicate = 1;  // ranks that hold the same part of the model, those along the context axis among them
  int shard = 1;      // the sharding factor
  Sharded what = Sharded::none;
  Accumulation accumulation = Accumulation::sharded;
  int microbatches = 1;
  std::int64_t tokens = 0;   // of a microbatch, on a rank: what ranks exchange within layers depends on it,
  std::int64_t samples = 1;  // and these are its samples
  // Whether a Unit's memory is freed between forward and backward. With `reshard_ranks` above 0 ranks keep the part of it
  // that groups of so many need to gather it again.
  bool reshard_after_forward = true;
  int reshard_ranks = 0;
  int prefetch = 2;  // Units that are gathered ahead of the one that runs
  BackwardPrefetch backward_prefetch = BackwardPrefetch::before_reduction;
  Offload offload = Offload::none;
  Dtype compute = Dtype::fp32;    // what forward reads
  Dtype master = Dtype::fp32;     // what the optimizer updates
  Dtype gradient = Dtype::fp32;   // what gradients are kept in until the update
  Dtype reduction = Dtype::fp32;  // in which whole gradients travel to the ranks that keep a share of them
  // Parameters that forward reads in their master's type all the same, by their full name: norms, embeddings.
  std::function<bool(const std::string& name)> keep{};
  // How many scales go with a parameter that forward reads in eight bits while it is trained; 0: it is none of these.
  std::function<std::int64_t(const std::string& name, const std::vector<std::int64_t>& shape)> scales{};
  BucketOptions buckets{};  // the sizes; the rest of it follows from the above
  Compression compression = Compression::none;
  int powersgd_rank = 4;
  std::int64_t buffer_bytes = 0;  // of module buffers that are kept equal
  bool clip = false;              // gradients are clipped by their norm
  ContextLayout context{};

  int ranks() const { return replicate * shard; }
  // Ranks that read different samples.
  int readers() const { return ranks() / context.ranks; }
  // The same ranks with another sharding factor. REQUIRES: it divides readers().
  DataParallel with_shard(int factor) const {
    DataParallel other = *this;
    other.replicate = ranks() / factor;
    other.shard = factor;
    return other;
  }
  Factors factors() const { return factors_of(what, shard, accumulation); }
  // Whether parameters have memory on the device only while their Unit runs.
  bool comes_and_goes() const { return factors().parameters > 1 || offload == Offload::parameters; }
};

// The flat buffers of a model in this layout, in the order in which backward finishes them.
BONFIRE_API std::vector<FlatLayout> flats_of(const ModelDescription& model, const DataParallel& layout);
// The same of groups in an order of the caller's, which have their sizes and get their types here.
BONFIRE_API std::vector<FlatLayout> flats_of(std::vector<ParameterGroup> groups, const DataParallel& layout);

// Matrices that PowerSGD compresses: rows x columns, and the rank it gets. Others of the bucket travel as they are.
struct LowRank {
  std::int64_t rows = 0, columns = 0, rank = 0;
};
// Of a parameter of this shape; a rank of 0 where compression would not make it smaller.
BONFIRE_API LowRank low_rank(const std::vector<std::int64_t>& shape, int rank);

// Every collective of one optimizer step, from the second step on, in the order in which a rank issues them: the gathers
// and reductions of its microbatches, the module's buffers, the mean of the loss, the norm of the gradients, and what an
// update sends to ranks that hold copies. Throws ConfigError where the layout cannot be.
BONFIRE_API std::vector<Collective> collectives_of_step(const ModelDescription& model, const DataParallel& layout);

// Those of an update alone: what ranks send that hold copies, after they have agreed on the largest magnitudes of what has
// scales.
BONFIRE_API std::vector<Collective> collectives_of_update(const std::vector<FlatLayout>& flats, const DataParallel& layout);

// Bytes that cross each rank's link in a step, by the best algorithms for large messages.
BONFIRE_API double bytes_moved(const ModelDescription& model, const DataParallel& layout);
// The same of a list, recorded or predicted. REQUIRES: no `reshard_ranks`; a list does not say which gathers are over fewer
// ranks than their axis has.
BONFIRE_API double bytes_moved(const std::vector<Collective>& list, const DataParallel& layout);

}  // namespace bonfire::plan
