#include "bonfire/server/push_pull.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/base/error.h"
#include "bonfire/optim/clip.h"
#include "bonfire/server/description.h"
#include "bonfire/server/lives.h"
#include "bonfire/shard/engine.h"

namespace bonfire {
namespace {

const std::atomic<bool> never{false};

// What fails between a worker and a server is told with the server's name: servers are the first ranks.
template <class Function>
auto with_server(std::size_t server, const Function& function) {
  try {
    return function();
  } catch (const PeerLost& lost) {
    const std::string why = lost.what();
    throw PeerLost(fmt::format("server {0} (rank {0}) was lost: {1}", server, why.substr(0, why.find('\n'))));
  }
}

// Memory on the host for values like these: that of the gradients, where each server's share of them lies where its answer
// goes. A share that one server has answered may still be on its way to another.
at::Tensor memory_like(const at::Tensor& values, const at::Tensor& gradients) {
  if (gradients.is_cpu() && gradients.nbytes() == values.nbytes()) return gradients.view(values.scalar_type());
  return at::empty(values.sizes(), at::TensorOptions(values.scalar_type()).pinned_memory(!values.is_cpu()));
}

}  // namespace

PushPull::PushPull(const World& world, ServerOptions options)
    : world_(world), options_(std::move(options)), ports_(options_.link) {
  const int worker = world_.rank() - options_.servers;
  const Lives keys{options_.name, worker};
  auto& store = world_.store();
  life_ = store.add(keys.count(), 1);
  if (is_back()) {
    if (options_.lost != WhenLost::wait)
      fail("worker {} (rank {}) was there before, and the servers do not wait for it (server_lost = {}; allowed here: wait)",
           worker, world_.rank(), name_of(options_.lost));
    if (const auto left = keys.steps_of_one_that_left(); store.check({left})) {
      has_left_ = true;
      step_ = std::stoll(store.get_to_str(left));
      return;
    }
  }
  for (int server = 0; server < options_.servers; ++server) {
    // Without end, but for the longest that stores can count: a server that is lost ends the run.
    if (is_back()) store.wait({keys.accepted(server, life_)}, std::chrono::hours(24 * 20));
    peers_.push_back(std::make_unique<Peer>(store, keys.connection(server, life_), 1, options_.connection, ports_));
  }
}

PushPull::~PushPull() = default;

std::int64_t PushPull::begin(Engine& engine) {
  if (has_left_) return step_;
  // Until a backward has shown better, buffers are in the reverse order of registration.
  for (auto flat = engine.flats().rbegin(); flat != engine.flats().rend(); ++flat) {
    const auto& layout = (*flat)->layout();
    if (!layout.any_trained()) continue;
    for (const auto& region : layout.regions)
      if (region.codec() == plan::Codec::scaled)
        fail_config("parameter '{}' is read in eight bits, beside a parameter server; allowed: fp64, fp32, bf16 and fp16",
                    layout.segments.front().name);
    units_.push_back({.key = layout.segments.front().name,
                      .flat = flat->get(),
                      .elements = layout.trained_elements(),
                      .versions = std::vector<std::int64_t>(peers_.size())});
  }
  // All of one type where they are not their masters'.
  std::int64_t gradients = -1;
  for (const auto& unit : units_)
    for (const auto& share : unit.flat->trained())
      if (share.gradient.scalar_type() != share.master.scalar_type())
        gradients = static_cast<std::int64_t>(share.gradient.scalar_type());
  std::string text;
  for (const auto& unit : units_) text += describe_unit(*unit.flat) + "\n";
  auto bytes = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.data_ptr(), text.data(), text.size());
  for (std::size_t at = 0; at < peers_.size(); ++at) {
    auto& peer = *peers_[at];
    with_server(at, [&] {
      peer.send({.kind = Header::Kind::hello, .bytes = bytes.numel(), .flag = gradients}).wait();
      peer.world().group().send(bytes, 0).wait();
      const auto welcome = peer.receive(never);
      for (std::size_t unit = 0; welcome.flag && unit < units_.size(); ++unit) {
        std::vector<at::Tensor> masters;
        for (const auto& share : units_[unit].flat->trained()) masters.push_back(share.master.cpu());
        peer.send({.kind = Header::Kind::start, .unit = static_cast<std::int64_t>(unit)},
                  part(masters, static_cast<int>(at)))
            .wait();
      }
    });
  }
  // Where workers have optimizers of their own they begin alike, too: servers answer with weights once.
  const auto pulled = std::exchange(options_.pulled, Pulled::weights);
  begin_pull();
  await_all();
  // What the servers have heard of before, be it in another life of theirs.
  step_ = steps_known_;
  options_.pulled = pulled;
  return step_;
}

