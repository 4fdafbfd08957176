#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/plan/box.h"
#include "bonfire/plan/placement.h"

// The state of a training run by its public names, however it is divided: what is saved, and what is loaded into the same
// layout or another.
namespace bonfire {

class Shares;

// Consecutive elements of a box of a tensor, counted row by row, that this rank holds. It can be used until the layout
// changes: until the next forward, backward or step.
class BONFIRE_API Slice {
 public:
  // Both of elements [at, at + values.numel()) of the slice; `values` is 1-D, of any dtype and device, and converted.
  using Access = std::function<void(std::int64_t at, const at::Tensor& values)>;

  std::string name;  // the path of the parameter or buffer in the whole model; empty: of none in particular
  std::string kind;  // "value", "buffer", or the name of a piece of optimizer state: "exp_avg", "step"
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;  // of the whole tensor
  Box box;
  std::int64_t begin = 0, length = 0;  // in elements of the box
  // Several ranks may hold the same elements: the number of this rank among them. To save each element once, take those
  // of number 0; or share the work among the first `copies`, which are all there are but for further stages' copies of tied
  // weights.
  int copy = 0, copies = 1;
  // The first dimension counts ranks, each of which has values of its own, one of `box`. Where another number of ranks has
  // saved them, each rank gets their mean.
  bool of_each_rank = false;
  Access get, set;

  // Fills `values`, which begins at element `at` of this slice.
  void read(std::int64_t at, const at::Tensor& values) const;
  at::Tensor read() const;  // all of it, on the host
  // The owner's slices_written() comes after the last write.
  void write(std::int64_t at, const at::Tensor& values) const;

 private:
  void require_inside(std::int64_t at, const at::Tensor& values) const;
};

// Accesses of a 1-D tensor; writes go to `also` as well, where that is defined.
BONFIRE_API Slice::Access getter(at::Tensor from);
BONFIRE_API Slice::Access setter(at::Tensor to, at::Tensor also = {});

// Slices of a parameter that lies so in the whole model, of `values`: its elements from `first` on. Writes go to `also` as
// well, where that is defined. Whoever asks says of what kind they are, and who else has them.
BONFIRE_API std::vector<Slice> slices_of(const plan::Placement& placement, std::int64_t first, const at::Tensor& values,
                                         const at::Tensor& also = {});

// Slices whose kind begins so say how a run has come to where it is. With them it goes on to the same bit; without, or where
// the layout is another, just as well.
inline constexpr const char* hint_prefix = "hint.";
inline bool is_hint(const std::string& kind) { return kind.starts_with(hint_prefix); }

// Whatever has state that outlives a run: Engine, Pipeline, Optimizer.
class BONFIRE_API Sliced {
 public:
  virtual ~Sliced();
  // Every piece of state on this rank. Collective.
  virtual std::vector<Slice> slices() = 0;
  // Some of them were written: all that follows from them is brought up to date. Collective.
  virtual void slices_written() = 0;
};

// The values of all parameters of `shares`: masters where forward reads a rounded copy.
BONFIRE_API std::vector<Slice> parameter_slices(const Shares& shares);
// They were written. Collective.
BONFIRE_API void parameters_written(Shares& shares);

}  // namespace bonfire
