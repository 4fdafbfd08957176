#pragma once

#include "bonfire/base/api.h"

namespace bonfire {

class Engine;

// Length of all gradients taken as one vector. The same number on every rank.
BONFIRE_API double gradient_norm(const Engine& engine);

// What gradients of this norm are multiplied with, so that they are no longer than `limit`; 1 where it is 0.
BONFIRE_API double clip_factor(double norm, double limit);

}  // namespace bonfire
