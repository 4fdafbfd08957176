#include <exception>
#include <utility>

#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"
#include "bonfire/shard/engine_state.h"

// A scope in which all parameters of an engine are whole.
namespace bonfire {
namespace {

// Of each flat parameter, whether some rank has to gather it. Collective.
std::vector<bool> out_somewhere(Engine::State& state) {
  const auto& flats = state.flats.flats();
  const bool met = state.driver->meet();
  std::vector<bool> out;
  for (const auto& flat : flats) {
    // In with older values, for a backward that is to come.
    if (flat->present() && flat->present_generation() != flat->generation()) flat->let_go();
    out.push_back(!flat->present());
  }
  // Between passes, and where a schedule says what is in, ranks hold the same.
  if (!met) return out;
  auto seen = at::zeros({static_cast<std::int64_t>(flats.size())}, at::kFloat);
  for (std::size_t at = 0; at < flats.size(); ++at) seen.data_ptr<float>()[at] = flats[at]->present() ? 0 : 1;
  seen = seen.to(state.flats.pool().device());
  state.settings.groups.shards.all_reduce(seen, Reduce::max).wait();
  seen = seen.cpu();
  for (std::size_t at = 0; at < flats.size(); ++at) out[at] = seen.data_ptr<float>()[at] > 0;
  return out;
}

}  // namespace

struct Engine::FullParameters::Stay {
  explicit Stay(std::shared_ptr<State> of) : state(std::move(of)), pool(state->flats.pool().device()) {}
  // Also where the scope could not begin, because memory ran out halfway.
  ~Stay() {
    for (auto* flat : pinned) flat->unpin();
    for (auto* flat : came) {
      try {
        flat->await();
      } catch (const std::exception&) {
        // Somebody has heard of it, where it could not begin.
      }
      flat->let_go();
    }
  }

  std::shared_ptr<State> state;
  bool write = false;
  BufferPool pool;                               // lives for the stay only
  std::vector<FlatParameter*> pinned{}, came{};  // `came`: those that were not in before
};

Engine::FullParameters::FullParameters(std::unique_ptr<Stay> stay) : stay_(std::move(stay)) {}
Engine::FullParameters::FullParameters(FullParameters&&) noexcept = default;
Engine::FullParameters::~FullParameters() {
  if (!stay_ || !stay_->write) return;
  for (auto* flat : stay_->pinned) flat->take_values();
  stay_->state->flats.layout().note_writes();
}

Engine::FullParameters Engine::full_parameters(bool write) {
  for (const auto& flat : flats())
    for (const auto& segment : flat->layout().segments)
      require(!write || segment.scales == 0,
              "Engine::full_parameters, to be changed: parameter '{}' is held in eight bits, which are scaled anew in every "
              "update; change it before shard()",
              segment.name);
  auto stay = std::make_unique<FullParameters::Stay>(state_);
  const auto out = out_somewhere(*state_);
  for (std::size_t at = 0; at < flats().size(); ++at) {
    auto& flat = flats()[at];
    const FlatParameter::Source source{.group = state_->settings.groups.gathers};
    if (!flat->present()) {
      stay->came.push_back(flat.get());
      flat->bring_in(stay->pool, source);
    } else if (out[at]) {
      flat->take_part(stay->pool, source);
    }
    flat->pin();
    stay->pinned.push_back(flat.get());
  }
  state_->flats.await();
  stay->write = write;
  return FullParameters(std::move(stay));
}

}  // namespace bonfire
