#include "bonfire/shard/flat_parameter.h"

#include <algorithm>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/shard/freed_storage.h"

namespace bonfire {
namespace {

// Zeros on `device`; on the host beside a GPU in memory that the GPU can copy from and to by itself.
at::Tensor fresh(std::int64_t elements, at::ScalarType type, at::Device device, at::Device beside) {
  const bool pinned = device.is_cpu() && !beside.is_cpu();
  return at::zeros({elements}, at::TensorOptions(type).device(device).pinned_memory(pinned));
}

// "parameter 'a' or another of the 3 that share its buffer".
std::string any_of(const plan::FlatLayout& layout) {
  const auto& segments = layout.segments;
  return fmt::format("parameter '{}'{}", segments.front().name,
                     segments.size() == 1 ? "" : fmt::format(" or another of the {} sharded with it", segments.size()));
}

}  // namespace

FlatParameter::FlatParameter(plan::FlatLayout layout, std::vector<at::Tensor> parameters, const FlatOptions& options)
    : layout_(std::move(layout)),
      options_(options),
      parameters_(std::move(parameters)),
      gradients_(layout_.regions.size()),
      codec_(layout_, parameters_.empty() ? at::Device(at::kCPU) : parameters_.front().device()),
      written_(parameters_.size()) {
  require(!parameters_.empty() && parameters_.size() == layout_.segments.size(),
          "a flat parameter of {} segments was given {} parameters", layout_.segments.size(), parameters_.size());
  const at::NoGradGuard no_grad;
  const auto device = parameters_.front().device();
  const auto held_on = options_.shard_device.value_or(device), masters_on = options_.master_device.value_or(device);
  const auto [optimizer, gradients, parts] = options_.factors;

  versions_.push_back(
      {.generation = options_.first_generation, .shard = fresh(layout_.bytes / parts, at::kByte, held_on, device)});
  hold(versions_.back().shard);
  held_whole_ = parts == 1 && held_on == device;
  always_present_ = held_whole_ && options_.versions == 1;
  storage_ = always_present_ ? shard_.storage()
                             : c10::Storage(c10::Storage::use_byte_size_t(), static_cast<std::size_t>(layout_.bytes),
                                            c10::DataPtr(nullptr, device), nullptr, /*resizable=*/false);
  present_ = always_present_;
  present_generation_ = options_.first_generation;
  for (const auto& region : layout_.regions) {
    const auto type = scalar_type(region.compute);
    auto whole = at::empty({0}, at::TensorOptions(type).device(device));
    whole.set_(storage_, region.begin / static_cast<std::int64_t>(c10::elementSize(type)), {region.elements}, {1});
    regions_.push_back(std::move(whole));
  }

  for (std::size_t at = 0; at < layout_.regions.size() && layout_.regions[at].trained; ++at) {
    const auto& region = layout_.regions[at];
    TrainedShare share{.region = at, .share = share_of(region, optimizer, options_.rank)};
    const auto own = own_part(share);
    const auto type = scalar_type(region.master);
    share.codec = region.codec();
    // Masters that lie elsewhere have a copy as well, rounded or not.
    if (share.codec == plan::Codec::same && (masters_on != held_on || options_.versions > 1))
      share.codec = plan::Codec::rounded;
    const bool apart = share.codec != plan::Codec::same;
    share.master = apart ? fresh(share.share.length, type, masters_on, device) : own;
    if (apart) share.copy = own;
    trained_.push_back(std::move(share));
  }

  for (std::size_t at = 0; at < parameters_.size(); ++at) {
    const auto& segment = layout_.segments[at];
    put_segment(held_[segment.region], share_of(layout_.regions[segment.region], parts, options_.rank), segment,
                codec_.begin(at, parameters_[at]));
    for (const auto& share : trained_)
      if (share.region == segment.region && share.copy.defined())
        put_segment(share.master, share.share, segment, parameters_[at]);
    views_.push_back(regions_[segment.region].narrow(0, segment.offset, segment.elements).view(parameters_[at].sizes()));
    parameters_[at].set_data(views_.back());
  }

  // Only now: the memory that the parameters came in has gone.
  for (auto& share : trained_) {
    const auto& region = layout_.regions[share.region];
    const auto type = options_.gradient.value_or(scalar_type(region.master));
    if (gradients == 1) {
      gradients_[share.region] = fresh(region.elements, type, device, device);
      share.gradient = gradients_[share.region].narrow(0, share.share.begin, share.share.length);
    } else {
      share.gradient = fresh(share.share.length, type, device, device);
    }
  }
  gradients_open_ = keeps_gradients_ = gradients == 1;
  if (always_present_) return;
  describe_freed();
  free_memory(storage_);
}

FlatParameter::~FlatParameter() {
  if (always_present_) return;
  // The pool's memory must not outlive its loan in somebody's tensor.
  set_freed_message(
      storage_,
      fmt::format("{} has no memory: it was sharded by an Engine that is gone; Engine::release() gives a module its "
                  "whole weights back before",
                  any_of(layout_)));
  free_memory(storage_);
}

void FlatParameter::rename(const plan::FlatLayout& layout) {
  layout_ = layout;
  if (!always_present_) describe_freed();
}

void FlatParameter::describe_freed() const {
  set_freed_message(
      storage_, fmt::format("{} was read while its memory is freed: outside of its Unit's forward and backward a sharded "
                            "parameter can be read, or saved, only inside Engine::full_parameters(), or whole on one "
                            "rank by full_state() and stream_state(), or by Checkpoints; move or convert a model with to() "
                            "before shard()",
                            any_of(layout_)));
}

// What is always held of the newest values lies here from now on.
void FlatParameter::hold(at::Tensor shard) {
  shard_ = std::move(shard);
  const int parts = options_.factors.parameters;
  held_.clear();
  for (const auto& region : layout_.regions)
    held_.push_back(shard_.narrow(0, region.begin / parts, region.bytes() / parts).view(scalar_type(region.compute)));
  for (auto& share : trained_)
    if (share.copy.defined()) share.copy = own_part(share);
}

// What is held of the newest values that this rank updates.
at::Tensor FlatParameter::own_part(const TrainedShare& share) const {
  const Share kept = share_of(layout_.regions[share.region], options_.factors.parameters, options_.rank);
  return held_[share.region].narrow(0, share.share.begin - kept.begin, share.share.length);
}

void FlatParameter::bring_in(BufferPool& pool, const Source& source) {
  if (present_) return;
  require(source.behind < static_cast<int>(versions_.size()), "'{}' is needed as it was {} updates ago; {} are kept",
          layout_.segments.front().name, source.behind, versions_.size());
  present_generation_ = version(source.behind).generation;
  const auto& held = version(source.behind).shard;
  if (held_whole_) {
    give_memory(storage_, held.mutable_data_ptr());
    present_ = true;
    return;
  }
  require(!source.kept || kept_, "'{}' is to be gathered from what was kept of it, and nothing was",
          layout_.segments.front().name);
  memory_ = pool.borrow(layout_.bytes, source.place);
  give_memory(storage_, memory_->data());
  present_ = true;
  if (source.kept) gathering_ = std::exchange(kept_, nullptr);
  const auto gather = [&] {
    gather_ = gather_into(memory_->bytes(layout_.bytes), source.group,
                          source.kept ? gathering_->bytes(layout_.bytes / source.group.size()) : held);
  };
  if (!source.beside || held.device() == storage_.device()) return gather();
  source.beside->run(gather);
  copied_ = source.beside->end();
}

void FlatParameter::take_part(BufferPool& pool, const Source& source) {
  if (held_whole_) return;
  await();
  const auto scratch = pool.borrow(layout_.bytes);
  const auto part = source.kept ? part_among(pool, source.group) : nullptr;
  gather_into(scratch->bytes(layout_.bytes), source.group,
              part ? part->bytes(layout_.bytes / source.group.size()) : version(source.behind).shard)
      .wait();
}

Work FlatParameter::gather_into(const at::Tensor& whole, const Group& group, const at::Tensor& source) {
  const at::NoGradGuard no_grad;
  std::vector<Transfer> transfers;
  for (const auto& region : layout_.regions) {
    const auto bytes = region.bytes(), share = bytes / group.size();
    Transfer transfer{whole.narrow(0, region.begin, bytes), source.narrow(0, region.begin / group.size(), share)};
    if (source.device() != whole.device()) {
      auto own = transfer.whole.narrow(0, share * group.rank(), share);
      own.copy_(transfer.part, /*non_blocking=*/true);
      transfer.part = std::move(own);
    }
    transfers.push_back(std::move(transfer));
  }
  return group.all_gather(transfers);
}

void FlatParameter::await() {
  // One that fails is over, too.
  std::exchange(gather_, {}).wait();
  if (copied_) copied_->block(current_stream(storage_.device()));
  copied_.reset();
  gathering_.reset();
}

void FlatParameter::let_go() {
  if (always_present_ || !present_ || pins_ > 0) return;
  await();
  free_memory(storage_);
  memory_.reset();
  present_ = false;
}

// This rank's part of the whole among `group`.
std::shared_ptr<PoolBuffer> FlatParameter::part_among(BufferPool& pool, const Group& group) {
  const at::NoGradGuard no_grad;
  auto kept = pool.borrow(layout_.bytes / group.size());
  const auto whole = memory_->bytes(layout_.bytes), part = kept->bytes(layout_.bytes / group.size());
  for (const auto& region : layout_.regions) {
    const auto share = region.bytes() / group.size();
    part.narrow(0, region.begin / group.size(), share).copy_(whole.narrow(0, region.begin + share * group.rank(), share));
  }
  return kept;
}

void FlatParameter::let_go_to(BufferPool& pool, const Group& group) {
  if (always_present_ || !present_) return;
  await();
  kept_ = part_among(pool, group);
  let_go();
}

Work FlatParameter::refresh(const Group& shard) {
  if (!is_refreshed()) return {};
  const at::NoGradGuard no_grad;
  std::vector<Transfer> transfers;
  for (const auto& share : trained_) {
    // What is held is the whole. As bytes: not every backend knows eight-bit numbers.
    const auto whole = held_[share.region].view(at::kByte);
    const auto each = plan::bytes_of(layout_.regions[share.region].compute);
    transfers.push_back({whole, whole.narrow(0, share.share.begin * each, share.share.length * each)});
  }
  return shard.all_gather(transfers);
}

void FlatParameter::take_values() {
  const at::NoGradGuard no_grad;
  for (auto& share : trained_) {
    if (!share.low_precision().defined()) continue;
    const auto now = regions_[share.region].narrow(0, share.share.begin, share.share.length);
    // What forward reads may lie in this very memory, so what it was before is told by the master. Where nothing was changed
    // that keeps what rounding had taken away.
    const auto before = share.master.to(now.options());
    const auto changed = now.ne(before).to(share.master.device());
    share.master.copy_(at::where(changed, now.to(share.master.options()), share.master));
  }
  for (std::size_t at = 0; at < regions_.size() && !always_present_; ++at) {
    const Share kept = share_of(layout_.regions[at], options_.factors.parameters, options_.rank);
    held_[at].copy_(regions_[at].narrow(0, kept.begin, kept.length));
  }
  values_changed();
}

int FlatParameter::behind(std::int64_t generation) const {
  const auto found = std::find_if(versions_.rbegin(), versions_.rend(),
                                  [&](const Version& version) { return version.generation == generation; });
  return static_cast<int>(found - versions_.rbegin());
}

at::Tensor FlatParameter::to_agree_on() const { return codec_.to_agree_on(trained_); }
void FlatParameter::encode(const at::Tensor& agreed) { codec_.encode(agreed, trained_); }

void FlatParameter::begin_update() {
  if (options_.versions == 1) return;
  require(!present_, "an update of '{}' while it is in use: inside of Engine::full_parameters(), or of its Unit's forward",
          layout_.segments.front().name);
  const at::NoGradGuard no_grad;
  Version next{.generation = generation() + 1};
  if (versions_.size() < static_cast<std::size_t>(options_.versions)) {
    next.shard = fresh(shard_.numel(), at::kByte, shard_.device(), storage_.device());
  } else {
    next.shard = versions_.front().shard;
    versions_.erase(versions_.begin());
    // The host must not write what is still being copied to the device.
    if (next.shard.is_cpu() && !storage_.device().is_cpu())
      c10::impl::VirtualGuardImpl(storage_.device().type()).synchronizeDevice(storage_.device().index());
  }
  // An update leaves some of it alone: what is frozen.
  next.shard.copy_(shard_);
  versions_.push_back(next);
  hold(next.shard);
}

void FlatParameter::end_update() {
  if (options_.versions == 1) values_changed();
}

void FlatParameter::values_changed() {
  if (present_generation_ == generation()) ++present_generation_;
  ++versions_.back().generation;
  // Graphs of older versions are still right; those of the one that was changed are known by its number.
  if (options_.versions > 1) return;
  ++told_autograd_;
  for (const auto& parameter : parameters_) parameter.unsafeGetTensorImpl()->bump_version();
}

void FlatParameter::open_gradients(BufferPool& pool) {
  if (gradients_open_) return;
  const at::NoGradGuard no_grad;
  std::int64_t bytes = 0;
  const auto type_of = [&](const TrainedShare& share) { return options_.travelling.value_or(share.gradient.scalar_type()); };
  for (const auto& share : trained_)
    bytes += layout_.regions[share.region].elements * static_cast<std::int64_t>(c10::elementSize(type_of(share)));
  gradient_memory_ = pool.borrow(bytes);
  const auto memory = gradient_memory_->bytes(bytes);
  bytes = 0;
  for (const auto& share : trained_) {
    const auto elements = layout_.regions[share.region].elements;
    const auto size = elements * static_cast<std::int64_t>(c10::elementSize(type_of(share)));
    gradients_[share.region] = memory.narrow(0, bytes, size).view(type_of(share));
    bytes += size;
  }
  // What lies between segments is reduced along with them.
  std::vector<std::int64_t> ends(layout_.regions.size());
  const auto zero = [&](std::size_t region, std::int64_t end) {
    if (end > ends[region]) gradients_[region].narrow(0, ends[region], end - ends[region]).zero_();
  };
  for (std::size_t at = 0; at < layout_.segments.size(); ++at) {
    const auto& segment = layout_.segments[at];
    if (!layout_.trained(at)) continue;
    zero(segment.region, segment.offset);
    ends[segment.region] = segment.offset + segment.elements;
  }
  for (const auto& share : trained_) zero(share.region, layout_.regions[share.region].elements);
  std::fill(written_.begin(), written_.end(), false);
  gradients_open_ = true;
}

std::shared_ptr<PoolBuffer> FlatParameter::close_gradients() {
  if (keeps_gradients_) return nullptr;
  gradients_open_ = false;
  for (auto& gradient : gradients_) gradient.reset();
  std::fill(written_.begin(), written_.end(), false);
  return std::exchange(gradient_memory_, nullptr);
}

at::Tensor FlatParameter::gradient_view(std::size_t segment) const {
  // Not a view in autograd's eyes: optimizers of torch's detach gradients in place, which views refuse.
  const at::AutoDispatchBelowADInplaceOrView plain;
  const auto& place = layout_.segments[segment];
  return gradients_[place.region].narrow(0, place.offset, place.elements).view(parameters_[segment].sizes());
}

std::size_t FlatParameter::segment(const std::string& name) const {
  for (std::size_t at = 0; at < layout_.segments.size(); ++at)
    if (layout_.segments[at].name == name) return at;
  fail("no parameter '{}' in this flat parameter of {} segments", name, layout_.segments.size());
}

std::string FlatParameter::parameter_in(const at::Tensor& tensor) const {
  if (!tensor.has_storage() || tensor.storage().unsafeGetStorageImpl() != storage_.unsafeGetStorageImpl()) return {};
  const auto at = tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
  for (const auto& segment : layout_.segments) {
    const auto& region = layout_.regions[segment.region];
    const auto begin = region.begin + segment.offset * plan::bytes_of(region.compute);
    if (at >= begin && at < begin + segment.elements * plan::bytes_of(region.compute)) return segment.name;
  }
  return layout_.segments.front().name;
}

void FlatParameter::require_intact() const {
  for (std::size_t at = 0; at < parameters_.size(); ++at) {
    const auto& now = parameters_[at];
    const auto& made = views_[at];
    if (now.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl() &&
        now.sizes() == made.sizes() && now.scalar_type() == made.scalar_type())
      continue;
    const auto describe = [](const at::Tensor& tensor) {
      return fmt::format("{} [{}] on {}", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "),
                         tensor.device().str());
    };
    fail(
        "parameter '{}' was given another shape, dtype or memory after shard(), by to(), load or set_data(): it is {} and "
        "was "
        "{}; move, convert and load a model before shard(), and change values inside Engine::full_parameters(true)",
        layout_.segments[at].name, describe(now), describe(made));
  }
}

}  // namespace bonfire
