#include "bonfire/shard/reduction.h"

#include <vector>

#include <ATen/core/grad_mode.h>

#include "bonfire/shard/powersgd.h"

namespace bonfire {
namespace {

class Average final : public Reduction {
 public:
  explicit Average(Group replicas) : replicas_(std::move(replicas)) {}

  void begin(std::size_t bucket, FlatParameter& flat) override {
    works_.resize(std::max(works_.size(), bucket + 1));
    for (const auto& share : flat.trained()) works_[bucket].push_back(replicas_.all_reduce(share.gradient, Reduce::average));
  }
  void end(std::size_t bucket, FlatParameter&) override {
    for (auto& work : works_.at(bucket)) work.wait();
    works_[bucket].clear();
  }
  void reset() override { works_.clear(); }

 private:
  Group replicas_;
  std::vector<std::vector<Work>> works_;
};

// Gradients travel in two bytes each. They are divided before they are rounded, so that a sum of fp16 does not overflow.
class Rounded final : public Reduction {
 public:
  Rounded(Group replicas, at::ScalarType wire) : replicas_(std::move(replicas)), wire_(wire) {}

  void begin(std::size_t bucket, FlatParameter& flat) override {
    const at::NoGradGuard no_grad;
    buckets_.resize(std::max(buckets_.size(), bucket + 1));
    for (const auto& share : flat.trained()) {
      auto rounded = share.gradient.div(replicas_.size()).to(wire_);
      auto work = replicas_.all_reduce(rounded, Reduce::sum);
      buckets_[bucket].push_back({std::move(work), std::move(rounded)});
    }
  }

  void end(std::size_t bucket, FlatParameter& flat) override {
    const at::NoGradGuard no_grad;
    auto& parts = buckets_.at(bucket);
    for (std::size_t at = 0; at < parts.size(); ++at) {
      parts[at].work.wait();
      flat.trained()[at].gradient.copy_(parts[at].rounded);
    }
    parts.clear();
  }
  void reset() override { buckets_.clear(); }

 private:
  struct Part {
    Work work;
    at::Tensor rounded;
  };
  Group replicas_;
  at::ScalarType wire_;
  std::vector<std::vector<Part>> buckets_;
};

}  // namespace

std::shared_ptr<Reduction> make_reduction(const Group& replicas, const ReductionOptions& options) {
  switch (options.compression) {
    case plan::Compression::none: return std::make_shared<Average>(replicas);
    case plan::Compression::bf16: return std::make_shared<Rounded>(replicas, at::kBFloat16);
    case plan::Compression::fp16: return std::make_shared<Rounded>(replicas, at::kHalf);
    case plan::Compression::powersgd: return std::make_shared<PowerSgd>(replicas, options.powersgd_rank);
  }
  return nullptr;
}

}  // namespace bonfire
