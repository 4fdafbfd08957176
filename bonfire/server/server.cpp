#include "bonfire/server/server.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/base/error.h"
#include "bonfire/server/server_state.h"

namespace bonfire {
namespace {

int checked_workers(const World& world, const ServerOptions& options) {
  require_servers(options, world.size());
  require(is_server(world, options), "rank {} of {} is a worker, not a server: servers are the first {}", world.rank(),
          world.size(), options.servers);
  return world.size() - options.servers;
}

// The servers among themselves: on the host, like their weights, wherever the World is.
World among_servers_of(const World& world, const ServerOptions& options) {
  if (options.servers == 1) return {};
  auto connection = options.connection;
  connection.device = c10::Device(c10::kCPU);
  return World::from_store(c10::make_intrusive<c10d::PrefixStore>(
                               options.name + "/servers", c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world.store())),
                           world.rank(), options.servers, connection);
}

// Waits a little for work of all servers. One that has ended has said why.
bool ended_with_others(Work& work) try {
  return work.wait_for(std::chrono::milliseconds(100));
} catch (const PeerLost& lost) {
  const std::string why = lost.what();
  throw PeerLost(fmt::format("another server was lost: {}; the run ends", why.substr(0, why.find('\n'))));
}

}  // namespace

Server::State::State(const World& a_world, const ServerOptions& a_options, const MakeOptimizer& make)
    : world(a_world),
      options(a_options),
      workers(checked_workers(world, options)),
      among_servers(among_servers_of(world, options)),
      servers(among_servers.group()),
      ports(options.link),
      ledger({.mode = options.mode, .workers = workers, .staleness = options.staleness, .backup = options.backup}),
      sessions(static_cast<std::size_t>(workers)) {
  for (int worker = 0; worker < workers; ++worker) {
    auto& session = sessions[static_cast<std::size_t>(worker)];
    session.worker = worker;
    connect(session);
    greet(session, make);
  }
}

Server::State::~State() {
  over = true;
  changed.notify_all();
  for (auto& session : sessions)
    if (session.thread.joinable()) session.thread.join();
}

// Throws what a session found, on the thread that updates.
void Server::State::throw_if_over() {
  if (error) std::rethrow_exception(error);
}

// The workers of the next update, the same on all servers where it is one update of all; nothing: there will be none.
std::optional<std::vector<int>> Server::State::agree() {
  const auto ready = [this] { return error || ledger.next() || ledger.actives() == 0; };
  const bool alone = !together() || servers.size() == 1;
  const bool leads = alone || servers.rank() == 0;
  while (true) {
    std::vector<int> candidates;
    bool ends = false;
    std::int64_t seen = 0;
    if (leads) {
      std::unique_lock lock(mutex);
      changed.wait(lock, ready);
      throw_if_over();
      seen = changes;
      if (auto next = ledger.next())
        candidates = std::move(*next);
      else
        ends = true;
      if (alone && ends) return std::nullopt;
      for (const int worker : candidates)
        if (alone) ledger.claim(worker);
    }
    if (alone) return candidates;

    // The first server proposes; each says which of them it has, or will never have.
    auto agreed = at::zeros({workers + 1}, at::kLong);
    auto* const words = agreed.data_ptr<std::int64_t>();
    for (const int worker : candidates) words[worker] = 1;
    words[workers] = ends;
    const auto together_with_others = [this](Work work) {
      while (!ended_with_others(work)) {
        const std::lock_guard lock(mutex);
        throw_if_over();
      }
    };
    together_with_others(servers.broadcast(agreed, 0));
    if (words[workers]) return std::nullopt;
    std::vector<int> proposed;
    for (int worker = 0; worker < workers; ++worker)
      if (words[worker]) proposed.push_back(worker);
    {
      std::unique_lock lock(mutex);
      for (const int worker : proposed) {
        changed.wait(lock, [&] { return error || ledger.has(worker) || !ledger.present(worker); });
        throw_if_over();
        words[worker] = ledger.claim(worker);
      }
    }
    // The smallest of each: it is the largest of the negative numbers.
    agreed.neg_();
    together_with_others(servers.all_reduce(agreed, Reduce::max));
    std::vector<int> all;
    for (int worker = 0; worker < workers; ++worker)
      if (words[worker] != 0) all.push_back(worker);
    std::int64_t enough = leads && all.size() == proposed.size();
    auto verdict = at::zeros({1}, at::kLong).fill_(enough);
    together_with_others(servers.broadcast(verdict, 0));
    if (verdict.item<std::int64_t>()) return all;
    // Somebody was lost. The sessions of servers that have its gradients do not hear of it by themselves.
    std::unique_lock lock(mutex);
    for (const int worker : proposed)
      if (words[worker] == 0 && ledger.present(worker) && ledger.has(worker))
        sessions[static_cast<std::size_t>(worker)].lost_elsewhere = true;
    ledger.release();
    changed.notify_all();
    if (!leads) continue;
    changed.wait(lock, [&] { return error || changes != seen; });
    throw_if_over();
  }
}

