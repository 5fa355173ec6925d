// Noise on the means of Gaussians: see common/noise.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

struct NoiseInputs {
  const float *quats, *log_scales, *logits;  // [N, 4] (aligned to 16 bytes), [N, 3], [N]
  const int64_t* rows;                       // [N] lines of the table, or null: from `first` on
  const float* taken;                        // a factor on the device, or null
  int64_t first;
  uint64_t start;
  double steepness, threshold;
  float scale;
  int points;
};

cudaError_t add_noise(const NoiseInputs& in, float* means, cudaStream_t stream);

}  // namespace nsmg
