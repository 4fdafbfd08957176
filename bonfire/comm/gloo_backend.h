#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

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
  std::string address;            // Gloo: the local address its connections are bound to
  std::vector<int> members = {};  // by their number in the World, for messages
  std::string secret = {};        // what only this job's processes know; empty: they know no more than the store tells
};

// Collective: connects `size` ranks that meet in `store`, each with each, and has every pair prove to each other that both
// are of this job. Throws Error that names the rank whose place somebody else has taken.
std::shared_ptr<Backend> make_gloo_backend(c10::intrusive_ptr<c10d::Store> store, const CommunicatorOptions& options);
// Over a Gloo process group that exists already.
std::shared_ptr<Backend> adopt_gloo_backend(c10::intrusive_ptr<c10d::Backend> process_group);

}  // namespace bonfire
