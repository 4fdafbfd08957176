#include "bonfire/models/model.h"

#include <algorithm>
#include <charconv>

#include "bonfire/base/error.h"
#include "bonfire/models/parameter_maker.h"
#include "bonfire/models/units.h"
#include "bonfire/nn/recompute.h"

namespace bonfire {
namespace {

template <class Holder, class... Arguments>
std::shared_ptr<Layer> layer(Arguments&&... arguments) {
  return Holder(std::forward<Arguments>(arguments)...).ptr();
}

// Poolings that belong to each convolution.
std::vector<int> poolings_of(const plan::ModelSpec& spec) {
  std::vector<int> poolings;
  for (const std::int64_t channels : spec.convolutions)
    if (channels)
      poolings.push_back(0);
    else
      ++poolings.back();
  return poolings;
}

std::size_t number_of(const std::string& digits) {
  std::size_t number = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return number;
}

class StackedModelImpl : public Model {
 public:
  StackedModelImpl(plan::ModelDescription description, const BuildOptions& build);

  at::Tensor forward(at::Tensor input, at::Tensor target) override {
    at::Tensor x = std::move(input);
    for (const auto& layer : layers_) x = layer->forward(std::move(x));
    return head_ ? head_->forward(std::move(x), std::move(target)) : x;
  }

 private:
  std::shared_ptr<Layer> make_block(const UnitContext& context, const plan::UnitDescription& unit, std::size_t number) const;

  RecomputedUnits recomputed_;
};
BONFIRE_UNIT(StackedModel);

StackedModelImpl::StackedModelImpl(plan::ModelDescription description, const BuildOptions& build) {
  description_ = std::move(description);
  const plan::ModelSpec& spec = description_.spec;
  dropout_->seed = Random(build.seed).fork("dropout");
  dropout_->context = build.context.part();
  UnitContext context{.spec = spec, .part = description_.tensor, .build = build, .dropout = dropout_};
  if (spec.type == plan::ModelType::llama) {
    const auto table_type = build.dtype == at::kDouble ? at::kDouble : at::kFloat;
    context.rotary = rotary_table({.positions = spec.positions, .head_dim = spec.head_dim, .theta = spec.rope_theta},
                                  at::TensorOptions(table_type).device(build.device));
  }
  if (spec.reversible) context.chain = std::make_shared<ReversibleChain>();
  const auto blocks = std::make_shared<torch::nn::Module>("blocks");
  for (const auto& unit : description_.units) {
    switch (unit.kind) {
      case plan::UnitKind::root: {
        ParameterMaker maker(unit, build);
        const at::Tensor tokens = maker.take("tokens");
        context.tied = register_parameter("tokens", tokens, tokens.requires_grad());
        maker.finish();
        break;
      }
      case plan::UnitKind::embedding:
        layers_.push_back(spec.inputs ? layer<VectorEmbedding>(context, unit) : layer<TokenEmbedding>(context, unit));
        register_module("embedding", layers_.back());
        break;
      case plan::UnitKind::block: {
        const std::string number = unit.name.substr(unit.name.rfind('.') + 1);
        layers_.push_back(make_block(context, unit, number_of(number)));
        blocks->register_module(number, layers_.back());
        break;
      }
      case plan::UnitKind::head: head_ = OutputHead(context, unit).ptr(); break;
    }
  }
  if (!blocks->children().empty()) register_module("blocks", blocks);
  if (head_) register_module("head", head_);
  // What a model of ours draws comes from its own dropout.
  recomputed_ = RecomputedUnits(*this,
                                [this](const std::string& path, torch::nn::Module&) {
                                  return std::any_of(description_.units.begin(), description_.units.end(),
                                                     [&](const plan::UnitDescription& unit) {
                                                       return unit.name == path && unit.recompute == plan::Recompute::full;
                                                     });
                                },
                                {.torch_random = false, .host = build.host_inputs});
}

std::shared_ptr<Layer> StackedModelImpl::make_block(const UnitContext& context, const plan::UnitDescription& unit,
                                                    std::size_t number) const {
  switch (context.spec.type) {
    case plan::ModelType::llama:
    case plan::ModelType::gpt2: return layer<TransformerBlock>(context, unit);
    case plan::ModelType::mlp: return layer<MlpBlock>(context, unit);
    case plan::ModelType::vgg: break;
  }
  const auto poolings = poolings_of(context.spec);
  if (number < poolings.size()) return layer<Convolution>(context, unit, poolings[number]);
  return layer<Classifier>(context, unit);
}

}  // namespace

void Model::set_dropout(std::uint64_t step, std::int64_t first_sample) {
  dropout_->step = step;
  dropout_->first_sample = first_sample;
}

void Model::set_documents(const at::Tensor& starts) {
  if (starts.defined() || dropout_->documents->separate()) dropout_->documents = std::make_shared<Documents>(starts);
}

void Model::train(bool on) {
  torch::nn::Module::train(on);
  dropout_->training = on;
}

std::vector<PublicParameter> Model::public_parameters() const {
  require(description_.tensor.ranks == 1, "public parameters of part {} of {}: their tensors are on several ranks",
          description_.tensor.rank, description_.tensor.ranks);
  const auto inside = named_parameters();
  std::vector<PublicParameter> out;
  for (const auto& unit : description_.units)
    for (const auto& parameter : unit.parameters) {
      const std::string path = unit.name.empty() ? parameter.name : unit.name + "." + parameter.name;
      const at::Tensor tensor = inside[path].detach();
      for (const auto& slice : parameter.slices) {
        const at::Tensor rows = tensor.narrow(0, slice.begin, slice.rows);
        out.push_back({slice.name, slice.transposed ? rows.t() : rows, path});
      }
    }
  return out;
}

std::shared_ptr<Model> build_model(const plan::ModelSpec& spec, const BuildOptions& options) {
  return build_model(plan::describe(spec), options);
}

std::shared_ptr<Model> build_model(plan::ModelDescription description, const BuildOptions& options) {
  const auto& [rank, ranks, sequence, chunks] = description.tensor;
  require(ranks == options.tensor.group.size() && rank == options.tensor.group.rank() &&
              sequence == options.tensor.sequence && chunks == options.tensor.chunks,
          "a description of part {} of {} for rank {} of {} that split layers", rank, ranks, options.tensor.group.rank(),
          options.tensor.group.size());
  const auto type = description.spec.type;
  if (options.context.split() && type != plan::ModelType::llama && type != plan::ModelType::gpt2)
    fail_config("a {} over {} ranks that share samples; allowed: llama | gpt2", plan::name_of(type),
                options.context.group.size());
  return StackedModel(std::move(description), options).ptr();
}

}  // namespace bonfire
