#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/nn/unit.h"
#include "bonfire/shard/equality.h"
#include "bonfire/shard/settings.h"

namespace bonfire {

// What a build scope has made of a Unit, until shard() adopts it.
struct PreparedUnit {
  std::unique_ptr<FlatParameter> flat;
  std::vector<at::ScalarType> own;  // the types that the parameters were given in, by segment

  // Which segment is this tensor's.
  std::optional<std::size_t> segment(const at::Tensor& parameter) const;
};

// A Unit that has just been constructed, to be given its first values.
struct BuiltUnit {
  std::int64_t number = 0;  // Units are counted as their constructors end, the inner ones first: alike for every layout
  std::string type;
  std::vector<NamedTensor> parameters;  // its own, by their names in it; those of Units inside it came with them
};
using InitUnit = std::function<void(const BuiltUnit& unit)>;

// A scope for a model that is too big to be built first: each Unit that is constructed in it is sharded before its
// constructor returns, so that a rank never holds more than its shares and the Unit that is being built. shard() with the
// same mesh and options then adopts them. Initialise a Unit's parameters in its constructor, or by `init`, which is called
// for every Unit before it is sharded, and where nothing is; with Start::broadcast they become rank 0's. On a GPU each Unit
// is moved there first. With options under which a rank holds the whole model, nothing else happens here.
//
//   std::optional<bonfire::Build> build(std::in_place, mesh, options);
//   auto model = MyModel(...);
//   build.reset();
//   auto engine = bonfire::shard(mesh, model, options);
//
// Names that options ask about (Precision::keep, placement) are those inside the Unit. Collective: all ranks build the same
// Units in the same order.
class BONFIRE_API Build final : private UnitObserver {
 public:
  Build(const DataGroups& groups, const ShardOptions& options, InitUnit init = {});

 private:
  void constructed(UnitSeam& unit) override;
  void initialize(UnitSeam& unit, bool again);
  void prepare(UnitSeam& unit);

  ShardSettings settings_;
  InitUnit init_;
  // What is known of a parameter. One that is gone is not mistaken for another in its place.
  struct Known {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    bool initialized = false;
    std::string owner{};  // the type of the Unit that took it
  };
  Known& known(const at::Tensor& parameter);

  std::int64_t built_ = 0;
  std::unordered_map<const UnitSeam*, std::int64_t> numbers_;
  std::unordered_map<const c10::TensorImpl*, Known> known_;
  ObserveUnits observing_;
};

}  // namespace bonfire
