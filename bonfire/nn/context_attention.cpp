#include "bonfire/nn/context_attention.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"
#include "bonfire/kernels/argument.h"
#include "bonfire/kernels/backward_node.h"
#include "bonfire/kernels/self_attention.h"

namespace bonfire {
namespace {

using at::Tensor;
using torch::autograd::variable_list;
using Gradients = PartialAttentionGradients;

// Something that goes round: each rank hands on what it has to the next one and gets that of the one before it.
class Ring {
 public:
  Ring(const Group& group, Tensor first) : group_(group), here_(std::move(first)) {}

  const Tensor& here() const { return here_; }
  // What is here may be read while it is under way.
  void pass() {
    if (!there_.defined()) there_ = at::empty_like(here_);
    const int ranks = group_.size(), rank = group_.rank();
    const std::array messages{Message{Message::Way::send, here_, (rank + 1) % ranks},
                              Message{Message::Way::receive, there_, (rank + ranks - 1) % ranks}};
    work_ = group_.batch(messages);
  }
  void arrive() {
    work_.wait();
    std::swap(here_, there_);
  }

 private:
  const Group& group_;
  Tensor here_, there_;
  Work work_;
};

struct Heads {
  Tensor q, k, v;  // [batch, heads, positions, head_dim]
};

Tensor rows(const Tensor& x, const AttentionPart& part) { return x.narrow(2, part.query, part.queries); }
Tensor keys(const Tensor& x, const AttentionPart& part) { return x.narrow(2, part.key, part.keys); }

struct Attended {
  Tensor out, log_sums;  // [batch, positions, heads, head_dim]; [batch, heads, positions]
};

// What rows see of their own rank's keys: every row is in one part.
Attended attend_to_own(const Heads& x, const std::vector<AttentionPart>& parts) {
  if (parts.size() == 1) {
    auto whole = partial_attention(x.q, x.k, x.v, true);
    return {whole.out.transpose(1, 2).contiguous(), whole.log_sums.contiguous()};
  }
  const std::int64_t batch = x.q.size(0), heads = x.q.size(1), positions = x.q.size(2);
  Attended made{at::empty({batch, positions, heads, x.q.size(3)}, x.q.options()),
                at::empty({batch, heads, positions}, x.q.options().dtype(sum_type(x.q.scalar_type())))};
  for (const auto& part : parts) {
    const auto one = partial_attention(rows(x.q, part), keys(x.k, part), keys(x.v, part), part.causal);
    made.out.narrow(1, part.query, part.queries).copy_(one.out.transpose(1, 2));
    rows(made.log_sums, part).copy_(one.log_sums);
  }
  return made;
}

// The rank whose keys are here after so many passes.
int maker_of(const Group& group, int passes) { return (group.rank() - passes + group.size()) % group.size(); }

Attended attend(const Heads& x, const Group& group, const SequencePlaces& places) {
  if (group.size() == 1) return attend_to_own(x, places.seen(0));
  Ring ring(group, at::stack({x.k, x.v}));
  ring.pass();
  Attended made = attend_to_own(x, places.seen(group.rank()));
  const auto type = made.out.scalar_type();
  made.out = made.out.to(sum_type(type));
  for (int passes = 1; passes < group.size(); ++passes) {
    ring.arrive();
    if (passes + 1 < group.size()) ring.pass();
    const Tensor k = ring.here()[0], v = ring.here()[1];
    for (const auto& part : places.seen(maker_of(group, passes)))
      add_part(made.out.narrow(1, part.query, part.queries), rows(made.log_sums, part),
               partial_attention(rows(x.q, part), keys(k, part), keys(v, part), part.causal));
  }
  made.out = made.out.to(type);
  return made;
}

struct Saved {
  Heads x;
  Tensor out, log_sums;  // by heads
};

Gradients gradients_of(const Tensor& d_out, const Saved& saved, const Tensor& k, const Tensor& v,
                       const AttentionPart& part) {
  return partial_attention_backward(rows(d_out, part),
                                    {.q = rows(saved.x.q, part),
                                     .k = keys(k, part),
                                     .v = keys(v, part),
                                     .out = rows(saved.out, part),
                                     .log_sums = rows(saved.log_sums, part)},
                                    part.causal);
}

// Those of a rank's own part: every row, and every key, is in one of them.
Gradients gradients_of_own(const Tensor& d_out, const Saved& saved, const std::vector<AttentionPart>& parts) {
  if (parts.size() == 1) return gradients_of(d_out, saved, saved.x.k, saved.x.v, parts.front());
  Gradients d{at::empty_like(saved.x.q), at::empty_like(saved.x.k), at::empty_like(saved.x.v)};
  for (const auto& part : parts) {
    const auto one = gradients_of(d_out, saved, saved.x.k, saved.x.v, part);
    rows(d.q, part).copy_(one.q);
    keys(d.k, part).copy_(one.k);
    keys(d.v, part).copy_(one.v);
  }
  return d;
}

// Keys and values go round once more, and one step behind them the gradients that other ranks have made for them, back to
// their own.
Gradients attend_backward(const Tensor& d_out, const Saved& saved, const Group& group, const SequencePlaces& places) {
  if (group.size() == 1) return gradients_of_own(d_out, saved, places.seen(0));
  const auto type = saved.x.q.scalar_type(), wide = sum_type(type);
  Ring ring(group, at::stack({saved.x.k, saved.x.v}));
  ring.pass();
  Gradients own = gradients_of_own(d_out, saved, places.seen(group.rank()));
  Tensor d_q = own.q.to(wide);
  Ring sums(group, at::zeros(ring.here().sizes(), ring.here().options().dtype(wide)));
  for (int passes = 1; passes < group.size(); ++passes) {
    ring.arrive();
    if (passes + 1 < group.size()) ring.pass();
    const auto& parts = places.seen(maker_of(group, passes));
    std::vector<Gradients> made;
    for (const auto& part : parts) made.push_back(gradients_of(d_out, saved, ring.here()[0], ring.here()[1], part));
    if (passes > 1) sums.arrive();
    for (std::size_t at = 0; at < parts.size(); ++at) {
      rows(d_q, parts[at]).add_(made[at].q);
      keys(sums.here()[0], parts[at]).add_(made[at].k);
      keys(sums.here()[1], parts[at]).add_(made[at].v);
    }
    sums.pass();
  }
  sums.arrive();
  const auto with_others = [&](const Tensor& mine, int which) { return sums.here()[which].add_(mine).to(type); };
  return {d_q.to(type), with_others(own.k, 0), with_others(own.v, 1)};
}

struct AttendNode : BackwardNode {
  Group group;
  std::shared_ptr<const SequencePlaces> places;

