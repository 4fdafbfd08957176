#pragma once

#include "bonfire/comm/captured_work.h"

namespace bonfire::cuda {

std::unique_ptr<CapturedWork> make_cuda_graph(c10::Device device);

}  // namespace bonfire::cuda
