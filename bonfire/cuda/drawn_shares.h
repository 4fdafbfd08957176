#pragma once

#include <cuda_runtime_api.h>

// Work of a launch that its blocks draw while they run. A launch with one block for each multiprocessor, each with a share
// of its own, takes twice the time where others have one of the multiprocessors: that block's share begins when the rest is
// done. Where shares are drawn, what begins late finds little left to do. Who makes a result does not change it.
namespace bonfire::cuda {

// A number in the current GPU's memory that counts the draws of one launch on `stream`: zero when it begins and, once all
// blocks have drawn in vain, zero again. No two launches that may run at one time have the same: those on one stream run one
// after another, and one that is captured has a number for itself. Null where none is left: shares are fixed then.
unsigned* counter_of_draws(cudaStream_t stream);

// For tests and measurements: with false, shares are fixed.
void draw_shares(bool drawn);

}  // namespace bonfire::cuda
