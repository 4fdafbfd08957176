#pragma once

#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "bonfire/base/api.h"

namespace bonfire {

// The memory of a storage that comes and goes while tensors hold it. While it is freed, whatever reads through one of them
// (an operator, torch::save, Module::to) throws a c10::Error with the storage's message, on every device.
void set_freed_message(const c10::Storage& storage, std::string message);
void free_memory(const c10::Storage& storage);
// `data` is of the storage's size and device, and stays its owner's.
void give_memory(const c10::Storage& storage, void* data);

// Whether the elements of `tensor` can be read.
BONFIRE_API bool has_memory(const at::Tensor& tensor);

}  // namespace bonfire
