#include "bonfire/comm/group.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <utility>

#include <ATen/ops/full.h>
#include <fmt/ranges.h>

#include "bonfire/base/error.h"
#include "bonfire/comm/communicators.h"
#include "bonfire/comm/group_state.h"

namespace bonfire {
namespace {

const char* name_of(Reduce op) {
  switch (op) {
    case Reduce::sum: return "sum";
    case Reduce::average: return "average";
    case Reduce::max: return "max";
  }
  return "?";
}

std::string shape_of(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
}

std::int64_t bytes_of(const at::Tensor& tensor) { return static_cast<std::int64_t>(tensor.nbytes()); }

// The checks that every tensor of every collective must pass.
void check(const Group::State& group, CollectiveKind kind, const at::Tensor& tensor) {
  require(tensor.defined(), "{} over '{}': the tensor is undefined", name_of(kind), group.name);
  require(tensor.is_contiguous(),
          "{} over '{}': the tensor {} has strides [{}]; collectives need contiguous tensors: call .contiguous() first",
          name_of(kind), group.name, shape_of(tensor), fmt::join(tensor.strides(), ", "));
  // A rank alone sends nothing, wherever it computes.
  require(group.size() == 1 || tensor.device().type() == group.device.type(),
          "{} over '{}': the tensor is on {}, the group's ranks compute on {}", name_of(kind), group.name,
          tensor.device().str(), group.device.str());
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf:
    case at::kLong:
    case at::kByte: return;
    default:
      fail("{} over '{}': dtype {} cannot be sent; allowed are fp32, fp64, bf16, fp16, int64 and uint8 (raw bytes)",
           name_of(kind), group.name, c10::toString(tensor.scalar_type()));
  }
}

void check_reduction(const Group::State& group, CollectiveKind kind, const at::Tensor& tensor, Reduce op) {
  const auto type = tensor.scalar_type();
  require(type != at::kByte, "{} over '{}': raw bytes (uint8) cannot be reduced", name_of(kind), group.name);
  require(!(type == at::kLong && op == Reduce::average), "{} over '{}': int64 has no average; allowed are sum and max",
          name_of(kind), group.name);
}

void check_peer(const Group::State& group, CollectiveKind kind, int peer) {
  require(peer >= 0 && peer < group.size(), "{} over '{}': rank {} is not in 0..{}", name_of(kind), group.name, peer,
          group.size() - 1);
}

// `whole` holds one part per rank.
void check_fit(const Group::State& group, CollectiveKind kind, const at::Tensor& whole, const at::Tensor& part) {
  require(whole.scalar_type() == part.scalar_type() && whole.numel() == part.numel() * group.size(),
          "{} over '{}': {} and {} do not fit: one must be {} times the other, of one dtype", name_of(kind), group.name,
          shape_of(whole), shape_of(part), group.size());
}

// The transfers that move something, all checked.
std::vector<Transfer> checked(const Group::State& group, CollectiveKind kind, std::span<const Transfer> transfers) {
  std::vector<Transfer> kept;
  kept.reserve(transfers.size());
  for (const auto& [whole, part] : transfers) {
    check(group, kind, whole);
    check(group, kind, part);
    check_fit(group, kind, whole, part);
    if (part.numel() == 0) continue;
    const auto* begin = static_cast<const std::byte*>(whole.const_data_ptr());
    const auto* at = static_cast<const std::byte*>(part.const_data_ptr());
    const auto own = static_cast<std::ptrdiff_t>(part.nbytes()) * group.rank;
    require(at == begin + own || std::less_equal<>()(at + part.nbytes(), begin) ||
                std::less_equal<>()(begin + whole.nbytes(), at),
            "{} over '{}': {} overlaps {} elsewhere than in slice {}, which is this rank's own", name_of(kind), group.name,
            shape_of(part), shape_of(whole), group.rank);
    kept.push_back({whole.view(-1), part.view(-1)});
  }
  return kept;
}

std::int64_t bytes_of(std::span<const Transfer> transfers) {
  std::int64_t bytes = 0;
  for (const auto& transfer : transfers) bytes += bytes_of(transfer.whole);
  return bytes;
}

// A collective whose waiting is told to the progress board: what a rank spends here it spends on others.
class WatchedState : public Work::State {
 public:
  WatchedState(Work work, const Group::State& group)
      : work_(std::move(work)), progress_(group.progress), alarm_(group.alarm) {}

