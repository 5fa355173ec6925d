// The EWA projection of rows that each have a Gaussian of their own, and its gradient.
#pragma once

#include "cuda/project/project.h"

namespace nsmg {

struct AxesInputs {
  const float *means, *axes, *opacities;  // [M, 3], [M, 3, 3], [M]
  Cameras cameras;
  int intrinsics_rows;   // of a view: 3, or 7 with lenses
  const int64_t* sizes;  // on the host: 2 a view
  const int* view_ids;
  int views, rows;
  float eps2d;
  bool antialiased;
};

cudaError_t project_axes(const AxesInputs& in, const ProjectOutputs& out, cudaStream_t stream);

constexpr int kAxesGroup = 512;  // rows of a block of the backward kernel

struct AxesGradients {
  const float *means2d, *conics, *depths, *row_opacities;  // of the outputs
  const int* radii;                                        // rows where they are not positive are dead
  float *means, *axes, *opacities;                         // of the inputs, every element written
  float* viewmats;                                         // [V, 4, 4], zeroed by the caller
  const int* starts;                                       // find_group_starts with kAxesGroup: a row is its own point
  float* poses;                                            // scratch: [V, 12, groups]
};

cudaError_t project_axes_backward(const AxesInputs& in, const AxesGradients& g, cudaStream_t stream);

}  // namespace nsmg