// The gradient of each Unit's share: the mean of the workers', added in their order.
void Server::State::sum_up(const std::vector<int>& of) {
  for (std::size_t unit = 0; unit < shares->units(); ++unit) {
    auto& trained = shares->unit(unit).trained();
    for (std::size_t at = 0; at < trained.size(); ++at) {
      auto& sum = trained[at].gradient;
      bool first = true;
      for (const int worker : of) {
        const auto& gradient = sessions[static_cast<std::size_t>(worker)].slots[unit].gradients[at];
        std::exchange(first, false) ? sum.copy_(gradient) : sum.add_(gradient);
      }
      // Gradients in fp16 were divided by the number of workers before they were rounded.
      double divisor = static_cast<double>(of.size());
      if (options.compression == plan::Compression::fp16 && gradients.value_or(sum.scalar_type()) != at::kHalf)
        divisor /= workers;
      if (divisor != 1) sum.div_(divisor);
    }
  }
}

void Server::State::unit_updated(std::size_t unit) {
  for (; unlocked <= unit; ++unlocked) {
    {
      const std::lock_guard lock(mutex);
      unit_versions[unlocked] = under_way;
    }
    unit_mutexes[unlocked]->unlock();
  }
  changed.notify_all();
}

void Server::State::update(const std::vector<int>& of) {
  const at::NoGradGuard no_grad;
  const std::lock_guard alone(updating);
  ServerUpdate done;
  for (auto& one : unit_mutexes) one->lock();
  unlocked = 0;
  try {
    double number = 0;
    {
      const std::lock_guard lock(mutex);
      done.pushes = ledger.commit(of);
      done.update = under_way = ledger.version();
      for (const auto& push : done.pushes) number += push.number / static_cast<double>(of.size());
      for (const int worker : of) {
        auto& session = sessions[static_cast<std::size_t>(worker)];
        session.used = true;
        session.number = number;
        if (together()) session.norm = 0;
      }
      done.number = number;
      ++changes;
    }
    // With one of several that is not finite the average is none either.
    const bool finite = together() || done.pushes.front().finite;
    if (finite) sum_up(of);
    if (finite && optimizer) {
      if (options.before_update) options.before_update(*optimizer, done.update - 1);
      shares->on_sum = [&](double squares) {
        const std::lock_guard lock(mutex);
        const double norm = std::sqrt(squares);
        for (const int worker : of) {
          auto& session = sessions[static_cast<std::size_t>(worker)];
          session.norm = norm;
          session.used = std::isfinite(norm) || !options.skip_non_finite;
        }
      };
      const auto result = optimizer->step({.clip = together() ? options.clip : 0,
                                           .clip_value = options.clip_value,
                                           .skip_non_finite = together() && options.skip_non_finite});
      done.applied = !result.skipped;
    } else if (!finite) {
      done.applied = false;
      const std::lock_guard lock(mutex);
      sessions[static_cast<std::size_t>(of.front())].used = false;
    }
  } catch (...) {
    for (; unlocked < unit_mutexes.size(); ++unlocked) unit_mutexes[unlocked]->unlock();
    throw;
  }
  // What was not updated has seen the update all the same.
  if (unlocked < shares->units()) unit_updated(shares->units() - 1);
  {
    const std::lock_guard lock(mutex);
    done.gradient_norm = sessions[static_cast<std::size_t>(of.front())].norm;
  }
  note(done);
  if (!options.after_update) return;
  const auto kept = options.after_update(done);
  const std::lock_guard lock(mutex);
  durable = kept;
}

void Server::State::note(ServerUpdate& update) {
  const std::lock_guard lock(mutex);
  std::int64_t sum = 0, count = 0;
  report.updates = update.update;
  report.skipped += update.applied ? 0 : 1;
  for (const auto& push : update.pushes)
    for (const auto version : push.versions) {
      const auto stale = update.update - 1 - version;
      report.most_stale = std::max(report.most_stale, stale);
      sum += stale;
      ++count;
    }
  update.staleness = count == 0 ? 0 : static_cast<double>(sum) / static_cast<double>(count);
  stale_sum += static_cast<double>(sum);
  stale_count += count;
  if (stale_count > 0) report.mean_stale = stale_sum / static_cast<double>(stale_count);
  if (options.keep_records) report.updates_kept.push_back(update);
}

