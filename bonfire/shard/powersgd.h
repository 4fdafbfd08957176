#pragma once

#include <vector>

#include "bonfire/shard/reduction.h"

namespace bonfire {

// PowerSGD (Vogels, Karimireddy, Jaggi 2019): the gradient of each matrix travels as two thin factors, found by one step of
// power iteration that starts from the last one's result; what the factors miss is added to the next gradient. What is not a
// matrix, or would not become smaller, travels as it is beside the left factors.
class PowerSgd final : public Reduction {
 public:
  PowerSgd(Group replicas, int rank) : replicas_(std::move(replicas)), rank_(rank) {}

  void begin(std::size_t bucket, FlatParameter& flat) override;
  void advance(std::size_t bucket, FlatParameter& flat) override;
  void end(std::size_t bucket, FlatParameter& flat) override;
  void spent(const GradientUse& use) override;
  std::vector<Carried> carried(std::size_t bucket, const FlatParameter& flat) override;
  void reset() override { buckets_.clear(); }

 private:
  struct Matrix {
    std::size_t segment;
    plan::LowRank size;
    at::Tensor left, right;  // views of the bucket's buffers
    at::Tensor error;        // what was not sent yet
  };
  struct Plain {
    std::size_t segment;
    at::Tensor travelling;  // a view of the bucket's left buffer
  };
  struct Bucket {
    std::vector<Matrix> matrices;
    std::vector<Plain> plains;
    at::Tensor left, right;
    Work work;
  };

  Bucket& prepare(std::size_t bucket, const FlatParameter& flat);

  Group replicas_;
  int rank_;
  std::vector<Bucket> buckets_;
};

}  // namespace bonfire
