// Copies of what lies on a GPU, from which checkpoints are written.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "bonfire/checkpoint/rank_file.h"
#include "bonfire/comm/device.h"
#include "tests/support/gpu_ranks.h"

namespace bonfire::copies_test {
namespace {

// What a rank saves of a GPU is copied to pinned memory, of which the allocator leaves little unused.
TEST(GpuCopies, AreInPinnedMemory) {
  BONFIRE_SKIP_WITHOUT_GPU();
  const auto options = at::TensorOptions(c10::Device(c10::kCUDA, 0));
  std::vector<Slice> slices;
  std::vector<at::Tensor> values;
  for (const std::int64_t elements : {std::int64_t{30} << 20, std::int64_t{1001}, std::int64_t{9} << 20}) {
    values.push_back(at::randn({elements}, options));
    auto& slice = slices.emplace_back();
    slice.name = std::to_string(elements);
    slice.kind = "value";
    slice.shape = {elements};
    slice.box = whole_box(slice.shape);
    slice.length = elements;
    slice.get = getter(values.back());
  }
  const auto pieces = own_pieces(slices);
  CopyMemory memory{.pinned = true};
  const auto copies = copied(pieces, memory);
  ASSERT_EQ(copies.size(), values.size());
  for (std::size_t at = 0; at < copies.size(); ++at) {
    for (const auto& part : copies[at].values) EXPECT_TRUE(part.is_pinned());
    EXPECT_TRUE(at::cat(copies[at].values).equal(values[at].cpu()));
  }
  std::int64_t held = 0;
  for (const auto& block : memory.blocks) held += static_cast<std::int64_t>(block.nbytes());
  EXPECT_LT(held, bytes_of(pieces) + (std::int64_t{72} << 20));
}

}  // namespace
}  // namespace bonfire::copies_test
