#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/group.h"
#include "bonfire/shard/reduction.h"

namespace bonfire {

class FlatParameter;

// What an optimizer updates on this rank: flat parameters, and of each the share that is the rank's own. An Engine is that
// of one module, a Pipeline that of all its stages on this rank.
class BONFIRE_API Shares {
 public:
  virtual ~Shares();

  struct Part {
    FlatParameter* flat = nullptr;
    // Parts of one stage have names of their own. Tied weights may have the same on several.
    int stage = 0;
  };
  // In the order of the update. They are the same until layout_version() changes.
  virtual std::vector<Part> parts() const = 0;
  virtual std::int64_t layout_version() const = 0;
  // The ranks over which each trained region is divided, into as many parts or into one.
  struct Division {
    Group ranks;
    int factor = 1;
    Group replicas{};  // the ranks with the same share, where there are parts
    int stage = 0;     // the first of this rank's stages
    int split = 0;     // this rank's place among those that split the layers

    // Of what belongs to the whole model: the first rank of the first stage tells it.
    int model_copy() const { return stage + split; }

    // The number of this rank among those that hold the same of what is divided by `of`, in a region with this copy number.
    int copy(int of, int region_copy) const;
    // How many ranks hold the same of one copy of such a region.
    int copies(int of) const;
  };
  virtual Division division() const = 0;
  virtual at::Device device() const = 0;

  // Sums `numbers`, which every rank has of its own parts and shares, over all of the model, in place. Collective.
  virtual void sum(at::Tensor& numbers) const = 0;

  // Throws unless the gradients are those of a whole step that no update has used yet. Collective where parameters are
  // sharded.
  virtual void require_gradients() const = 0;
  // The gradients have been used: the next backward starts from nothing.
  virtual void spend_gradients(const GradientUse& use = {}) = 0;
  // The shares of part `part` were updated: where others hold copies of them these are sent, while the caller goes on with
  // the next. `finish_update` ends that. Collective.
  virtual void updated(std::size_t part) = 0;
  virtual void finish_update() = 0;

 protected:
  Shares();
  Shares(Shares&& other) noexcept;
  Shares& operator=(Shares&& other) noexcept;
  // From now on whoever holds a SharesRef is told that they are gone.
  void end() { self_.reset(); }

 private:
  friend class SharesRef;
  std::shared_ptr<Shares*> self_;
};

// Stays with shares where they are moved, and knows when they are gone.
class BONFIRE_API SharesRef {
 public:
  explicit SharesRef(Shares& shares) : self_(shares.self_) {}
  // Throws where they are gone.
  Shares& get() const;

 private:
  std::weak_ptr<Shares*> self_;
};

}  // namespace bonfire