  variable_list backward(const variable_list& gradients) override {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Saved kept{{saved(0), saved(1), saved(2)}, saved(3).transpose(1, 2), saved(4)};
    const Tensor d_out = gradients[0].contiguous().view(kept.out.transpose(1, 2).sizes()).transpose(1, 2);
    auto d = attend_backward(d_out, kept, group, *places);
    return {std::move(d.q), std::move(d.k), std::move(d.v)};
  }
};

// [batch, positions, heads * head_dim] of q, k and v by heads.
Tensor attended(const Tensor& q, const Tensor& k, const Tensor& v, std::shared_ptr<const SequencePlaces> places,
                const Group& group) {
  auto node = make_node<AttendNode>(q, k, v);
  Attended made;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    made = attend({q, k, v}, group, *places);
  }
  const Tensor out = made.out.flatten(2);
  if (!node) return out;
  node->group = group;
  node->places = std::move(places);
  for (const Tensor& tensor : {q, k, v, made.out, made.log_sums}) node->save(tensor);
  torch::autograd::set_history(out, node);
  return out;
}

// Positions of all heads, or all positions of some heads, of columns that consist of sections, each with its heads side by
// side: the way from one to the other and back.
struct HeadsExchange {
  Group group;
  std::vector<std::int64_t> sections;  // columns on all ranks together

  // [batch, own positions, columns] to [batch, all positions, columns / ranks].
  Tensor to_heads(const Tensor& x) const {
    const std::int64_t ranks = group.size(), batch = x.size(0), own = x.size(1), columns = x.size(2) / ranks;
    Tensor out = at::empty({ranks, batch, own, columns}, x.options());
    std::int64_t from = 0, to = 0;
    for (const std::int64_t section : sections) {
      const std::int64_t part = section / ranks;
      out.narrow(3, to, part).copy_(x.narrow(2, from, section).view({batch, own, ranks, part}).permute({2, 0, 1, 3}));
      from += section;
      to += part;
    }
    const Tensor in = at::empty_like(out);
    group.all_to_all(in, out).wait();
    Tensor all = at::empty({batch, ranks * own, columns}, x.options());
    for_each_chunk(own, [&](int rank, const Stretch& chunk) {
      all.narrow(1, chunk.place, chunk.count).copy_(in[rank].narrow(1, chunk.own, chunk.count));
    });
    return all;
  }

  // And back.
  Tensor to_positions(const Tensor& all) const {
    const std::int64_t ranks = group.size(), batch = all.size(0), own = all.size(1) / ranks, columns = all.size(2);
    Tensor out = at::empty({ranks, batch, own, columns}, all.options());
    for_each_chunk(own, [&](int rank, const Stretch& chunk) {
      out[rank].narrow(1, chunk.own, chunk.count).copy_(all.narrow(1, chunk.place, chunk.count));
    });
    const Tensor in = at::empty_like(out);
    group.all_to_all(in, out).wait();
    Tensor x = at::empty({batch, own, ranks * columns}, all.options());
    std::int64_t from = 0, to = 0;
    for (const std::int64_t section : sections) {
      const std::int64_t part = section / ranks;
      x.narrow(2, to, section).view({batch, own, ranks, part}).copy_(in.narrow(3, from, part).permute({1, 2, 0, 3}));
      from += part;
      to += section;
    }
    return x;
  }