Server::Server(const World& world, const ServerOptions& options, const MakeOptimizer& make)
    : state_(std::make_unique<State>(world, options, make)) {}
Server::~Server() = default;

ServerReport Server::serve() {
  auto& state = *state_;
  for (auto& session : state.sessions) session.thread = std::thread([&state, &session] { state.run(session); });
  std::exception_ptr error;
  try {
    while (const auto workers = state.agree()) state.update(*workers);
  } catch (...) {
    error = std::current_exception();
    state.give_up(error);
  }
  for (auto& session : state.sessions) session.thread.join();
  if (state.error) std::rethrow_exception(state.error);
  if (error) std::rethrow_exception(error);
  if (static_cast<int>(state.dropped_workers.size()) == state.workers)
    throw PeerLost(fmt::format("all {} workers were lost: nobody is left to train (server_lost = drop)", state.workers));
  auto report = state.report;
  report.dropped = state.ledger.dropped();
  for (const int worker : state.dropped_workers) {
    const auto first = state.ledger.last_used(worker) + 1;
    report.lost.push_back({.worker = worker, .step = first, .versions = {state.ledger.last_update(worker)}});
    // What came of it and was of no use is named by that already.
    std::erase_if(report.dropped, [&](const Push& push) { return push.worker == worker && push.step >= first; });
  }
  return report;
}

std::unique_lock<std::mutex> Server::hold() { return std::unique_lock(state_->updating); }

std::vector<Slice> Server::slices() {
  auto slices = parameter_slices(*state_->shares);
  if (!state_->optimizer) return slices;
  for (auto& slice : state_->optimizer->slices()) slices.push_back(std::move(slice));
  return slices;
}

void Server::slices_written() {
  parameters_written(*state_->shares);
  if (state_->optimizer) state_->optimizer->slices_written();
  for (std::size_t unit = 0; unit < state_->shares->units(); ++unit)
    for (auto& share : state_->shares->unit(unit).trained())
      if (share.copy.defined()) share.copy.copy_(share.master);
}

std::int64_t Server::version() const {
  const std::lock_guard lock(state_->mutex);
  return state_->ledger.version();
}

std::vector<std::int64_t> Server::steps() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<std::int64_t> steps;
  for (int worker = 0; worker < state_->workers; ++worker) steps.push_back(state_->ledger.steps(worker));
  return steps;
}

std::int64_t Server::slowest() const {
  const std::lock_guard lock(state_->mutex);
  std::optional<std::int64_t> slowest;
  const auto& dropped = state_->dropped_workers;
  for (int worker = 0; worker < state_->workers; ++worker)
    if (std::find(dropped.begin(), dropped.end(), worker) == dropped.end())
      slowest = std::min(slowest.value_or(state_->ledger.steps(worker)), state_->ledger.steps(worker));
  return slowest.value_or(0);
}

void Server::resume(std::int64_t version, const std::vector<std::int64_t>& steps) {
  auto& state = *state_;
  require(static_cast<int>(steps.size()) == state.workers, "steps of {} workers for a server of {}", steps.size(),
          state.workers);
  const std::lock_guard lock(state.mutex);
  state.ledger = Ledger({.mode = state.options.mode,
                         .workers = state.workers,
                         .staleness = state.options.staleness,
                         .backup = state.options.backup},
                        version);
  for (int worker = 0; worker < state.workers; ++worker)
    state.ledger.set_steps(worker, steps[static_cast<std::size_t>(worker)]);
  std::fill(state.unit_versions.begin(), state.unit_versions.end(), version);
}

std::int64_t Server::bytes() const {
  std::int64_t bytes = state_->optimizer ? state_->optimizer->state_bytes() : 0;
  for (std::size_t unit = 0; unit < state_->shares->units(); ++unit)
    for (const auto& share : state_->shares->unit(unit).trained())
      for (const auto* tensor : {&share.master, &share.copy, &share.gradient})
        if (tensor->defined()) bytes += static_cast<std::int64_t>(tensor->nbytes());
  for (const auto& session : state_->sessions)
    for (const auto& slot : session.slots)
      for (const auto& tensor : slot.gradients) bytes += static_cast<std::int64_t>(tensor.storage().nbytes());
  return bytes;
}

Recorder& Server::recorder(int worker) const {
  return state_->sessions.at(static_cast<std::size_t>(worker)).peer->world().recorder();
}

}  // namespace bonfire