std::vector<std::string> PushPull::units() const {
  std::vector<std::string> keys;
  for (const auto& unit : units_) keys.push_back(unit.key);
  return keys;
}

// A server's share of each region.
std::vector<at::Tensor> PushPull::part(const std::vector<at::Tensor>& regions, int server) const {
  std::vector<at::Tensor> shares;
  for (const auto& region : regions) {
    const auto length = region.numel() / options_.servers;
    shares.push_back(region.narrow(0, server * length, length));
  }
  return shares;
}

PushPull::Unit& PushPull::unit_of(FlatParameter& flat) {
  const auto found = std::find_if(units_.begin(), units_.end(), [&](const Unit& unit) { return unit.flat == &flat; });
  require(
      found != units_.end() && found->elements == flat.layout().trained_elements(),
      "parameter '{}' or one beside it was frozen or thawed, and its server knows nothing of that: freeze and thaw before "
      "the Worker is made",
      flat.layout().segments.front().name);
  return *found;
}

// Each worker's gradients are an update, so it is their own norm that limits them: known only when backward has ended.
bool PushPull::defers() const { return options_.mode != ServerMode::synchronous && options_.clip > 0; }

void PushPull::begin(std::size_t, FlatParameter& flat) {
  auto& unit = unit_of(flat);
  if (!defers()) push(unit);
}

void PushPull::push(Unit& unit) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> regions;
  for (const auto& share : unit.flat->trained()) {
    auto gradient = share.gradient;
    const auto wire = on_wire(options_.compression, gradient.scalar_type());
    // Sums of fp16 could overflow where their average does not.
    if (wire == at::kHalf && wire != gradient.scalar_type()) gradient = gradient.div(world_.size() - options_.servers);
    regions.push_back(gradient.to(wire).cpu());
  }
  for (std::size_t at = 0; at < peers_.size(); ++at)
    send(at, {.kind = Header::Kind::push, .unit = &unit - units_.data(), .version = unit.versions[at], .step = step_ + 1},
         part(regions, static_cast<int>(at)), unit.sent);
  unit.pushed = true;
}

void PushPull::send(std::size_t server, const Header& header, const std::vector<at::Tensor>& tensors,
                    std::vector<Sent>& sent) {
  with_server(server, [&] { sent.push_back({server, peers_[server]->send(header, tensors)}); });
}

void PushPull::send_all(const Header& header) {
  for (std::size_t server = 0; server < peers_.size(); ++server) send(server, header, {}, sent_);
}

void PushPull::conclude(std::vector<Sent>& sent) const {
  for (auto& one : sent) with_server(one.server, [&] { one.work.wait(); });
  sent.clear();
}

void PushPull::advance(std::size_t, FlatParameter&) {
  if (options_.pulled != Pulled::gradients || std::exchange(ended_, true)) return;
  send_all({.kind = Header::Kind::end, .version = version(), .step = ++step_, .flag = 1});
  begin_pull();
}

void PushPull::end(std::size_t, FlatParameter& flat) {
  if (options_.pulled != Pulled::gradients) return;
  await(static_cast<std::size_t>(&unit_of(flat) - units_.data()));
  if (std::none_of(units_.begin(), units_.end(), [](const Unit& unit) { return !unit.answers.empty(); })) ended_ = false;
}

std::string PushPull::averaged_by() const {
  return options_.mode == ServerMode::synchronous
             ? "a parameter server, which averages the workers' means and weighs workers alike"
             : fmt::format("a parameter server in {} mode, where each worker's mean is an update", name_of(options_.mode));
}