 private:
  template <class Body>
  void for_each_chunk(std::int64_t own, const Body& body) const {
    for (int rank = 0; rank < group.size(); ++rank)
      for (const auto& chunk : stretches_of({rank, group.size()}, own)) body(rank, chunk);
  }
};

struct ExchangeNode : BackwardNode {
  HeadsExchange exchange;
  bool to_heads = true;

  variable_list backward(const variable_list& gradients) override {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return {to_heads ? exchange.to_positions(gradients[0]) : exchange.to_heads(gradients[0].contiguous())};
  }
};

Tensor exchanged(const Tensor& x, const HeadsExchange& exchange, bool to_heads) {
  auto node = make_node<ExchangeNode>(x);
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    out = to_heads ? exchange.to_heads(x.contiguous()) : exchange.to_positions(x);
  }
  if (!node) return out;
  node->exchange = exchange;
  node->to_heads = to_heads;
  torch::autograd::set_history(out, node);
  return out;
}

// Of the positions that are here.
Tensor attention_here(const Tensor& qkv, QkvLayout layout, const std::shared_ptr<const SequencePlaces>& places,
                      const Group& group) {
  const std::int64_t batch = qkv.size(0), positions = qkv.size(1);
  layout.rotary = places->rows_of(layout.rotary);
  const bool in_one_row = places->in_one_row();
  require(!in_one_row || places->places().size(0) == batch,
          "attention of {} samples, documents of {}; allowed: those of each", batch,
          in_one_row ? places->places().size(0) : 0);
  const auto [q, k, v] = split_qkv(in_one_row ? qkv.reshape({1, batch * positions, -1}) : qkv, layout);
  const Tensor out = attended(q, k, v, places, group);
  return in_one_row ? out.view({batch, positions, -1}) : out;
}

}  // namespace

void require_heads(const ContextRanks& ranks, std::int64_t heads, std::int64_t kv_heads) {
  if (!ranks.split() || ranks.way == ContextWay::ring) return;
  const auto divides = [&](const char* what, std::int64_t count) {
    require(count % ranks.group.size() == 0, "{} heads of {} over {} ranks that exchange them; allowed: a multiple of {}",
            count, what, ranks.group.size(), ranks.group.size());
  };
  divides("queries", heads);
  divides("keys", kv_heads);
}

Tensor context_attention(const Tensor& qkv, const QkvLayout& layout, const Documents& documents, const ContextRanks& ranks) {
  // The table may be shorter than the positions that are here, where documents are.
  require_packed(qkv, {.heads = layout.heads, .kv_heads = layout.kv_heads});
  if (ranks.way == ContextWay::ring || !ranks.split())
    return attention_here(qkv, layout, documents.places(ranks.part(), qkv.size(1)), ranks.group);
  require_heads(ranks, layout.heads, layout.kv_heads);
  const std::int64_t size = qkv.size(2) / (layout.heads + 2 * layout.kv_heads), queries = layout.heads * size,
                     keys = layout.kv_heads * size;
  // Before anything is exchanged.
  if (const auto& cosine = layout.rotary.cosine; cosine.defined())
    require_sizes({"context_attention", "the table of cosines", cosine}, {any_size, size / 2}, qkv);
  const Tensor all = exchanged(qkv, {ranks.group, {queries, keys, keys}}, true);
  QkvLayout own = layout;
  own.heads /= ranks.group.size();
  own.kv_heads /= ranks.group.size();
  own.in_place = true;
  const Tensor out = documents.separate() ? attention_here(all, own, documents.places({}, all.size(1)), Group())
                                          : self_attention(all, own, {.causal = true});
  return exchanged(out, {ranks.group, {queries}}, false);
}

Tensor weighed_by_targets(const Tensor& loss, const Tensor& own_target, const ContextRanks& ranks) {
  constexpr std::int64_t ignored = -100;
  if (!ranks.split()) return loss;
  const Tensor own = own_target.ne(ignored).sum().to(at::kDouble);
  const Tensor all = own.clone().view({1});
  ranks.group.all_reduce(all).wait();
  const Tensor weight = own.mul(static_cast<double>(ranks.group.size())).div(all[0]).to(loss.scalar_type());
  return at::where(own.gt(0), loss, at::zeros({}, loss.options())).mul(weight);
}

}  // namespace bonfire
