#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/server/description.h"
#include "bonfire/server/lives.h"
#include "bonfire/server/server_state.h"

namespace bonfire {
namespace {

std::vector<plan::ParameterGroup> units_of(const std::string& description) {
  std::vector<plan::ParameterGroup> units;
  for (std::size_t begin = 0; begin < description.size();) {
    const auto end = std::min(description.find("\n\n", begin), description.size());
    units.push_back(read_unit(description.substr(begin, end - begin)));
    begin = end + 2;
  }
  return units;
}

// What is sent to workers: what their forward reads.
const at::Tensor& weights_of(const TrainedShare& share) { return share.copy.defined() ? share.copy : share.master; }

}  // namespace

std::string Server::State::name_of(const Session& session) const {
  return fmt::format("worker {} (rank {})", session.worker, options.servers + session.worker);
}

void Server::State::connect(Session& session, std::function<void()> look) {
  const Lives keys{options.name, session.worker};
  session.peer = std::make_unique<Peer>(world.store(), keys.connection(world.rank(), session.life), 0, options.connection,
                                        ports, std::move(look));
}

// The first words with a worker.
void Server::State::greet(Session& session, const MakeOptimizer& make) {
  auto& peer = *session.peer;
  const auto hello = peer.receive(over);
  require(hello.kind == Header::Kind::hello, "{} began with message {}", name_of(session), static_cast<int>(hello.kind));
  auto bytes = at::empty({hello.bytes}, at::kByte);
  peer.receive({bytes}, over);
  const std::string said(static_cast<const char*>(bytes.const_data_ptr()), static_cast<std::size_t>(bytes.numel()));
  const bool first = !shares;
  if (first) {
    description = said;
    if (hello.flag >= 0) gradients = static_cast<at::ScalarType>(hello.flag);
    shares = std::make_unique<ServedShares>(units_of(said), servers);
    shares->on_updated = [this](std::size_t unit) { unit_updated(unit); };
    if (options.pulled == Pulled::weights) optimizer = make(*shares);
    unit_versions.assign(shares->units(), 0);
    while (unit_mutexes.size() < shares->units()) unit_mutexes.push_back(std::make_unique<std::mutex>());
  }
  require(said == description, "{} trains other parameters than worker 0: all workers train the same", name_of(session));
  {
    const std::lock_guard lock(mutex);
    peer.send({.kind = Header::Kind::welcome,
               .version = ledger.version(),
               .step = ledger.steps(session.worker),
               .flag = first})
        .wait();
  }
  make_slots(session);
  if (!first) return;
  const at::NoGradGuard no_grad;
  for (std::size_t at = 0; at < shares->units(); ++at) {
    const auto start = peer.receive(over);
    require(start.kind == Header::Kind::start, "{} sent message {} in place of its weights", name_of(session),
            static_cast<int>(start.kind));
    auto& unit = shares->unit(static_cast<std::size_t>(start.unit));
    std::vector<at::Tensor> masters;
    for (const auto& share : unit.trained()) masters.push_back(share.master);
    peer.receive(masters, over);
    for (const auto& share : unit.trained())
      if (share.copy.defined()) share.copy.copy_(share.master);
  }
}

void Server::State::make_slots(Session& session) {
  // An update may still add up what a worker that is back had sent before it was lost.
  const std::lock_guard alone(updating);
  session.slots.clear();
  session.versions.assign(shares->units(), 0);
  for (std::size_t unit = 0; unit < shares->units(); ++unit) {
    auto& slot = session.slots.emplace_back();
    for (const auto& share : shares->unit(unit).trained()) {
      const auto& weights = weights_of(share);
      const auto average = gradients.value_or(share.gradient.scalar_type()), wire = on_wire(options.compression, average);
      const auto bytes_as = [&](at::ScalarType type) {
        return weights.numel() * static_cast<std::int64_t>(c10::elementSize(type));
      };
      const auto memory =
          at::empty({std::max({bytes_as(wire), bytes_as(average), bytes_as(weights.scalar_type())})}, at::kByte);
      const auto as = [&](at::ScalarType type) { return memory.narrow(0, 0, bytes_as(type)).view(type); };
      slot.gradients.push_back(as(wire));
      slot.averages.push_back(as(average));
      slot.weights.push_back(as(weights.scalar_type()));
    }
  }
}

void Server::State::run(Session& session) try {
  while (true) {
    try {
      // Back from ahead of the others, it may not begin a step yet.
      await_others(session, [&] { return ledger.may_go_on(session.worker); });
      answer(session, 0);
      while (hear(session)) {
      }
      return;
    } catch (const PeerLost& lost) {
      if (!lose(session, lost.what())) return;
    }
    await_return(session);
  }
} catch (...) {
  give_up(std::current_exception());
}

void Server::State::give_up(std::exception_ptr what) {
  const std::lock_guard lock(mutex);
  if (!error && !over) error = std::move(what);
  over = true;
  changed.notify_all();
}

// One message. False: the worker is done.
bool Server::State::hear(Session& session) {
  const auto header = session.peer->receive(over);
  switch (header.kind) {
    case Header::Kind::push: {
      const auto unit = static_cast<std::size_t>(header.unit);
      require(unit < session.slots.size(), "{} sent gradients of Unit {} of {}", name_of(session), unit,
              session.slots.size());
      auto& slot = session.slots[unit];
      session.peer->receive(slot.gradients, over);
      // On an emulated link it may have set out late, and it queues with those of other workers.
      if (header.begin > now_ns()) sleep_until(header.begin);
      if (const auto there = session.peer->arrival(header, bytes_of(slot.gradients)); there > 0) sleep_until(there);
      session.versions[unit] = header.version;
      ++session.pushed;
      return true;
    }
    case Header::Kind::end: {
      require(std::exchange(session.pushed, 0) == session.slots.size(), "{} ended step {} without gradients of all {} Units",
              name_of(session), header.step, session.slots.size());
      {
        const std::lock_guard lock(mutex);
        if (!together()) session.norm = header.norm;
        ledger.add({.worker = session.worker,
                    .step = header.step,
                    .versions = session.versions,
                    .mixed = header.version < 0,
                    .finite = header.flag != 0,
                    .number = header.number});
        ++changes;
        changed.notify_all();
      }
      await_and_answer(session);
      return true;
    }
    case Header::Kind::abandon: session.pushed = 0; return true;
    case Header::Kind::leave: {
      const std::lock_guard lock(mutex);
      ledger.leave(session.worker);
      ++changes;
      changed.notify_all();
      return false;
    }
    default: fail("{} sent message {}, which no worker sends", name_of(session), static_cast<int>(header.kind));
  }
}

// Meanwhile the worker says nothing, so its connection does not tell that it is gone. Its next life does, and so do servers
// that it has not sent its gradients to: nobody may wait here for a worker that waits to come back.
void Server::State::await_others(Session& session, const std::function<bool()>& ready) {
  const auto look = options.lost == WhenLost::wait ? std::chrono::milliseconds(200) : std::chrono::hours(1);
  std::unique_lock lock(mutex);
  while (!changed.wait_for(lock, look, [&] { return over || session.lost_elsewhere || ready(); })) {
    lock.unlock();
    if (options.lost == WhenLost::wait && lives(session) > session.life) throw PeerLost("another life of it has begun");
    lock.lock();
  }
  require(!over, "the run ends");
  if (std::exchange(session.lost_elsewhere, false)) throw PeerLost("another server has lost it");
}

void Server::State::await_and_answer(Session& session) {
  await_others(session, [&] { return ledger.outcome(session.worker) && ledger.may_go_on(session.worker); });
  std::int64_t version = 0;
  {
    const std::lock_guard lock(mutex);
    const auto outcome = *ledger.outcome(session.worker);
    version = outcome.version;
    if (!outcome.used) {
      session.used = false;
      session.norm = session.number = 0;
    }
    report.most_lead = std::max(report.most_lead, ledger.lead(session.worker));
  }
  answer(session, version);
}

// Sends all weights, each Unit's as soon as it has seen update `version`.
void Server::State::answer(Session& session, std::int64_t version) {
  std::vector<std::int64_t> sent_versions(session.slots.size());
  // Where updates do not wait for this worker, those that come meanwhile must not leave it weights of two versions, whose
  // gradients nobody could use.
  const bool all_at_once = together() && (options.backup > 0 || version == 0);
  for (bool uniform = !all_at_once; !uniform;) {
    for (std::size_t unit = 0; unit < session.slots.size(); ++unit)
      sent_versions[unit] = copy_weights(session, unit, version);
    uniform =
        std::all_of(sent_versions.begin(), sent_versions.end(), [&](auto one) { return one == sent_versions.front(); });
  }
  std::vector<Work> works;
  for (std::size_t unit = 0; unit < session.slots.size(); ++unit) {
    if (!all_at_once) sent_versions[unit] = copy_weights(session, unit, version);
    Header header{.kind = Header::Kind::answer, .unit = static_cast<std::int64_t>(unit), .version = sent_versions[unit]};
    {
      const std::lock_guard lock(mutex);
      header.step = ledger.steps(session.worker);
      header.durable = durable;
      header.flag = session.used;
      header.norm = session.norm;
      header.number = session.number;
    }
    Nanoseconds until = 0;
    const auto& slot = session.slots[unit];
    works.push_back(session.peer->send(header, averages(version) ? slot.averages : slot.weights, &until));
    // Answers to several workers go out in turns.
    if (until > 0) sleep_until(until);
  }
  for (auto& work : works)
    while (!work.wait_for(std::chrono::milliseconds(100))) require(!over, "the run ends");
}

std::int64_t Server::State::copy_weights(Session& session, std::size_t unit, std::int64_t at_least) {
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return over || unit_versions[unit] >= at_least; });
    require(!over, "the run ends");
  }
  const at::NoGradGuard no_grad;
  const std::lock_guard still(*unit_mutexes[unit]);
  const auto& trained = shares->unit(unit).trained();
  auto& slot = session.slots[unit];
  for (std::size_t at = 0; at < trained.size(); ++at)
    averages(at_least) ? slot.averages[at].copy_(trained[at].gradient) : slot.weights[at].copy_(weights_of(trained[at]));
  const std::lock_guard lock(mutex);
  return unit_versions[unit];
}

