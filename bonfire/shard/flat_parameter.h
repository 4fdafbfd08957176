#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/group.h"
#include "bonfire/comm/side_stream.h"
#include "bonfire/plan/layout.h"
#include "bonfire/plan/sharding.h"
#include "bonfire/shard/buffer_pool.h"
#include "bonfire/shard/scaled_codec.h"
#include "bonfire/shard/share.h"

namespace bonfire {

// How the memory of a flat parameter is divided over a shard group.
struct FlatOptions {
  plan::Factors factors{};
  int rank = 0;  // in the shard group
  // What gradients are kept in; undefined: each region's master type.
  std::optional<at::ScalarType> gradient{};
  // What they are while they are whole and on their way to be reduced, where they are not kept whole.
  std::optional<at::ScalarType> travelling{};
  // Where the share that is always held lies, and where masters do: the parameters' own device, or the host.
  std::optional<at::Device> shard_device{}, master_device{};
  // How many values of the parameters are kept at once. More than 1: masters lie apart from what forward reads, and an
  // update leaves what forward has read as it was.
  int versions = 1;
  std::int64_t first_generation = 0;
};

// Several parameters as one padded buffer. The module's own tensors stay what they are to the user (names, shapes,
// identity): they become views, made once, of one storage whose memory can come and go. What a rank always holds is its
// share: the part of each region that the factors leave to it.
class BONFIRE_API FlatParameter {
 public:
  // `parameters` in the order of the layout's segments, their memory present. Their values are cut into shares; their own
  // memory is let go.
  FlatParameter(plan::FlatLayout layout, std::vector<at::Tensor> parameters, const FlatOptions& options);
  ~FlatParameter();
  FlatParameter(const FlatParameter&) = delete;
  FlatParameter& operator=(const FlatParameter&) = delete;

  const plan::FlatLayout& layout() const { return layout_; }
  const FlatOptions& options() const { return options_; }
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  std::size_t segment(const std::string& name) const;
  // The same layout under other names.
  void rename(const plan::FlatLayout& layout);
  at::Device device() const { return storage_.device(); }
  // The name of the parameter in whose memory `tensor` lies; empty: in none.
  std::string parameter_in(const at::Tensor& tensor) const;

  // --- What forward reads. Reading it while it is freed throws.
  bool present() const { return present_; }
  // Where a gather comes from: the ranks of a group, each with the share that it always holds, or with what it has kept.
  struct Source {
    Group group{};
    bool kept = false;
    int behind = 0;                // which of the versions: how many have come since; 0 is the newest
    std::int64_t place = -1;       // see BufferPool::borrow
    SideStream* beside = nullptr;  // where a share that lies on the host is copied, so that the current stream can go on
  };
  // The whole buffer comes in, in memory of the pool (which must outlive the stay), filled by a gather that has only begun.
  // Nothing to do where it is always in.
  void bring_in(BufferPool& pool, const Source& source);
  // Stream: the current one waits until the gather has ended.
  void await();
  // The memory is given back. Stream: work of the current stream that reads it may still run; the pool knows.
  void let_go();
  // A gather that others need and this rank does not, since it has the whole: into memory that is given back at once.
  void take_part(BufferPool& pool, const Source& source);
  // Between forward and backward only this rank's part among `group` is kept, to gather from it: a smaller group.
  void let_go_to(BufferPool& pool, const Group& group);
  void forget_kept() { kept_.reset(); }
  // While it is pinned, the memory stays.
  void pin() { ++pins_; }
  void unpin() { --pins_; }
  bool pinned() const { return pins_ > 0; }
  // The whole of a region; REQUIRES: present().
  at::Tensor region(std::size_t index) const { return regions_[index]; }
  // This rank's own part of a region, always held.
  at::Tensor held(std::size_t index) const { return held_[index]; }
  // After an update: what the others changed comes to this rank, where the whole is held but only a share updated. Begins
  // at once. Collective.
  Work refresh(const Group& shard);
  // Whether that has anything to do.
  bool is_refreshed() const { return options_.factors.optimizer != options_.factors.parameters; }
  // The shares take the values that the parameters have now, where these were changed while they were in.
  void take_values();
  // After an update: numbers of which all ranks must know the largest before what forward reads can follow the masters;
  // none where it has followed them already.
  at::Tensor to_agree_on() const;
  // What all ranks have agreed on: now it follows. Before refresh().
  void encode(const at::Tensor& agreed);
  const ScaledCodec& codec() const { return codec_; }

