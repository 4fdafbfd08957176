#pragma once

#include <cstdint>
#include <deque>

#include "bonfire/shard/buffer_pool.h"

namespace bonfire {

class Reducer;

// Buffers of a rank for what comes and goes. An engine has its own, unless a schedule runs the modules of several in turn:
// these share them, so that no stage holds memory that stands idle while another one runs.
struct EngineMemory {
  explicit EngineMemory(at::Device device) : parameters(device), gradients(device) {}

  BufferPool parameters;  // gathered
  BufferPool gradients;   // whole, written or on their way
  // Of each whole gradient on its way, who reduces it, in the order in which they set out.
  std::deque<Reducer*> flights{};
  std::int64_t engines = 0;  // that have been made over it
};

}  // namespace bonfire
