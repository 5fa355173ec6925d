// Corrections of the poses of a step's views.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

struct PoseCorrections {
  const float *viewmats, *corrections, *indices;  // [B, 4, 4], [N, 6], and [B] which correction a view has
  int views, number;
  bool se3;
};

// out[b]: the corrected matrix [4, 4].
cudaError_t correct_views_launch(const PoseCorrections& in, float* out, cudaStream_t stream);

struct PoseGradients {
  const float* v_viewmats;  // [R, B, 4, 4] by the corrected matrices, to be summed over R
  int ranks;
  float shift_penalty, turn_penalty;  // weights of the mean lengths of shifts and of turns
  float* out;                         // [N, 6]
};

cudaError_t correction_gradients_launch(const PoseCorrections& in, const PoseGradients& g, cudaStream_t stream);

}  // namespace nsmg
