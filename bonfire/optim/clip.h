#pragma once

#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace bonfire {

class Shares;

// What a program can do with gradients between backward and the update. Each throws where there are none of a whole step.

// Length of all gradients of an Engine, or of all stages of a Pipeline, taken as one vector: the same number on every rank,
// whatever share of them each one holds. Collective where gradients are divided or on other stages: 8 bytes.
BONFIRE_API double gradient_norm(const Shares& shares);
// Shortens all gradients to `limit` where they are longer; returns how long they were. Collective as gradient_norm.
BONFIRE_API double clip_norm(Shares& shares, double limit);
// Limits each element of the gradients to [-limit, limit]. NaN stays.
BONFIRE_API void clip_values(Shares& shares, double limit);

// Calls `visit` with the path of every trained parameter and the elements of its gradient that are this rank's share, 1-D,
// to be read or changed in place.
BONFIRE_API void for_each_gradient(const Shares& shares,
                                   const std::function<void(const std::string& name, at::Tensor share)>& visit);

// --- Parts of the above, for optimizers.
// The sum of the squares of this rank's shares, one fp64 element on their device. Shares::sum makes it that of the model.
BONFIRE_API at::Tensor local_squares(const Shares& shares);
BONFIRE_API void clamp_gradients(Shares& shares, double limit);
// What gradients of this norm are multiplied with, so that they are no longer than `limit`; 1 where it is 0.
BONFIRE_API double clip_factor(double norm, double limit);
// The same number, to the bit, of a norm on a device, on that device.
BONFIRE_API at::Tensor clip_factor(const at::Tensor& norm, double limit);

}  // namespace bonfire
