#include "bonfire/comm/hear.h"

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "bonfire/base/error.h"

namespace bonfire {

std::string hear(const Group& group, const std::string& said, int root, c10::Device device) {
  auto length = at::tensor({static_cast<std::int64_t>(said.size())}, at::kLong).to(device);
  group.broadcast(length, root).wait();
  auto text = at::zeros({length.item<std::int64_t>()}, at::kByte);
  if (group.rank() == root) std::copy(said.begin(), said.end(), text.data_ptr<std::uint8_t>());
  if (text.numel() == 0) return {};
  text = text.to(device);
  group.broadcast(text, root).wait();
  const auto here = text.cpu();
  return {here.data_ptr<std::uint8_t>(), here.data_ptr<std::uint8_t>() + here.numel()};
}

void do_or_fail_together(const Group& group, const std::function<void()>& what) {
  constexpr char of_options = 'o', other = 'x';
  std::string said;
  try {
    what();
  } catch (const ConfigError& error) {
    said = of_options + std::string(error.what());
  } catch (const std::exception& error) {
    said = other + std::string(error.what());
  }
  const int ranks = group.size(), me = group.rank();
  const int before_end = static_cast<int>(group.max(said.empty() ? 0 : ranks - me));
  if (before_end == 0) return;
  said = hear(group, said, ranks - before_end, group.device());
  const auto words = said.substr(1);
  if (said.front() == of_options) fail_config("{}", words);
  fail("{}", words);
}

}  // namespace bonfire
