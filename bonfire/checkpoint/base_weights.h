#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "bonfire/base/api.h"
#include "bonfire/base/stateful.h"
#include "bonfire/comm/world.h"

// Weights that a run reads and never changes: its checkpoints name them, and do not hold them.
namespace bonfire {

// Of all parameters and buffers of a checkpoint, with their names, types and shapes: whoever has saved them, and in whatever
// files. Reads all of them. Throws BrokenCheckpoint.
BONFIRE_API std::string checksum_of_weights(const std::filesystem::path& checkpoint,
                                            const std::function<void(std::uint64_t bytes)>& progress = {});

// What a checkpoint remembers of them, as a state of this name.
inline constexpr const char* base_state = "base";
struct BaseOfCheckpoint {
  std::string folder;    // where they were then
  std::string checksum;  // empty: it has all weights itself
};
BONFIRE_API BaseOfCheckpoint base_of(const std::filesystem::path& checkpoint);

// Among the states of a program's checkpoints: {.states = {{bonfire::base_state, &base}}}. A checkpoint over other weights
// is refused when it is loaded.
class BONFIRE_API BaseWeights final : public Stateful {
 public:
  // The folder of a checkpoint. The first rank reads it. Collective.
  BaseWeights(const World& world, const std::filesystem::path& checkpoint);

  State save() const override;
  void load(const State& state) override;
  const std::string& checksum() const { return checksum_; }

 private:
  std::string folder_, checksum_;
};

// Why weights with this checksum are not those of the checkpoint; empty: they are.
BONFIRE_API std::string other_base(const BaseOfCheckpoint& base, const std::string& folder, const std::string& checksum);

}  // namespace bonfire
