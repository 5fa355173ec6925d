// Colours of rows from spherical harmonics, and their gradient.
#pragma once

#include "common/sh.h"
#include "cuda/common/rows.h"

namespace nsmg {

struct ShInputs {
  const float *means, *centers, *dc, *rest;  // [N, 3], [V, 3], [N, 3], [N, R, 3]
  const int *view_ids, *point_ids;
  int points, views, rows, rest_bases, degree;
};

cudaError_t sh_colors(const ShInputs& in, float* colors, cudaStream_t stream);

constexpr int kShGroup = 128;  // points that a block of the backward kernel owns

struct ShGradients {
  const float *colors, *v_colors;     // the output and its gradient
  float *means, *centers, *dc, *rest;  // of the inputs, every element written
  const int* starts;                  // find_group_starts with kShGroup
  float* partial_centers;             // scratch: [V, 3, groups]
};

cudaError_t sh_colors_backward(const ShInputs& in, const ShGradients& g, cudaStream_t stream);

#ifdef __CUDACC__

// A warp's coefficients lie in shared memory, `kShStride` floats a point: a row in global memory is 3 (bases - 1)
// floats, which a thread of its own would read one by one from lines that no other thread reads.
template <int Degree>
struct ShRow {
  static constexpr int kFloats = 3 * (sh_bases(Degree) - 1);
  static constexpr int kStride = kFloats | 1;  // odd: the lanes' rows start in different banks
};

#endif

}  // namespace nsmg
