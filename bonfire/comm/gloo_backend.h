#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "bonfire/comm/backend.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace bonfire {

struct CommunicatorOptions {
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{};
  std::string address;  // Gloo: the local address its connections are bound to
};

// Collective: connects `size` ranks that meet in `store`.
std::shared_ptr<Backend> make_gloo_backend(c10::intrusive_ptr<c10d::Store> store, const CommunicatorOptions& options);
// Over a Gloo process group that exists already.
std::shared_ptr<Backend> adopt_gloo_backend(c10::intrusive_ptr<c10d::Backend> process_group);

}  // namespace bonfire