void PushPull::end_push(Engine& engine, double number) {
  bool finite = true;
  if (options_.mode != ServerMode::synchronous && (options_.clip > 0 || options_.skip_non_finite)) {
    if (options_.clip_value > 0 && options_.clip > 0) clamp_gradients(engine, options_.clip_value);
    const double norm = std::sqrt(local_squares(engine).item<double>());
    report_.gradient_norm = norm;
    finite = std::isfinite(norm);
    if (const double factor = clip_factor(norm, options_.clip); factor != 1)
      for (auto& unit : units_)
        for (auto& share : unit.flat->trained()) share.gradient.mul_(factor);
  }
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit)
    if (!unit->pushed) push(*unit);
  send_all({.kind = Header::Kind::end,
            .version = version(),
            .step = ++step_,
            .flag = finite || !options_.skip_non_finite,
            .norm = report_.gradient_norm,
            .number = number});
}

std::int64_t PushPull::version() const {
  const auto first = units_.empty() ? 0 : units_.front().versions.front();
  for (const auto& unit : units_)
    if (std::any_of(unit.versions.begin(), unit.versions.end(), [&](auto one) { return one != first; })) return -1;
  return first;
}

void PushPull::abandon() {
  for (auto& unit : units_) unit.pushed = false;
  ended_ = false;
  send_all({.kind = Header::Kind::abandon});
}

void PushPull::begin_pull() {
  const at::NoGradGuard no_grad;
  for (auto& unit : units_) {
    unit.staging.clear();
    for (const auto& share : unit.flat->trained())
      unit.staging.push_back(options_.pulled == Pulled::weights
                                 ? memory_like(unit.flat->region(share.region), share.gradient)
                                 : memory_like(share.gradient, share.gradient));
    for (std::size_t at = 0; at < peers_.size(); ++at) {
      auto header = Header::empty();
      with_server(at, [&] {
        unit.answers.push_back({peers_[at]->begin_receive(header, part(unit.staging, static_cast<int>(at))), header});
      });
    }
  }
}

void PushPull::await(std::size_t number) {
  auto& unit = units_[number];
  if (unit.answers.empty()) return;
  const at::NoGradGuard no_grad;
  Nanoseconds there = 0;
  const auto bytes = bytes_of(unit.staging) / static_cast<std::int64_t>(peers_.size());
  for (std::size_t at = 0; at < peers_.size(); ++at) {
    with_server(at, [&] { unit.answers[at].work.wait(); });
    const auto header = Header::read(unit.answers[at].header);
    there = std::max(there, peers_[at]->arrival(header, bytes));
    unit.versions[at] = header.version;
    // A step that not all of them have is taken again.
    if (number == 0) steps_known_ = at == 0 ? header.step : std::min(steps_known_, header.step);
    if (at > 0 || number > 0) continue;
    report_.version = header.version;
    report_.used = header.flag != 0;
    report_.number = header.number;
    report_.durable = header.durable;
    if (options_.mode == ServerMode::synchronous) report_.gradient_norm = header.norm;
  }
  if (there > 0) sleep_until(there);
  conclude(unit.sent);
  unit.answers.clear();
  unit.pushed = false;
  auto& trained = unit.flat->trained();
  for (std::size_t at = 0; at < trained.size(); ++at) {
    if (options_.pulled == Pulled::gradients) {
      trained[at].gradient.copy_(unit.staging[at]);
      continue;
    }
    unit.flat->region(trained[at].region).copy_(unit.staging[at]);
    if (trained[at].copy.defined()) trained[at].master.copy_(unit.staging[at]);
    // Between parameters gradients are zero, and stay so.
    trained[at].gradient.zero_();
  }
  unit.staging.clear();
  if (options_.pulled == Pulled::weights) unit.flat->values_changed();
}

void PushPull::await_all() {
  for (std::size_t unit = 0; unit < units_.size(); ++unit) await(unit);
  conclude(sent_);
}

ServedStep PushPull::report() {
  if (!units_.empty()) await(0);
  return report_;
}

void PushPull::leave() {
  if (has_left_) return;
  await_all();
  const int worker = world_.rank() - options_.servers;
  world_.store().set(Lives{options_.name, worker}.steps_of_one_that_left(), std::to_string(step_));
  send_all({.kind = Header::Kind::leave});
  conclude(sent_);
}

}  // namespace bonfire
