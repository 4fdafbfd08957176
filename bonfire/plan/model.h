#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/plan/box.h"
#include "bonfire/plan/placement.h"

// Models as data: which Units they have, in forward order, and which parameters each of them holds. The planner reads this
// to count bytes and work; `bonfire/models` creates exactly these parameters. No torch.
namespace bonfire::plan {

enum class ModelType { llama, gpt2, vgg, mlp };

// Low-rank adapters: beside frozen products, thin ones that are trained.
struct AdapterSpec {
  std::int64_t rank = 0;  // 0: there are none
  double alpha = 16;      // what one adds is scaled by alpha / rank
  double dropout = 0;     // of what one reads
  // Linear layers by their public names without ".weight", or by their paths: all of it, or the end from a dot on. Empty:
  // all of the blocks.
  std::vector<std::string> match{};
};

// What the [model] section says. A token is the smallest piece of a sample: a token of text, one image, one vector.
struct ModelSpec {
  ModelType type = ModelType::llama;
  std::int64_t dim = 256;
  std::int64_t layers = 6;
  std::int64_t heads = 8;
  std::int64_t kv_heads = 0;  // 0: as many as heads
  std::int64_t head_dim = 0;  // 0: dim / heads
  std::int64_t ffn = 0;       // 0: 4 * dim. vgg: of the classifier's two hidden layers; 0: 64 * width
  std::int64_t vocab = 4096;
  std::int64_t positions = 1024;  // longest sequence
  double rope_theta = 10000;
  double norm_eps = 1e-5;
  double dropout = 0;
  bool tied = false;  // the output product uses the embedding's weight
  // llama and gpt2: blocks on two streams, whose inputs backward makes again from their outputs.
  bool reversible = false;

  // mlp: 0 reads tokens through an embedding of `vocab` rows, otherwise vectors of this length, sorted into `classes`.
  std::int64_t inputs = 0;
  std::int64_t classes = 1000;

  // vgg: squares of `image` pixels; output channels of each 3x3 convolution, 0 for a pooling that halves the square (none:
  // those of VGG16, from `width` channels up); `pool` is the side of the square that the classifier sees.
  std::int64_t image = 224;
  std::int64_t channels = 3;
  std::int64_t pool = 7;
  std::int64_t width = 64;
  std::vector<std::int64_t> convolutions{};

  AdapterSpec adapter{};

  // Columns of the logits.
  std::int64_t outputs() const { return type == ModelType::vgg || (type == ModelType::mlp && inputs) ? classes : vocab; }
};

BONFIRE_API const char* name_of(ModelType type);
// Throws ConfigError for a name that is not one of llama, gpt2, vgg, mlp.
BONFIRE_API ModelType model_type(std::string_view name);

// A published shape: gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m, llama2-7b, llama2-13b, llama2-70b, llama3-8b, llama3-70b,
// vgg11, vgg13, vgg16, vgg19. Throws ConfigError for another name.
BONFIRE_API ModelSpec published_model(std::string_view name);
BONFIRE_API std::vector<std::string> published_model_names();

// The spec with the values that 0 and empty stand for. Throws ConfigError that names the first key that is impossible.
BONFIRE_API ModelSpec resolve(const ModelSpec& spec);

enum class InitKind { zeros, ones, normal };

struct Init {
  InitKind kind = InitKind::zeros;
  double deviation = 0;  // of a normal
};

// Rows [begin, begin + rows) of a parameter are known outside (Hugging Face, torchvision) under this name.
struct PublicSlice {
  std::string name{};
  std::int64_t begin = 0;
  std::int64_t rows = 0;
  bool transposed = false;  // stored [in, out] outside, [out, in] here
};

// How the ranks along the mesh's tensor axis divide a parameter among them. What is whole, each of them has.
enum class Split { whole, rows, columns };

// Which part of a model's layers a rank holds, of all that divide them.
struct TensorPart {
  int rank = 0;
  int ranks = 1;
  bool sequence = false;  // what lies between the split products is divided along the sequence
  int chunks = 1;         // into how many a product and the exchange beside it are cut