  // Whoever it waits for may have failed, and said so. Others are asked seldom: most waits are short.
  void wait() override {
    const ProgressBoard::Waiting waiting(progress_.get());
    auto patience = alarm_->known() ? std::chrono::milliseconds(0) : std::chrono::milliseconds(1000);
    for (; !wait_or_hear(patience); patience = std::min(2 * patience, std::chrono::milliseconds(4000))) alarm_->ask();
  }
  bool wait_for(std::chrono::milliseconds time) override {
    const ProgressBoard::Waiting waiting(progress_.get());
    return wait_or_hear(time);
  }
  bool done() override { return work_.done(); }
  std::function<bool()> ending() override { return work_.state()->ending(); }
  void on_done(std::function<void(Nanoseconds, Nanoseconds)> callback) override {
    work_.state()->on_done(std::move(callback));
  }

 private:
  // A rank that failed may be gone already. Its words say more than a closed connection.
  bool wait_or_hear(std::chrono::milliseconds time) {
    try {
      return work_.wait_for(time);
    } catch (const std::exception&) {
      alarm_->ask();
      throw;
    }
  }

  Work work_;
  std::shared_ptr<ProgressBoard> progress_;
  std::shared_ptr<Alarm> alarm_;
};

// What notes that a collective is done again as part of work that was captured.
CapturedCollective again(const Group::State& group, const Collective& what) {
  // Of the group only what those notes need: the work may outlive the handle.
  return [what, name = group.name, stream = group.backend->stream(), counts = group.counts, progress = group.progress,
          lane = group.lane, recorder = std::weak_ptr(group.recorder)](const std::function<bool()>& ended) {
    const bool message = what.kind == CollectiveKind::send || what.kind == CollectiveKind::receive;
    const std::int64_t sequence = ++(message ? counts->messages : counts->collectives);
    lane->begin(sequence, what.kind);
    lane->watch(sequence, what.kind, ended);
    const auto list = recorder.lock();
    if (!list || !list->recording()) return;
    const Nanoseconds now = now_ns();
    const auto ticket = list->begin({.what = what, .group = name, .sequence = sequence, .start = now, .stream = stream});
    list->end(ticket, now, now);
  };
}

// The one way by which a collective begins: noted for the watchdog, compared (in debug mode), recorded, and delayed by an
// emulated link.
template <class Operation>
Work perform(const Group::State& group, CollectiveKind kind, std::int64_t bytes, const std::string& fingerprint,
             Operation&& operation) {
  if (group.recorder->capturing()) {
    require(!group.fingerprints && !group.link,
            "{} over '{}' cannot be captured: its group compares every collective, or has an emulated link", name_of(kind),
            group.name);
    group.recorder->add_captured(again(group, {kind, group.axis, bytes}));
    return Work(std::make_shared<WatchedState>(operation(*group.backend), group));
  }
  group.alarm->check();
  const bool message = kind == CollectiveKind::send || kind == CollectiveKind::receive;
  const std::int64_t sequence = ++(message ? group.counts->messages : group.counts->collectives);
  group.lane->begin(sequence, kind);
  if (group.fingerprints && !message) group.fingerprints->compare(sequence, fingerprint);

  const Collective what{kind, group.axis, bytes};
  const bool recording = group.recorder->recording();
  const std::int64_t ticket = recording ? group.recorder->begin({.what = what,
                                                                 .group = group.name,
                                                                 .sequence = sequence,
                                                                 .start = now_ns(),
                                                                 .stream = group.backend->stream()})
                                        : 0;

  Work work = operation(*group.backend);
  if (group.link)
    work = group.backend->over(*group.link, seconds_over(group.link->link(), what, group.size()), std::move(work));
  if (recording)
    work.state()->on_done(
        [ticket, recorder = group.recorder](Nanoseconds start, Nanoseconds end) { recorder->end(ticket, start, end); });
  group.lane->watch(sequence, kind, work.state()->ending());
  return Work(std::make_shared<WatchedState>(std::move(work), group));
}

std::string fingerprint(const Group::State& group, CollectiveKind kind, const at::Tensor& tensor,
                        const std::string& detail = {}) {
  if (!group.fingerprints) return {};
  return fmt::format("{} of {}{}{}", name_of(kind), shape_of(tensor), detail.empty() ? "" : ", ", detail);
}

// The shapes as the caller gave them, so that a single transfer reads like any other collective.
std::string fingerprint(const Group::State& group, CollectiveKind kind, std::span<const Transfer> transfers,
                        const std::string& detail = {}) {
  if (!group.fingerprints) return {};
  std::vector<std::string> shapes;
  for (const auto& transfer : transfers)
    shapes.push_back(shape_of(kind == CollectiveKind::all_gather ? transfer.part : transfer.whole));
  return fmt::format("{} of {}{}{}", name_of(kind), fmt::join(shapes, " and "), detail.empty() ? "" : ", ", detail);
}

// Debug mode's messages where receives can be put off: they are compared with what the sender announced when they are
// waited for, and posted only then, since a message of another size would end the process.
class PutOffState : public Work::State {
 public:
  PutOffState(Work sends, std::function<Work()> receive) : sends_(std::move(sends)), receive_(std::move(receive)) {}