  // --- What the optimizer updates.
  std::vector<TrainedShare>& trained() { return trained_; }
  const std::vector<TrainedShare>& trained() const { return trained_; }

  // --- Gradients while they are whole: the buffer that backward writes to.
  // Comes in from the pool where gradients are kept as shares; otherwise it is always there.
  void open_gradients(BufferPool& pool);
  bool gradients_open() const { return gradients_open_; }
  bool keeps_whole_gradients() const { return keeps_gradients_; }
  // Of a trained region, whole; REQUIRES: gradients_open().
  at::Tensor gradient(std::size_t region) const { return gradients_[region]; }
  at::Tensor gradient_view(std::size_t segment) const;
  // Hands over the pool's memory of the whole gradients to whoever reduces them.
  std::shared_ptr<PoolBuffer> close_gradients();
  // Whether a segment's whole gradient holds something since it was opened or spent.
  bool written(std::size_t segment) const { return written_[segment]; }
  void set_written(std::size_t segment, bool written) { written_[segment] = written; }
  // Whether the shares' gradients hold something since they were spent.
  bool share_written() const { return share_written_; }
  void set_share_written(bool written) { share_written_ = written; }

  // --- Versions: values of the parameters, each with a number of its own, the newest and what is kept of those before it.
  // Every change of the values makes a new number: noted at forward and looked for at backward.
  std::int64_t generation() const { return versions_.back().generation; }
  bool keeps(std::int64_t generation) const { return behind(generation) < static_cast<int>(versions_.size()); }
  // How many have come since; as many as there are where it is gone.
  int behind(std::int64_t generation) const;
  // Of what forward reads now. REQUIRES: present().
  std::int64_t present_generation() const { return present_generation_; }
  // Around an update of the shares: where versions are kept it makes a new one, and otherwise changes the only one.
  void begin_update();
  void end_update();
  // The newest values were changed in place, which no backward through them survives: autograd is told.
  void values_changed();
  // How often it was.
  std::int64_t told_autograd() const { return told_autograd_; }

  // Names the first parameter whose shape, dtype or storage is no longer what it was made.
  void require_intact() const;

 private:
  struct Version {
    std::int64_t generation = 0;
    at::Tensor shard;  // bytes of what is always held of it
  };
  const Version& version(int behind) const { return versions_[versions_.size() - 1 - static_cast<std::size_t>(behind)]; }
  void hold(at::Tensor shard);
  at::Tensor own_part(const TrainedShare& share) const;

  Work gather_into(const at::Tensor& whole, const Group& group, const at::Tensor& source);
  std::shared_ptr<PoolBuffer> part_among(BufferPool& pool, const Group& group);
  void describe_freed() const;

  plan::FlatLayout layout_;
  FlatOptions options_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> views_;  // what the parameters were made
  c10::Storage storage_;           // of the whole
  std::vector<Version> versions_;  // the newest last
  at::Tensor shard_;               // bytes of what is always held of the newest; the whole where nothing is divided
  std::vector<at::Tensor> regions_, held_, gradients_;
  ScaledCodec codec_;
  std::vector<TrainedShare> trained_;
  std::vector<char> written_;
  bool held_whole_ = false, always_present_ = false, keeps_gradients_ = false;  // where nothing is divided
  bool share_written_ = false, gradients_open_ = false, present_ = false;
  int pins_ = 0;
  std::shared_ptr<PoolBuffer> memory_, gradient_memory_;
  std::shared_ptr<PoolBuffer> kept_, gathering_;  // parts to gather from among fewer ranks; being gathered from
  Work gather_;
  std::optional<c10::Event> copied_;  // of a share that came from the host
  std::int64_t present_generation_ = 0, told_autograd_ = 0;
};

}  // namespace bonfire
