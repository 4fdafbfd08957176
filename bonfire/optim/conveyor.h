#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "bonfire/base/api.h"

namespace bonfire {

// Work on the host over tensors of a device, one load after the other: while one is worked on, the next comes and the one
// before goes, each over a stream of its own and two pinned buffers. Where a load's tensors are where the work is done
// already (all on the host, or all on the device), nothing is copied and nobody waits.
class BONFIRE_API Conveyor {
 public:
  // 1-D tensors.
  struct Load {
    at::Tensor in;    // what the work reads
    at::Tensor out;   // what it writes, or undefined
    at::Tensor home;  // lies where the work is done. `out` is a copy of it where both are of one type; otherwise the work
                      // writes `out`
  };
  struct Piece {
    at::Tensor in, out;  // at home. `out` is undefined where the work has nothing to write
  };

  // Stream: everything that the current one was given so far comes before the first copy.
  void begin(std::vector<Load> loads);
  // The next load. Host: waits until it has come. The one before must have been sent.
  Piece next();
  // Its `home` and `out` are written.
  void send();
  // Stream: the current one waits for all that was sent.
  void flush();
  // The same, and forgets the loads: their memory may go.
  void end();

 private:
  // One direction.
  struct Lane {
    std::optional<c10::Stream> stream;
    struct Tray {
      at::Tensor bytes;
      std::unique_ptr<c10::Event> copied;  // last into or out of it
    };
    std::array<Tray, 2> trays;

    void open(at::Device device, std::int64_t tray_bytes);
    at::Tensor tray(std::size_t load, const at::Tensor& like) const;
    void copy(std::size_t load, const at::Tensor& to, const at::Tensor& from);
    void await(std::size_t load) const;
  };

  static bool moves(const Load& load, const at::Tensor& tensor);
  static bool is_copy(const Load& load);
  void fetch(std::size_t load);

  std::vector<Load> loads_;
  std::size_t next_ = 0;
  std::optional<std::size_t> sent_;  // the last one that went
  Lane in_, out_;
};

}  // namespace bonfire
