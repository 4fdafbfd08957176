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
    works_[bucket] = replicas_.all_reduce(flat.gradient(), Reduce::average);
  }
  void end(std::size_t bucket, FlatParameter&) override { works_.at(bucket).wait(); }

 private:
  Group replicas_;
  std::vector<Work> works_;
};

// Gradients travel in two bytes each. They are divided before they are rounded, so that a sum of fp16 does not overflow.
class Rounded final : public Reduction {
 public:
  Rounded(Group replicas, at::ScalarType wire) : replicas_(std::move(replicas)), wire_(wire) {}

  void begin(std::size_t bucket, FlatParameter& flat) override {
    const at::NoGradGuard no_grad;
    buckets_.resize(std::max(buckets_.size(), bucket + 1));
    auto& [work, rounded] = buckets_[bucket];
    rounded = flat.gradient().div(replicas_.size()).to(wire_);
    work = replicas_.all_reduce(rounded, Reduce::sum);
  }

  void end(std::size_t bucket, FlatParameter& flat) override {
    const at::NoGradGuard no_grad;
    auto& [work, rounded] = buckets_.at(bucket);
    work.wait();
    flat.gradient().copy_(rounded);
    rounded.reset();
  }

 private:
  struct Bucket {
    Work work;
    at::Tensor rounded;
  };
  Group replicas_;
  at::ScalarType wire_;
  std::vector<Bucket> buckets_;
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
