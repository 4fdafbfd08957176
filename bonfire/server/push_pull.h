#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/comm/world.h"
#include "bonfire/server/options.h"
#include "bonfire/server/peer.h"
#include "bonfire/shard/mean_scale.h"
#include "bonfire/shard/reduction.h"

namespace bonfire {

class Engine;

// A worker's side: gradients leave for the servers bucket by bucket while backward runs, and new weights come back Unit by
// Unit. To the engine it is the reduction over replicas.
class PushPull final : public Reduction, public AveragesOthers {
 public:
  // Collective: connects to every server.
  PushPull(const World& world, ServerOptions options);
  ~PushPull() override;

  // The engine that has this as its hook: says what it trains, and gets the servers' weights. Steps of this worker that the
  // servers know of are returned: 0, unless it was lost and is back.
  std::int64_t begin(Engine& engine);

  void begin(std::size_t bucket, FlatParameter& flat) override;
  void advance(std::size_t bucket, FlatParameter& flat) override;
  void end(std::size_t bucket, FlatParameter& flat) override;
  std::string averaged_by() const override;

  // All gradients of the step are there: the servers may use them. `number` is averaged beside them.
  void end_push(Engine& engine, double number);
  // Those that were sent are void.
  void abandon();
  // What the servers answer may come in from now on, into the memory of the gradients.
  void begin_pull();
  // The weights of a Unit, or of all, are there when this returns.
  void await(std::size_t unit);
  void await_all();
  bool pending(std::size_t unit) const { return !units_[unit].answers.empty(); }
  // The first parameter of each Unit, in forward order.
  std::vector<std::string> units() const;
  // Of the last step whose answer has begun to come in; waits for that.
  ServedStep report();
  // This worker was there before, and was lost.
  bool is_back() const { return life_ > 1; }
  // Before its last life ended, this worker had done all its steps: no server waits for it, and it is connected to none.
  bool has_left() const { return has_left_; }
  void leave();

  const std::vector<std::unique_ptr<Peer>>& peers() const { return peers_; }
  const ServerOptions& options() const { return options_; }

 private:
  struct Answer {
    Work work;
    at::Tensor header;
  };
  struct Sent {
    std::size_t server = 0;
    Work work;
  };
  struct Unit {
    std::string key;  // the first of its trained parameters
    FlatParameter* flat = nullptr;
    std::int64_t elements = 0;           // trained
    std::vector<std::int64_t> versions;  // of its weights, by server
    std::vector<Answer> answers;         // that are to come, by server
    std::vector<at::Tensor> staging;     // where they come in, by region
    std::vector<Sent> sent;              // gradients
    bool pushed = false;                 // in this step
  };
  Unit& unit_of(FlatParameter& flat);
  void push(Unit& unit);
  void send_all(const Header& header);
  void send(std::size_t server, const Header& header, const std::vector<at::Tensor>& tensors, std::vector<Sent>& sent);
  void conclude(std::vector<Sent>& sent) const;
  std::vector<at::Tensor> part(const std::vector<at::Tensor>& regions, int server) const;
  bool defers() const;
  // Of all weights; -1 where they have several.
  std::int64_t version() const;

  World world_;
  ServerOptions options_;
  Ports ports_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Unit> units_;  // in forward order
  std::vector<Sent> sent_;   // heads
  std::int64_t step_ = 0, steps_known_ = 0;
  std::int64_t life_ = 1;
  bool has_left_ = false;
  bool ended_ = false;  // this step's push, where gradients are pulled
  ServedStep report_;
};

}  // namespace bonfire