  void wait() override {
    if (auto receive = std::exchange(receive_, nullptr)) receives_ = receive();
    receives_.wait();
    sends_.wait();
    *ended_ = true;
    if (auto callback = std::exchange(callback_, nullptr)) callback(start_, now_ns());
  }
  bool done() override { return !receive_ && receives_.done() && sends_.done(); }
  std::function<bool()> ending() override {
    return [ended = ended_] { return ended->load(); };
  }
  void on_done(std::function<void(Nanoseconds, Nanoseconds)> callback) override { callback_ = std::move(callback); }

 private:
  Nanoseconds start_ = now_ns();
  std::shared_ptr<std::atomic<bool>> ended_ = std::make_shared<std::atomic<bool>>(false);
  std::function<void(Nanoseconds, Nanoseconds)> callback_;
  Work sends_, receives_;
  std::function<Work()> receive_;
};

// Debug mode's form of a batch: senders announce what they send, receivers compare.
Work compared_batch(const Group::State& group, std::span<const Message> messages) {
  std::vector<Message> sends, receives;
  std::vector<std::int64_t> numbers;
  for (const auto& message : messages) {
    if (message.way == Message::Way::send) {
      group.fingerprints->announce_send(message.peer, shape_of(message.tensor));
      sends.push_back(message);
    } else {
      receives.push_back(message);
      numbers.push_back(group.fingerprints->next_receive(message.peer));
    }
  }
  const auto compare = [board = group.fingerprints, receives, numbers] {
    for (std::size_t at = 0; at < receives.size(); ++at)
      board->compare_receive(receives[at].peer, numbers[at], shape_of(receives[at].tensor));
  };
  if (group.backend->ordered()) {
    compare();
    return group.backend->batch(messages);
  }
  Work sending = sends.empty() ? Work() : group.backend->batch(sends);
  if (receives.empty()) return sending;
  return Work(std::make_shared<PutOffState>(std::move(sending), [backend = group.backend, receives, compare] {
    compare();
    return backend->batch(receives);
  }));
}

}  // namespace

Group::Group() : state_(std::make_shared<State>()) {}
Group::Group(std::shared_ptr<const State> state) : state_(std::move(state)) {}

int Group::rank() const { return state_->rank; }
int Group::size() const { return state_->size(); }
Axis Group::axis() const { return state_->axis; }
c10::Device Group::device() const { return state_->device; }
const std::string& Group::name() const { return state_->name; }
const std::vector<int>& Group::world_ranks() const { return state_->world_ranks; }
std::int64_t Group::issued() const { return state_->counts->collectives; }

// In a group of one each collective is the identity: parts equal wholes, and averages, sums and maxima are the value itself.

