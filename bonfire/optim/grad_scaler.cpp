#include "bonfire/optim/grad_scaler.h"

#include "bonfire/base/error.h"

namespace bonfire {

GradScaler::GradScaler(const GradScalerOptions& options) : options_(options), scale_(options.scale) {
  require(
      options.scale > 0 && options.growth > 1 && options.backoff > 0 && options.backoff < 1 && options.growth_interval > 0,
      "gradient scaler: scale {} must be positive, growth {} more than 1, backoff {} between 0 and 1, growth interval {} "
      "positive",
      options.scale, options.growth, options.backoff, options.growth_interval);
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const { return loss.mul(scale_); }

State GradScaler::save() const { return {{"scale", scale_}, {"good", good_}, {"skipped", skipped_}}; }

void GradScaler::load(const State& state) {
  const auto scale = state_value<double>(state, "scale");
  require(scale > 0, "gradient scaler: scale {} must be positive", scale);
  good_ = state_value<std::int64_t>(state, "good");
  skipped_ = state_value<std::int64_t>(state, "skipped");
  scale_ = scale;
}

void GradScaler::update(bool finite) {
  if (!finite) {
    ++skipped_;
    good_ = 0;
    scale_ *= options_.backoff;
  } else if (++good_ == options_.growth_interval) {
    good_ = 0;
    scale_ *= options_.growth;
  }
}

}  // namespace bonfire
