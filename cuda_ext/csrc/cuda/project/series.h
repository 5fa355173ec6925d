// Rows of a truncated series, each with weights of its own, and the gradient.
#pragma once

#include "cuda/common/rows.h"

namespace nsmg {

struct SeriesInputs {
  const float *base, *terms, *weights;  // [N, K], [N, C, K], [M, C]
  const int* point_ids;                 // [M], -1 for padding
  int points, views, rows, width, count;
};

// sums [M, K]: base and weighted terms of the row's point; zeros for padding.
cudaError_t series(const SeriesInputs& in, float* sums, cudaStream_t stream);

constexpr int kSeriesGroup = 32;  // points that a block of the backward kernel owns

struct SeriesGradients {
  const float* rows;               // [M, K], of the sums
  float *base, *terms, *weights;   // of the inputs, every element written
  const int* starts;               // find_group_starts with kSeriesGroup
};

cudaError_t series_backward(const SeriesInputs& in, const SeriesGradients& g, cudaStream_t stream);

}  // namespace nsmg
