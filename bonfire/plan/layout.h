#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/collective.h"
#include "bonfire/plan/model.h"

// Layout arithmetic: where each parameter lies, which buffers are reduced together, and so every byte and every collective
// of a step. The engine asks this for its layout; nobody else decides one.
namespace bonfire::plan {

// One parameter as the arithmetic sees it.
struct ParameterSize {
  std::string name;
  std::int64_t elements = 0;
  std::vector<std::int64_t> shape{};  // PowerSGD looks at it
  bool trained = true;
};

// Parameters that stay together: those of one Unit, or a single one of a module without Units.
struct ParameterGroup {
  std::string name;
  std::vector<ParameterSize> parameters;
};

// Where one parameter lies in its flat buffer, in elements.
struct Segment {
  std::string name;
  std::int64_t offset = 0;
  std::int64_t elements = 0;
  bool trained = true;
};

// One flat buffer: the trained segments first, each aligned, then the frozen ones. Gradients, reduction and optimizer state
// exist for the trained part only.
struct FlatLayout {
  std::vector<std::size_t> groups;  // which of the given groups it holds, in their order of arrival in backward
  std::vector<Segment> segments;
  std::int64_t trained = 0;  // elements of the trained part with its padding: a multiple of the sharding factor
  std::int64_t total = 0;    // and of all
};

enum class Compression { none, bf16, fp16, powersgd };

struct BucketOptions {
  std::int64_t bucket_bytes = 25 << 20;
  // The first to be reduced is small, so that communication begins early in backward.
  std::int64_t first_bucket_bytes = 1 << 20;
  std::int64_t element_bytes = 4;  // of a gradient
  int shard = 1;                   // sharding factor
};

// Segments begin at multiples of this many elements, so that vector instructions and messages are aligned in every dtype.
inline constexpr std::int64_t segment_alignment = 64;

// Puts groups, given in the order in which backward finishes them, into flat buffers: a buffer is closed when it has reached
// its size, and a group is never split.
BONFIRE_API std::vector<FlatLayout> bucket(const std::vector<ParameterGroup>& in_backward_order,
                                           const BucketOptions& options);

// The groups of a model in the order in which its backward finishes them.
BONFIRE_API std::vector<ParameterGroup> groups_in_backward_order(const ModelDescription& model);

// What a data-parallel step depends on, beside the model.
struct DataParallel {
  int replicate = 1;
  BucketOptions buckets{};
  Compression compression = Compression::none;
  int powersgd_rank = 4;
  std::int64_t buffer_bytes = 0;  // of module buffers that are kept equal
};

// Matrices that PowerSGD compresses: rows x columns, and the rank it gets. Others of the bucket travel as they are.
struct LowRank {
  std::int64_t rows = 0, columns = 0, rank = 0;
};
// Of a parameter of this shape; a rank of 0 where compression would not make it smaller.
BONFIRE_API LowRank low_rank(const std::vector<std::int64_t>& shape, int rank);

// Every collective of one optimizer step, in the order in which they are issued: the reductions of backward, the module's
// buffers, and the mean of the loss.
BONFIRE_API std::vector<Collective> collectives_of_step(const ModelDescription& model, const DataParallel& layout);

}  // namespace bonfire::plan
