#pragma once

#include <memory>
#include <string>

#include "bonfire/models/model.h"
#include "bonfire/models/parameter_maker.h"
#include "bonfire/nn/parallel_layers.h"
#include "bonfire/nn/reversible.h"
#include "bonfire/nn/unit.h"

// The Units that models consist of. Their parameters are described in bonfire/plan/describe.cpp.
namespace bonfire {

// What the Units of one model share.
struct UnitContext {
  const plan::ModelSpec& spec;
  const plan::TensorPart& part;
  const BuildOptions& build;
  std::shared_ptr<DropoutState> dropout;
  RotaryTable rotary{};
  std::shared_ptr<ReversibleChain> chain{};  // of the blocks of a reversible model
  at::Tensor tied{};                         // the root's weight, where embedding and head share it
};

// A dropout in region `region` of a Unit.
Dropout dropout_in(const UnitContext& context, const plan::UnitDescription& unit, const char* region);

// Rows for tokens, plus learned positions where there are any: twice, one behind the other, for the two streams of a
// reversible model.
class TokenEmbeddingImpl : public Layer, public GradientSlots {
 public:
  TokenEmbeddingImpl(const UnitContext& context, const plan::UnitDescription& unit);
  at::Tensor forward(at::Tensor tokens) override;
  std::shared_ptr<GradientSink>* slot(const at::Tensor& parameter) override;

 private:
  at::Tensor embed(at::Tensor tokens);

  nn::Embedding tokens_{nullptr};
  std::shared_ptr<nn::ParallelEmbeddingImpl> split_;  // the same, where ranks have parts of it
  TensorRanks ranks_;
  std::shared_ptr<DropoutState> state_;
  bool tied_;  // then the root holds the weight, and `tokens_` is no child
  bool two_streams_;
  at::Tensor positions_;
  Dropout dropout_;
};
BONFIRE_UNIT(TokenEmbedding);

// Vectors into the model's width.
class VectorEmbeddingImpl : public Layer {
 public:
  VectorEmbeddingImpl(const UnitContext& context, const plan::UnitDescription& unit);
  at::Tensor forward(at::Tensor x) override;

 private:
  nn::Linear linear_{nullptr};
};
BONFIRE_UNIT(VectorEmbedding);

// Attention and feed-forward on a residual stream, each behind its norm: Llama's and GPT-2's block. On two streams where the
// model is reversible.
class TransformerBlockImpl : public Layer {
 public:
  TransformerBlockImpl(const UnitContext& context, const plan::UnitDescription& unit);
  at::Tensor forward(at::Tensor x) override;

 private:
  nn::Norm attention_norm_{nullptr}, feed_norm_{nullptr};
  nn::Attention attention_{nullptr};
  nn::FeedForward feed_{nullptr};
  std::shared_ptr<ReversibleChain> chain_;  // null: there is one stream
  std::shared_ptr<DropoutState> random_;
};
BONFIRE_UNIT(TransformerBlock);

// x + down(gelu(up(x))).
class MlpBlockImpl : public Layer {
 public:
  MlpBlockImpl(const UnitContext& context, const plan::UnitDescription& unit);
  at::Tensor forward(at::Tensor x) override;

 private:
  nn::FeedForward feed_{nullptr};
};
BONFIRE_UNIT(MlpBlock);

// A 3x3 convolution, a rectifier, and the poolings that follow it.
class ConvolutionImpl : public Layer {
 public:
  ConvolutionImpl(const UnitContext& context, const plan::UnitDescription& unit, int poolings);
  at::Tensor forward(at::Tensor x) override;

 private:
  at::Tensor weight_, bias_;
  int poolings_;
};
BONFIRE_UNIT(Convolution);

// A hidden layer of VGG's classifier. The first of them flattens the image, averaged to squares of `pool`.
class ClassifierImpl : public Layer {
 public:
  ClassifierImpl(const UnitContext& context, const plan::UnitDescription& unit);
  at::Tensor forward(at::Tensor x) override;

 private:
  nn::Linear linear_{nullptr};
  std::int64_t pool_;
  Dropout dropout_;
};
BONFIRE_UNIT(Classifier);

// Norm (where there is one), product with the output weight, loss. Of two streams it takes the mean.
class OutputHeadImpl : public Head, public GradientSlots {
 public:
  OutputHeadImpl(const UnitContext& context, const plan::UnitDescription& unit);
  at::Tensor forward(at::Tensor x, at::Tensor target) override;
  std::shared_ptr<GradientSink>* slot(const at::Tensor& parameter) override;

 private:
  nn::Norm norm_{nullptr};
  nn::Linear output_{nullptr};
  std::shared_ptr<nn::ParallelOutputImpl> split_;  // the same, where ranks have parts of it
  TensorRanks ranks_;
  ContextRanks context_;
  bool tied_;  // then the root holds the weight, and `output_` is no child
  bool two_streams_;
};
BONFIRE_UNIT(OutputHead);

}  // namespace bonfire
