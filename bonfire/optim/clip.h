#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace bonfire {

class Engine;
class FlatParameter;

// Length of all gradients taken as one vector: the same number on every rank, whatever share of them each one holds.
// Collective where gradients are divided: 8 bytes.
BONFIRE_API double gradient_norm(const Engine& engine);
// Its two halves: the sum of the squares of this rank's shares, one fp64 element on their device, and the square root of
// the sum over all shares (collective).
// `counts`: of which flat parameters; all unless said.
BONFIRE_API at::Tensor local_squares(const Engine& engine,
                                     const std::function<bool(const FlatParameter& flat)>& counts = {});
BONFIRE_API double norm_over_shares(const Engine& engine, at::Tensor squares);
// The same sum without its root, in place and on the device. Collective.
BONFIRE_API void add_over_shares(const Engine& engine, at::Tensor& squares);

// What gradients of this norm are multiplied with, so that they are no longer than `limit`; 1 where it is 0.
BONFIRE_API double clip_factor(double norm, double limit);
// The same number, to the bit, of a norm on a device, on that device.
BONFIRE_API at::Tensor clip_factor(const at::Tensor& norm, double limit);

// Limits each element of the gradients to [-limit, limit]. NaN stays.
BONFIRE_API void clip_values(Engine& engine, double limit);

}  // namespace bonfire
