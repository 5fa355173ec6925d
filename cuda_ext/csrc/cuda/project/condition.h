// 4D Gaussians at their views' times, and the gradient: see common/conditioning.h.
#pragma once

#include "cuda/common/rows.h"

namespace nsmg {

struct ConditionInputs {
  // [N, 3], [N], [N, 4], [N, 4], [N, 4] (those of four aligned to 16 bytes), [N], [V]
  const float *means, *times, *left, *motions, *scales, *opacities, *view_times;
  const int *view_ids, *point_ids;
  int points, views, rows;
};

struct ConditionOutputs {
  float *means, *axes, *opacities;  // [M, 3], [M, 3, 3], [M]; zeros where a row's point is -1
};

cudaError_t condition(const ConditionInputs& in, const ConditionOutputs& out, cudaStream_t stream);

constexpr int kConditionGroup = 256;  // points that a block of the backward kernel owns

struct ConditionGradients {
  const float *row_means, *axes, *row_opacities;                   // of the outputs
  float *means, *times, *left, *motions, *scales, *opacities;        // of the inputs, every element written
  const int* starts;                                               // find_group_starts with kConditionGroup
};

cudaError_t condition_backward(const ConditionInputs& in, const ConditionGradients& g, cudaStream_t stream);

}  // namespace nsmg
