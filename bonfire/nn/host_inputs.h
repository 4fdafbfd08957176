#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include "bonfire/base/api.h"

namespace bonfire {

class SideStream;

// Where recomputed forwards keep their inputs, if not on their device: in pinned host memory. They are copied while forward
// goes on, and back, each before it is needed, while backward is at the one behind it. What is on the host already stays
// where it is.
class BONFIRE_API HostInputs : public std::enable_shared_from_this<HostInputs> {
 public:
  struct Options {
    bool from_host = false;  // what is on the host is copied as well: for tests
  };
  HostInputs();
  explicit HostInputs(Options options);
  ~HostInputs();

  // One of them.
  class BONFIRE_API Kept {
   public:
    ~Kept();
    // Stream: the current one has it. Once.
    at::Tensor take();
    // Whether it was changed in place after it was kept.
    bool changed() const;

   private:
    friend class HostInputs;
    struct Copies;
    Kept(std::shared_ptr<HostInputs> owner, std::unique_ptr<Copies> copies);
    std::shared_ptr<HostInputs> owner_;
    std::unique_ptr<Copies> copies_;
  };
  // Null: it stays where it is.
  std::shared_ptr<Kept> keep(const at::Tensor& input);

  std::int64_t bytes_kept() const { return bytes_kept_; }    // on the host, now
  std::int64_t bytes_moved() const { return bytes_moved_; }  // in both directions, so far

 private:
  SideStream& beside(at::Device device);
  void bring_back(Kept::Copies& copies);

  Options options_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<SideStream>> streams_;  // by device
  std::vector<Kept*> order_;                          // of those that are there, as they were kept
  std::atomic<std::int64_t> bytes_kept_{0}, bytes_moved_{0};
};

}  // namespace bonfire
