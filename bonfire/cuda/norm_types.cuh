#pragma once

#include <type_traits>

#include "bonfire/cuda/device.cuh"
#include "bonfire/cuda/norm.h"

// What the two directions of norms share: the types that their kernels are made for.
namespace bonfire::cuda {
namespace {

constexpr int most_threads = 512;  // of a block: leaves 128 registers for each

// The types of elements and weights that occur together.
template <class Body>
void with_types(const NormShape& shape, const Body& body) {
  with_type(shape.type, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2) {
      if (shape.weight_type == Element::f32) return body(t, float{});
    }
    body(t, t);
  });
}

template <class Body>
void with_centered(bool centered, const Body& body) {
  centered ? body(std::true_type{}) : body(std::false_type{});
}

template <int value>
using Number = std::integral_constant<int, value>;

}  // namespace
}  // namespace bonfire::cuda
