#include "bonfire/optim/conveyor.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/side_stream.h"

namespace bonfire {
void Conveyor::Lane::open(at::Device device, std::int64_t tray_bytes) {
  if (!stream) stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  for (auto& tray : trays) {
    if (!tray.copied) tray.copied = std::make_unique<c10::Event>(device.type());
    if (tray_bytes == 0 || (tray.bytes.defined() && tray.bytes.numel() >= tray_bytes)) continue;
    tray.copied->synchronize();
    tray.bytes = at::empty({tray_bytes}, at::TensorOptions(at::kByte).pinned_memory(true));
  }
}

at::Tensor Conveyor::Lane::tray(std::size_t load, const at::Tensor& like) const {
  return trays[load % 2].bytes.narrow(0, 0, static_cast<std::int64_t>(like.nbytes())).view(like.scalar_type());
}

void Conveyor::Lane::copy(std::size_t load, const at::Tensor& to, const at::Tensor& from) {
  const c10::StreamGuard guard(*stream);
  to.copy_(from, /*non_blocking=*/true);
  trays[load % 2].copied->record(*stream);
}

void Conveyor::Lane::await(std::size_t load) const { trays[load % 2].copied->synchronize(); }

bool Conveyor::moves(const Load& load, const at::Tensor& tensor) {
  return tensor.defined() && tensor.device() != load.home.device();
}

bool Conveyor::is_copy(const Load& load) { return load.out.scalar_type() == load.home.scalar_type(); }

void Conveyor::begin(std::vector<Load> loads) {
  loads_ = std::move(loads);
  next_ = 0;
  sent_.reset();
  std::optional<at::Device> device;
  std::int64_t in_bytes = 0, out_bytes = 0;
  for (const auto& load : loads_) {
    if (!moves(load, load.in) && !moves(load, load.out)) continue;
    require(load.home.device().is_cpu(),
            "an update on {} was given tensors of another device; allowed: on {}, or an update "
            "on the host",
            load.home.device().str(), load.home.device().str());
    if (moves(load, load.in)) {
      device = load.in.device();
      in_bytes = std::max(in_bytes, static_cast<std::int64_t>(load.in.nbytes()));
    }
    if (moves(load, load.out)) {
      device = load.out.device();
      out_bytes = std::max(out_bytes, is_copy(load) ? 0 : static_cast<std::int64_t>(load.out.nbytes()));
    }
  }
  if (!device) return;
  c10::Event ready(device->type());
  ready.record(current_stream(*device));
  for (auto [lane, bytes] : {std::pair(&in_, in_bytes), std::pair(&out_, out_bytes)}) {
    lane->open(*device, bytes);
    ready.block(*lane->stream);
  }
  fetch(0);
}

void Conveyor::fetch(std::size_t at) {
  if (at >= loads_.size() || !moves(loads_[at], loads_[at].in)) return;
  in_.copy(at, in_.tray(at, loads_[at].in), loads_[at].in);
}

Conveyor::Piece Conveyor::next() {
  const std::size_t at = next_++;
  const auto& load = loads_[at];
  fetch(at + 1);
  Piece piece{load.in, load.out};
  if (moves(load, load.in)) {
    in_.await(at);
    piece.in = in_.tray(at, load.in);
  }
  if (moves(load, load.out)) {
    piece.out.reset();
    if (!is_copy(load)) {
      out_.await(at);
      piece.out = out_.tray(at, load.out);
    }
  }
  return piece;
}

void Conveyor::send() {
  const std::size_t at = next_ - 1;
  const auto& load = loads_[at];
  if (!moves(load, load.out)) return;
  out_.copy(at, load.out, is_copy(load) ? load.home : out_.tray(at, load.out));
  sent_ = at;
}

void Conveyor::flush() {
  if (sent_) out_.trays[*sent_ % 2].copied->block(current_stream(loads_[*sent_].out.device()));
}

void Conveyor::end() {
  flush();
  loads_.clear();
  sent_.reset();
}

}  // namespace bonfire