Work Group::all_reduce(at::Tensor tensor, Reduce op) const {
  constexpr auto kind = CollectiveKind::all_reduce;
  check(*state_, kind, tensor);
  check_reduction(*state_, kind, tensor, op);
  if (size() == 1) return {};
  return perform(*state_, kind, bytes_of(tensor), fingerprint(*state_, kind, tensor, name_of(op)),
                 [&](Backend& backend) { return backend.all_reduce(tensor, op); });
}

Work Group::all_gather(at::Tensor output, at::Tensor input) const {
  const Transfer transfer{std::move(output), std::move(input)};
  return all_gather({&transfer, 1});
}

Work Group::reduce_scatter(at::Tensor output, at::Tensor input, Reduce op) const {
  const Transfer transfer{std::move(input), std::move(output)};
  return reduce_scatter({&transfer, 1}, op);
}

Work Group::all_gather(std::span<const Transfer> transfers) const {
  constexpr auto kind = CollectiveKind::all_gather;
  const auto kept = checked(*state_, kind, transfers);
  if (kept.empty()) return {};
  if (size() == 1) {
    for (const auto& [whole, part] : kept)
      if (whole.const_data_ptr() != part.const_data_ptr()) whole.copy_(part);
    return {};
  }
  return perform(*state_, kind, bytes_of(kept), fingerprint(*state_, kind, transfers),
                 [&](Backend& backend) { return backend.all_gather(kept); });
}

Work Group::reduce_scatter(std::span<const Transfer> transfers, Reduce op) const {
  constexpr auto kind = CollectiveKind::reduce_scatter;
  const auto kept = checked(*state_, kind, transfers);
  for (const auto& transfer : kept) check_reduction(*state_, kind, transfer.whole, op);
  if (kept.empty()) return {};
  if (size() == 1) {
    for (const auto& [whole, part] : kept)
      if (whole.const_data_ptr() != part.const_data_ptr()) part.copy_(whole);
    return {};
  }
  return perform(*state_, kind, bytes_of(kept), fingerprint(*state_, kind, transfers, name_of(op)),
                 [&](Backend& backend) { return backend.reduce_scatter(kept, op); });
}

Work Group::broadcast(at::Tensor tensor, int root) const {
  constexpr auto kind = CollectiveKind::broadcast;
  check(*state_, kind, tensor);
  check_peer(*state_, kind, root);
  if (size() == 1) return {};
  return perform(*state_, kind, bytes_of(tensor), fingerprint(*state_, kind, tensor, fmt::format("from {}", root)),
                 [&](Backend& backend) { return backend.broadcast(tensor, root); });
}

Work Group::reduce(at::Tensor tensor, int root, Reduce op) const {
  constexpr auto kind = CollectiveKind::reduce;
  check(*state_, kind, tensor);
  check_peer(*state_, kind, root);
  check_reduction(*state_, kind, tensor, op);
  if (size() == 1) return {};
  return perform(*state_, kind, bytes_of(tensor),
                 fingerprint(*state_, kind, tensor, fmt::format("{} to {}", name_of(op), root)),
                 [&](Backend& backend) { return backend.reduce(tensor, root, op); });
}

Work Group::scatter(at::Tensor output, at::Tensor input, int root) const {
  constexpr auto kind = CollectiveKind::scatter;
  check(*state_, kind, output);
  check_peer(*state_, kind, root);
  if (rank() == root) {
    check(*state_, kind, input);
    check_fit(*state_, kind, input, output);
  }
  if (size() == 1) {
    output.view(-1).copy_(input.view(-1));
    return {};
  }
  return perform(*state_, kind, bytes_of(output) * size(), fingerprint(*state_, kind, output, fmt::format("from {}", root)),
                 [&](Backend& backend) { return backend.scatter(output, input, root); });
}

Work Group::gather(at::Tensor output, at::Tensor input, int root) const {
  constexpr auto kind = CollectiveKind::gather;
  check(*state_, kind, input);
  check_peer(*state_, kind, root);
  if (rank() == root) {
    check(*state_, kind, output);
    check_fit(*state_, kind, output, input);
  }
  if (size() == 1) {
    output.view(-1).copy_(input.view(-1));
    return {};
  }
  return perform(*state_, kind, bytes_of(input) * size(), fingerprint(*state_, kind, input, fmt::format("to {}", root)),
                 [&](Backend& backend) { return backend.gather(output, input, root); });
}