  // Part `of` its `ranks` equal parts, or as equal as they can be: where this rank's begins.
  std::int64_t begin(std::int64_t count, int of) const { return count * of / ranks; }
  std::int64_t begin(std::int64_t count) const { return begin(count, rank); }
  std::int64_t end(std::int64_t count) const { return begin(count, rank + 1); }
  std::int64_t length(std::int64_t count) const { return end(count) - begin(count); }
};

struct ParameterDescription {
  std::string name{};  // path inside the Unit: "attention.qkv.weight"
  std::vector<std::int64_t> shape{};
  Init init{};
  bool trained = true;
  std::vector<PublicSlice> slices{};  // in order of rows; together they are the whole parameter
  Split split = Split::whole;
  // Of a packed weight whose rows are split: the rows of each of the weights in it, which are split by themselves. Empty: it
  // is one.
  std::vector<std::int64_t> parts{};
  // Of a rank's part: the shape of all, and where in it the part lies (see Placement). Empty: this is all of it.
  std::vector<std::int64_t> whole{};
  std::vector<Box> boxes{};

  BONFIRE_API std::int64_t elements() const;
};

enum class UnitKind { root, embedding, block, head };

// What of a Unit's forward runs again in backward, so that what it makes is not kept: nothing; what goes into its activation
// and its q, k and v; all of it.
enum class Recompute { none, selective, full };

// One Unit. Costs are per token and per element of the compute type, so that the caller chooses sequence and precision.
struct UnitDescription {
  std::string name{};  // path inside the model: "blocks.3"; empty for the root
  UnitKind kind = UnitKind::block;
  std::vector<ParameterDescription> parameters{};  // in the order of the module's parameters()
  std::vector<std::string> shared{};               // the root's parameters that this Unit reads as well: tied weights

  double product_flops = 0;                 // of matrix products and convolutions in forward
  double attention_flops_per_position = 0;  // in forward, for each earlier position that a token attends to
  std::int64_t saved_elements = 0;          // kept from forward for backward
  std::int64_t saved_statistics = 0;        // 4-byte numbers kept as well, whatever the compute type
  std::int64_t saved_casts = 0;             // kept as well where the compute type is not that of the data, fp32
  std::int64_t output_elements = 0;         // what the next Unit receives
  // The most that backward has beside the gradient of the output and what is still kept: more than that by so much.
  std::int64_t working_elements = 0;
  // The same while the gradient of a weight is made, which may need memory of its own size (not per token).
  std::int64_t working_beside_weight = 0;
  std::int64_t weight_elements = 0;
  bool weight_apart = false;  // its gradient is always made in memory of its own
  Recompute recompute = Recompute::none;

  BONFIRE_API std::int64_t parameter_elements() const;
  // Work of a token's forward in a causal sequence of this length. Backward is twice that.
  BONFIRE_API double forward_flops(std::int64_t sequence) const;
  // Bytes that a token's forward keeps for backward.
  BONFIRE_API std::int64_t activation_bytes(std::int64_t element_bytes) const;
};

struct ModelDescription {
  ModelSpec spec;                        // resolved
  std::vector<UnitDescription> units{};  // forward order; the root comes first where it holds parameters itself
  std::int64_t constant_bytes = 0;       // of tables that are made once
  TensorPart tensor{};                   // of which rank this is

  BONFIRE_API std::int64_t parameter_elements() const;
  BONFIRE_API const UnitDescription& unit(std::string_view name) const;
};

// The Units that follow each other in forward: all but the root, which only holds what others share.
BONFIRE_API std::vector<std::string> chain_of(const ModelDescription& model);
// Units [begin, end) of the chain as a model of its own, under their own names: a stage of a pipeline. The root comes along
// where one of them shares something of it.
BONFIRE_API ModelDescription part_of(const ModelDescription& model, int begin, int end);

// Resolves `spec`, then lists its Units.
BONFIRE_API ModelDescription describe(const ModelSpec& spec);
// The same of one of several ranks that split its layers: shapes and costs are those of its part, but `spec` is all of the
// model's. Throws ConfigError where so many ranks cannot, which begins with the key that stands against it.
BONFIRE_API ModelDescription describe(const ModelSpec& spec, const TensorPart& part);

// The heads of attention that a rank has.
struct HeadsPart {
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  int sharing = 1;  // ranks that have the same head of keys and values, of which each makes some rows
};
BONFIRE_API HeadsPart heads_of(const ModelSpec& resolved, const TensorPart& part);

// Where a parameter of a description lies in the whole model, as far as it is split.
BONFIRE_API Placement placement_in(const ModelDescription& model, const ParameterDescription& parameter);

}  // namespace bonfire::plan
