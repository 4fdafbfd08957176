#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bonfire/nn/gradient_slots.h"
#include "bonfire/shard/buffer_pool.h"
#include "bonfire/shard/engine.h"
#include "bonfire/shard/engine_memory.h"
#include "bonfire/shard/equality.h"
#include "bonfire/shard/host_clock.h"
#include "bonfire/shard/reducer.h"
#include "bonfire/shard/residency.h"
#include "bonfire/shard/settings.h"

namespace bonfire {

// Lets layers of ours write a parameter's gradient straight into the flat buffer. Outlives the engine where the module does;
// from then on the gradient is the parameter's own again.
class FlatSink final : public GradientSink {
 public:
  FlatSink(at::Tensor parameter, std::function<at::Tensor(bool& fresh)> home)
      : parameter_(std::move(parameter)), home_(std::move(home)) {}

  at::Tensor buffer(bool& fresh) override;
  // The parameter's own hook tells when all uses have arrived: autograd calls it with no gradient then.
  void arrived() override {}
  void leave() { home_ = nullptr; }

 private:
  at::Tensor parameter_;
  std::function<at::Tensor(bool& fresh)> home_;
};

struct Engine::State {
  // One trained or frozen parameter of the module.
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    std::size_t group = 0;
    at::ScalarType master = at::kFloat;   // the dtype it was given in, which its optimizer state keeps
    at::ScalarType compute = at::kFloat;  // what forward reads
    bool trained = true;
    // More than 0: while it is trained, forward reads it in eight bits, with so many scales.
    std::int64_t scales = 0;
    std::shared_ptr<WeightScales> known_scales{};
    std::size_t flat = 0, segment = 0;  // where it lies now
    std::size_t arrived = 0;            // in this backward: how many of `tensor` and `tied`
    std::shared_ptr<FlatSink> sink{};   // of layers that can use one
    std::vector<at::Tensor> tied{};     // other tensors of the module over the same memory
    at::Tensor carried{};               // a gradient on its way to another flat buffer
    // Forward reads a copy of what is updated, and so often had somebody else written to it when the two were alike.
    bool copied = false;
    std::int64_t writes = 0;

    // The others have this one's memory.
    void tell_tied() {
      for (auto& other : tied) other.set_data(tensor.detach());
    }
    std::vector<at::Tensor> all() const {
      std::vector<at::Tensor> tensors{tensor};
      tensors.insert(tensors.end(), tied.begin(), tied.end());
      return tensors;
    }
  };

  State(const Mesh& mesh, torch::nn::Module& module, ShardOptions options);
  ~State();
  // Takes hooks and sinks off.
  void leave_module();

  // --- Where everything lies (engine_layout.cpp).
  void find_parameters(torch::nn::Module& module);
  void start_equal();
  void install(torch::nn::Module& module);
  void lay_out(const std::vector<std::size_t>& order_of_groups);
  std::unique_ptr<FlatParameter> make_flat(plan::FlatLayout layout, const std::vector<std::size_t>& members);
  std::unique_ptr<FlatParameter> adopt(const plan::FlatLayout& layout, const std::vector<std::size_t>& members);
  void dissolve(const FlatParameter& flat);
  void tell_residency();
  void tell_scales();
  // Copies are what is updated now. From then on nobody but the engine may write to them.
  void note_writes();
  void require_unwritten() const;
  std::int64_t writes_of_others(const Parameter& parameter) const;
  std::vector<std::size_t> likely_order() const;
  void follow_freezing();
  void learn_order();

  // Collective: rounds what was updated by the largest magnitudes that any rank has.
  void agree_on_scales();

  // --- One backward (engine.cpp).
  void begin_backward(bool last);
  void begin_backward(const GradientPass& pass);
  void backward_ended(const FlatParameter& flat);
  void arrive(Parameter& parameter, const at::Tensor& tensor);
  at::Tensor sink_buffer(Parameter& parameter, bool& fresh);
  void launch_ready();
  void end_backward();
  void run_backward(const at::Tensor& loss, bool last, const BackwardOptions& how);
  void require_same_training() const;
  void abandon_backward(const std::string& words);
  void end_step();
  void broadcast_buffers();
  // Ranks may have run different Units since the last backward: all come to the same place. Collective.
  void meet() const;
  std::vector<bool> out_somewhere() const;
  // Averages are over the ranks that had data.
  void scale_gradients();

  // --- Uneven inputs (uneven.cpp).
  // Two numbers, summed over all ranks. Collective.
  struct Announcement {
    at::Tensor values;
    Work work;
    std::pair<double, double> heard();
  };
  Announcement announce(double first, double second) const;
  void announce_pass(bool differentiates);
  void announce_backward(bool is_last);
  bool join_others();

  // --- Driven by a schedule (driven.cpp).
  // Whether seams bring parameters in and let them go.
  bool seams_gather() const { return settings.comes_and_goes() && !options.driven; }

  Engine* owner = nullptr;  // whose state it is, wherever that was moved
  const ShardSettings settings;
  const Mesh& mesh = settings.mesh;
  const ShardOptions& options = settings.options;
  const plan::Factors& factors = settings.factors;
  std::vector<Parameter> parameters;
  std::vector<ModuleGroup> groups;
  std::vector<std::vector<std::size_t>> members;  // of each group, by their numbers in `parameters`
  std::vector<at::Tensor> buffers;
  // A Unit with this engine's hooks. The module may go before the engine: then nothing but the place of its hooks is left.
  struct Seam {
    UnitSeam* unit;
    std::string name;
    std::shared_ptr<UnitHooks*> hooks;
  };
  std::vector<Seam> seams;

  const std::shared_ptr<EngineMemory> memory;
  BufferPool& pool = memory->parameters;
  const std::int64_t first_place;  // in the pool: no other engine that shares it has the same
  HostClock host;
  std::shared_ptr<Reduction> reduction;
  std::optional<Reducer> reducer;
  std::shared_ptr<Residency> residency;   // where memory comes and goes
  std::unique_ptr<UnitHooks> input_cast;  // where it does not, and forward reads parameters in another type
  std::vector<std::unique_ptr<FlatParameter>> flats;
  std::vector<std::size_t> order;  // of the groups, as backward finishes them
  std::int64_t version = 0;
  // What the gradients are at the moment.
  enum class Gradients {
    none,     // there has been no backward yet
    partial,  // of some microbatches; the last is still to come
    whole,    // of a whole step, averaged over the ranks
    spent,    // used by an update
    lost,     // backward threw
  };
  Gradients gradients = Gradients::none;
  // The next backward starts from nothing.
  bool starts_afresh() const { return gradients == Gradients::spent || gradients == Gradients::lost; }
  std::vector<Work> refreshes;
  std::vector<std::size_t> unscaled;  // flats whose masters were updated, and what has scales not rounded yet

  // Of the backward that is running.
  bool running = false, last = false, reducing = false;
  std::vector<std::size_t> missing;           // per flat: trained parameters whose gradient has not come yet
  std::vector<std::size_t> missing_in_group;  // per group
  std::vector<std::size_t> finished_groups;   // in order of arrival
  std::size_t next = 0;                       // the first flat that was not launched
  bool learned = false;
  double active = 1;     // ranks that had data for it
  bool joining = false;  // this one has none any more
};

}  // namespace bonfire