Work Group::all_to_all(at::Tensor output, at::Tensor input) const {
  constexpr auto kind = CollectiveKind::all_to_all;
  check(*state_, kind, output);
  check(*state_, kind, input);
  require(output.scalar_type() == input.scalar_type() && output.numel() == input.numel() && input.numel() % size() == 0,
          "all_to_all over '{}': {} and {} must have one dtype and one size that {} ranks divide", name(), shape_of(output),
          shape_of(input), size());
  if (size() == 1) {
    output.view(-1).copy_(input.view(-1));
    return {};
  }
  return perform(*state_, kind, bytes_of(input), fingerprint(*state_, kind, input),
                 [&](Backend& backend) { return backend.all_to_all(output, input); });
}

Work Group::send(at::Tensor tensor, int to) const {
  const Message message{Message::Way::send, std::move(tensor), to};
  return batch({&message, 1});
}

Work Group::receive(at::Tensor tensor, int from) const {
  const Message message{Message::Way::receive, std::move(tensor), from};
  return batch({&message, 1});
}

Work Group::batch(std::span<const Message> messages) const {
  if (messages.empty()) return {};
  std::int64_t sent = 0, received = 0;
  for (const auto& message : messages) {
    const auto kind = message.way == Message::Way::send ? CollectiveKind::send : CollectiveKind::receive;
    check(*state_, kind, message.tensor);
    check_peer(*state_, kind, message.peer);
    require(message.peer != rank(), "{} over '{}': rank {} cannot exchange messages with itself", name_of(kind), name(),
            rank());
    (kind == CollectiveKind::send ? sent : received) += bytes_of(message.tensor);
  }
  // A batch is one operation on the wire; it is listed by the way most of its bytes go, as a send when equal.
  const auto kind = received > sent ? CollectiveKind::receive : CollectiveKind::send;
  return perform(*state_, kind, std::max(sent, received), {}, [&](Backend& backend) {
    return state_->fingerprints ? compared_batch(*state_, messages) : backend.batch(messages);
  });
}

Work Group::barrier() const {
  if (size() == 1) return {};
  return perform(*state_, CollectiveKind::barrier, 0, state_->fingerprints ? "barrier" : "",
                 [](Backend& backend) { return backend.barrier(); });
}

double Group::sum(double value) const {
  auto tensor = at::full({1}, value, at::TensorOptions().dtype(at::kDouble).device(state_->device));
  all_reduce(tensor, Reduce::sum).wait();
  return tensor.item<double>();
}

double Group::max(double value) const {
  auto tensor = at::full({1}, value, at::TensorOptions().dtype(at::kDouble).device(state_->device));
  all_reduce(tensor, Reduce::max).wait();
  return tensor.item<double>();
}

Group Group::neighbours(int ranks) const {
  if (ranks < 1 || size() % ranks != 0) {
    std::vector<int> allowed;
    for (int divisor = 1; divisor <= size(); ++divisor)
      if (size() % divisor == 0) allowed.push_back(divisor);
    fail_config("groups of {} ranks along the {} axis of {}: allowed are its divisors {}", ranks, name(), size(),
                fmt::join(allowed, ", "));
  }
  const auto maker = state_->maker.lock();
  if (!maker) {
    require(size() == 1, "groups of some ranks of '{}' after its World has gone", name());
    return *this;
  }
  const auto first = world_ranks().begin() + rank() / ranks * ranks;
  const Group made = maker->group({.axis = axis(),
                                   .name = fmt::format("{} groups of {}", name_of(axis()), ranks),
                                   .members = {first, first + ranks},
                                   .part = state_->part});
  return state_->link ? made.over(state_->link) : made;
}

bool Group::all_failed_alike(const std::string& words, std::int64_t place, std::chrono::milliseconds patience) const {
  return !state_->alarm || state_->alarm->raise(words, place, patience);
}

Group Group::over(const Link& link) const { return over(std::make_shared<EmulatedLink>(link)); }

Group Group::over(std::shared_ptr<EmulatedLink> link) const {
  auto state = std::make_shared<State>(*state_);
  state->link = std::move(link);
  return Group(std::move(state));
}

}  // namespace bonfire