bool Server::State::lose(Session& session, const std::string& why) {
  const auto line = why.substr(0, why.find('\n'));
  // It may have done all its steps, and ended before it could say so to every server.
  const bool has_left = world.store().check({Lives{options.name, session.worker}.steps_of_one_that_left()});
  if (options.lost == WhenLost::stop && !has_left)
    throw PeerLost(fmt::format("{} was lost: {}; the run ends (server_lost = stop; allowed: stop | drop | wait)",
                               name_of(session), line));
  const std::lock_guard lock(mutex);
  ++changes;
  session.pushed = 0;
  session.lost_elsewhere = false;
  if (has_left) {
    ledger.leave(session.worker);
  } else if (options.lost == WhenLost::drop) {
    ledger.lose(session.worker, false);
    dropped_workers.push_back(session.worker);
    options.log.warning("{} was lost after {} steps; the run goes on without it (server_lost = drop)", name_of(session),
                        ledger.steps(session.worker));
  } else {
    ledger.lose(session.worker, true);
    options.log.warning("{} was lost after {} steps; the run waits for it (server_lost = wait)", name_of(session),
                        ledger.steps(session.worker));
  }
  changed.notify_all();
  return !has_left && options.lost == WhenLost::wait;
}

std::int64_t Server::State::lives(const Session& session) const {
  return world.store().add(Lives{options.name, session.worker}.count(), 0);
}

