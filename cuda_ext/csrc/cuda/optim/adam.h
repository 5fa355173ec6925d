// Adam over many tensors in one launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

// One tensor of `count` floats; `scalars` is its line of eight (see common/adam.h).
struct AdamTensor {
  float *value, *gradient, *moment1, *moment2;
  const float* scalars;
  int64_t count;
};

// Tensors of one launch: what fits into a kernel's 4 KB of parameters.
constexpr int kAdamTensors = 64;

// Takes a step of Adam on each of `tensors` (at most kAdamTensors) and, if asked to, clears the gradients.
cudaError_t adam_step_launch(const AdamTensor* tensors, int number, bool clear, cudaStream_t stream);

}  // namespace nsmg
