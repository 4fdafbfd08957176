#pragma once

#include <string>

#include "tests/random/pipeline_case.h"

namespace bonfire::cases {

// Trains through a pipeline on ranks that are threads, and compares with plain torch on one. Returns what is wrong, or
// nothing.
std::string run_pipeline_case(const PipelineCase& each);

}  // namespace bonfire::cases
