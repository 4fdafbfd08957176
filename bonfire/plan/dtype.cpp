#include "bonfire/plan/dtype.h"

#include "bonfire/base/error.h"

namespace bonfire::plan {

std::int64_t bytes_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::fp64: return 8;
    case Dtype::fp32: return 4;
    case Dtype::bf16:
    case Dtype::fp16: return 2;
    case Dtype::fp8: return 1;
  }
  return 0;
}

const char* name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::fp64: return "fp64";
    case Dtype::fp32: return "fp32";
    case Dtype::bf16: return "bf16";
    case Dtype::fp16: return "fp16";
    case Dtype::fp8: return "fp8";
  }
  return "?";
}

Dtype dtype_of(std::string_view name) {
  for (const auto dtype : {Dtype::fp64, Dtype::fp32, Dtype::bf16, Dtype::fp16, Dtype::fp8})
    if (name == name_of(dtype)) return dtype;
  fail_config("dtype \"{}\" is not known; allowed: fp64 | fp32 | bf16 | fp16 | fp8", name);
}

}  // namespace bonfire::plan
