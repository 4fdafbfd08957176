#include "bonfire/shard/freed_storage.h"

#include <utility>

namespace bonfire {
namespace {

// Torch can make a storage throw whenever somebody asks for its memory, but has no call that ends that: the flag is private.
// An explicit instantiation is the one place where the language lets a program name a private member.
template <bool c10::StorageImpl::*flag>
struct Reveal {
  friend bool& throws_when_read(c10::StorageImpl& storage) { return storage.*flag; }
};
bool& throws_when_read(c10::StorageImpl& storage);
template struct Reveal<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void set_freed_message(const c10::Storage& storage, std::string message) {
  storage.unsafeGetStorageImpl()->get_extra_meta().custom_data_ptr_error_msg_ = std::move(message);
}

// In both, setting the pointer comes last: it makes torch look at the flag again.
void free_memory(const c10::Storage& storage) {
  auto& impl = *storage.unsafeGetStorageImpl();
  throws_when_read(impl) = true;
  impl.set_data_ptr_noswap({nullptr, impl.device()});
}

void give_memory(const c10::Storage& storage, void* data) {
  auto& impl = *storage.unsafeGetStorageImpl();
  throws_when_read(impl) = false;
  impl.set_data_ptr_noswap({data, impl.device()});
}

bool has_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  return !throws_when_read(storage) && storage.data() != nullptr;
}

}  // namespace bonfire
