#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

// The operator of that name, found once: BONFIRE_OPERATOR("bonfire::gelu", at::Tensor(const at::Tensor&)).call(x).
#define BONFIRE_OPERATOR(name, ...)                                                                           \
  ([]() -> const c10::TypedOperatorHandle<__VA_ARGS__>& {                                                     \
    static const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<__VA_ARGS__>(); \
    return handle;                                                                                            \
  }())
