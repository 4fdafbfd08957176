#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

// What operators ask of the tensors that they are given, before anything reads their memory: kernels trust the shapes. Each
// fails with the operator, the argument, its shape and what is allowed.
namespace bonfire {

struct Argument {
  const char* op;
  const char* name;
  const at::Tensor& tensor;
};

constexpr std::int64_t any_size = -1;

// These sizes, on the device of `beside`.
void require_sizes(const Argument& argument, at::IntArrayRef sizes, const at::Tensor& beside);
// The sizes and the type of `beside`, on its device.
void require_alike(const Argument& argument, const at::Tensor& beside);
// At least one dimension.
void require_rows(const Argument& argument);
// Whole numbers, such as tokens and classes.
void require_integers(const Argument& argument);
void require_contiguous(const Argument& argument);
// An even number of columns, as many gates as ups; how many of each.
std::int64_t require_halves(const Argument& argument);

}  // namespace bonfire
