#include "bonfire/checkpoint/full_state.h"

#include <map>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <nlohmann/json.hpp>

#include "bonfire/checkpoint/rank_file.h"
#include "bonfire/checkpoint/scalar_types.h"
#include "bonfire/comm/hear.h"

namespace bonfire {
namespace {

// A piece of a tensor, and which of a rank's it is.
struct Held {
  int rank = 0;
  std::size_t number = 0;
  Piece piece{};
};

struct Whole {
  std::string name, kind;
  StoredType type = StoredType::f32;
  Shape shape{};
  std::vector<Held> held{};
};

std::string told(const std::vector<OwnPiece>& pieces) {
  auto list = nlohmann::json::array();
  for (const auto& [slice, first, count, values] : pieces)
    list.push_back({slice.name, slice.kind, name_of(stored_type(slice.dtype)), slice.shape, slice.box.begin, slice.box.end,
                    slice.begin + first, count});
  return list.dump();
}

// What all ranks hold, in the same order on all. Collective.
std::vector<Whole> all_of(const World& world, const std::vector<OwnPiece>& pieces) {
  std::vector<Whole> all;
  std::map<std::pair<std::string, std::string>, std::size_t> places;
  const auto said = told(pieces);
  for (int rank = 0; rank < world.size(); ++rank) {
    std::size_t number = 0;
    for (const auto& each : nlohmann::json::parse(hear(world.group(), said, rank, world.device()))) {
      const auto [place, fresh] = places.try_emplace({each[0], each[1]}, all.size());
      if (fresh)
        all.push_back(
            {.name = each[0], .kind = each[1], .type = *stored_type_of(each[2].get<std::string>()), .shape = each[3]});
      auto& whole = all[place->second];
      require(whole.shape == each[3].get<Shape>(), "ranks differ about the shape of {} ({})", whole.name, whole.kind);
      whole.held.push_back(
          {.rank = rank, .number = number++, .piece = {.box = {each[4], each[5]}, .first = each[6], .count = each[7]}});
    }
  }
  return all;
}

}  // namespace

void stream_state(const World& world, const std::vector<Sliced*>& tensors,
                  const std::function<void(StateTensor tensor)>& take, const FullStateOptions& options) {
  require(options.rank >= 0 && options.rank < world.size(), "rank {} of {} is to get the state", options.rank, world.size());
  std::vector<Slice> slices;
  for (auto* const sliced : tensors)
    for (auto& slice : sliced->slices())
      if (options.wanted ? options.wanted(slice.name, slice.kind) : !is_hint(slice.kind)) slices.push_back(std::move(slice));
  auto pieces = own_pieces(std::move(slices));
  const auto& group = world.group();
  const auto bytes_of_rank = at::TensorOptions(at::kByte).device(world.device());
  for (const auto& whole : all_of(world, pieces)) {
    const auto dtype = scalar_type(whole.type);
    const Piece all{.box = whole_box(whole.shape), .first = 0, .count = elements_of(whole_box(whole.shape))};
    at::Tensor values;
    if (world.rank() == options.rank) values = at::zeros({all.count}, dtype);
    for (const auto& held : whole.held) {
      at::Tensor part;
      if (held.rank == world.rank()) {
        part = at::empty({held.piece.count}, dtype);
        pieces[held.number].slice.read(pieces[held.number].first, part);
        if (held.rank != options.rank) group.send(part.view(at::kByte).to(world.device()), options.rank).wait();
      } else if (world.rank() == options.rank) {
        const auto arrived = at::empty({held.piece.count * bonfire::bytes_of(whole.type)}, bytes_of_rank);
        group.receive(arrived, held.rank).wait();
        part = arrived.cpu().view(dtype);
      }
      if (world.rank() != options.rank) continue;
      for_each_common_run(held.piece, all, [&](const CommonRun& run) {
        values.narrow(0, run.in_other, run.count).copy_(part.narrow(0, run.in_one, run.count));
      });
    }
    if (world.rank() == options.rank) take({whole.name, whole.kind, values.view(whole.shape)});
  }
}

std::vector<StateTensor> full_state(const World& world, const std::vector<Sliced*>& tensors,
                                    const FullStateOptions& options) {
  std::vector<StateTensor> all;
  stream_state(
      world, tensors, [&](StateTensor tensor) { all.push_back(std::move(tensor)); }, options);
  return all;
}

}  // namespace bonfire
