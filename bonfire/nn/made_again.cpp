#include "bonfire/nn/made_again.h"

#include <mutex>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "bonfire/base/error.h"

namespace bonfire {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

// What is made again, shared by those who have saved it.
class MadeAgain::Pieces {
 public:
  Pieces(const std::vector<Tensor>& inputs, MadeAgain::Again again) : again_(std::move(again)) {
    for (const auto& input : inputs) inputs_.emplace_back(input, false);
  }

  void resize(std::size_t count) { pieces_.resize(count); }
  std::size_t count() const { return pieces_.size(); }
  void saved(std::size_t at) {
    const std::lock_guard lock(mutex_);
    ++pieces_[at].users;
  }
  void forget(std::size_t at) {
    const std::lock_guard lock(mutex_);
    if (--pieces_[at].users == 0) pieces_[at].made.reset();
  }
  RepeatedScales& scales() { return scales_; }
  Tensor get(std::size_t at) {
    const std::lock_guard lock(mutex_);
    if (!pieces_[at].made.defined()) make();
    return pieces_[at].made;
  }

 private:
  struct Piece {
    int users = 0;
    Tensor made{};
  };

  void make() {
    require(again_ != nullptr, "what is made again for backward was made already, and is gone");
    const at::NoGradGuard no_grad;
    std::vector<Tensor> inputs;
    for (const auto& input : std::exchange(inputs_, {})) inputs.push_back(input.unpack().detach());
    const RepeatedScales::Scope scales(scales_, RepeatedScales::Run::again);
    auto made = std::exchange(again_, nullptr)(inputs, pieces_.size());
    require(made.size() == pieces_.size(), "{} tensors were to be made again, and {} were", pieces_.size(), made.size());
    for (std::size_t at = 0; at < made.size(); ++at)
      if (pieces_[at].users > 0) pieces_[at].made = std::move(made[at]);
  }

  std::vector<SavedVariable> inputs_;
  MadeAgain::Again again_;
  RepeatedScales scales_;
  std::vector<Piece> pieces_;
  std::mutex mutex_;
};

namespace {

bool is_same(const Tensor& one, const Tensor& other) {
  return one.is_alias_of(other) && one.storage_offset() == other.storage_offset() && one.sizes() == other.sizes() &&
         one.strides() == other.strides() && one.scalar_type() == other.scalar_type();
}

}  // namespace

class MadeAgain::Listener final : public SaveListener {
 public:
  Listener(const std::vector<Tensor>& inputs, Again again) : pieces_(std::make_shared<Pieces>(inputs, std::move(again))) {}

  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<Hook>(*this); }

  RepeatedScales& scales() { return pieces_->scales(); }
  void set_scope(const SaveScope& scope) { scope_ = &scope; }
  void drop(const std::vector<Tensor>& tensors) {
    require(dropped_.empty(), "MadeAgain::drop is called once");
    dropped_ = tensors;
    pieces_->resize(tensors.size());
  }

 private:
  class Hook final : public SavedVariableHooks {
   public:
    explicit Hook(const Listener& listener) : listener_(&listener) {}
    ~Hook() override {
      if (pieces_) pieces_->forget(at_);
    }

    void call_pack_hook(const Tensor& tensor) override {
      const auto& dropped = listener_->dropped_;
      for (std::size_t at = 0; at < dropped.size(); ++at) {
        if (!is_same(tensor, dropped[at])) continue;
        pieces_ = listener_->pieces_;
        pieces_->saved(at_ = at);
        return;
      }
      // Somebody around this scope may make it again.
      const OutsideOfScope outside(*listener_->scope_);
      kept_ = SavedVariable(tensor.detach(), false);
    }
    Tensor call_unpack_hook() override { return pieces_ ? pieces_->get(at_) : kept_.unpack(); }

   private:
    const Listener* listener_;        // while the tensor is saved
    std::shared_ptr<Pieces> pieces_;  // null: it is kept
    std::size_t at_ = 0;
    SavedVariable kept_;
  };

  std::shared_ptr<Pieces> pieces_;
  std::vector<Tensor> dropped_;
  const SaveScope* scope_ = nullptr;
};

MadeAgain::MadeAgain(const std::vector<Tensor>& inputs, Again again) {
  if (!at::GradMode::is_enabled()) return;
  listener_ = std::make_unique<Listener>(inputs, std::move(again));
  scope_ = std::make_unique<SaveScope>(*listener_);
  listener_->set_scope(*scope_);
  scales_ = std::make_unique<RepeatedScales::Scope>(listener_->scales(), RepeatedScales::Run::first);
}

MadeAgain::~MadeAgain() = default;

void MadeAgain::drop(const std::vector<Tensor>& tensors) {
  if (listener_) listener_->drop(tensors);
}

}  // namespace bonfire