// The worker's newest life after that of the session.
std::int64_t Server::State::await_life(const Session& session) {
  while (true) {
    const auto life = lives(session);
    std::unique_lock lock(mutex);
    // Gradients of its last life that are on their way into an update count as a step that it has taken.
    if (life > session.life && !ledger.has(session.worker)) return life;
    // Nobody tells this thread: the store is asked.
    changed.wait_for(lock, std::chrono::milliseconds(200), [&] { return over.load(); });
    require(!over, "the run ends");
  }
}

// With the life that the session has now, which may be over by then. Throws PeerLost where it is.
void Server::State::reconnect(Session& session) try {
  connect(session, [&] {
    require(!over, "the run ends");
    if (lives(session) > session.life) throw PeerLost("another life of it has begun");
  });
} catch (const std::exception& error) {
  require(!over, "the run ends");
  // c10d makes errors of its own of all that goes wrong. If it is not the worker that was lost, its next life says so.
  throw PeerLost(error.what());
}

void Server::State::await_return(Session& session) {
  while (true) {
    session.peer.reset();
    session.life = await_life(session);
    // Not sooner: what it sends before could be the words of one that is lost again by now.
    world.store().set(Lives{options.name, session.worker}.accepted(world.rank(), session.life), std::string("yes"));
    try {
      reconnect(session);
      greet(session, {});
      break;
    } catch (const PeerLost& lost) {
      const std::string why = lost.what();
      options.log.warning("{} was lost again while it came back: {}; the run waits for it", name_of(session),
                          why.substr(0, why.find('\n')));
    }
  }
  const std::lock_guard lock(mutex);
  ledger.come_back(session.worker);
  ++changes;
  changed.notify_all();
  options.log.info("{} is back after {} steps", name_of(session), ledger.steps(session.worker));
}

}  // namespace bonfire
