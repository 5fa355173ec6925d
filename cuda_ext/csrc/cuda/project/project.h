// The EWA projection of rows and its gradient.
#pragma once

#include "cuda/common/rows.h"

namespace nsmg {

struct ProjectInputs {
  const float *means, *quats, *scales, *opacities;  // [N, 3], [N, 4] aligned to 16 bytes, [N, 3], [N]
  Cameras cameras;
  int intrinsics_rows;   // of a view: 3, or 7 with lenses
  const int64_t* sizes;  // on the host: 2 a view
  const int *view_ids, *point_ids;
  int points, views, rows;
  float eps2d;
  bool antialiased;
};

struct ProjectOutputs {
  float *means2d, *conics, *depths, *opacities;  // [M, 2], [M, 3], [M], [M]
  int* radii;                                    // [M, 2]
};

cudaError_t project(const ProjectInputs& in, const ProjectOutputs& out, cudaStream_t stream);

constexpr int kProjectGroup = 512;  // points that a block of the backward kernel owns

struct ProjectGradients {
  const float *means2d, *conics, *depths, *opacities;  // of the outputs
  const int* radii;                                    // rows where they are not positive are dead
  float *means, *quats, *scales, *opacities_out;       // of the inputs, every element written
  float* viewmats;                                     // [V, 4, 4], zeroed by the caller
  const int* starts;                                   // find_group_starts with kProjectGroup
  float* poses;                                        // scratch: [V, 12, groups]
};

cudaError_t project_backward(const ProjectInputs& in, const ProjectGradients& g, cudaStream_t stream);

// The launches that cover all views, each with the sizes of its own: calls launch(sizes) until one fails.
template <typename Launch>
cudaError_t for_view_sizes(const int64_t* sizes, int views, const Launch& launch) {
  for (int first = 0; first < views; first += kViewsPerLaunch) {
    ViewSizes part = {};
    part.first = first;
    part.count = views - first < kViewsPerLaunch ? views - first : kViewsPerLaunch;
    for (int v = 0; v < part.count; ++v) {
      part.width[v] = float(sizes[2 * (first + v)]);
      part.height[v] = float(sizes[2 * (first + v) + 1]);
    }
    launch(part);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

#ifdef __CUDACC__

__device__ __forceinline__ Point<float> load_point(const float* means, const float* quats, const float* scales,
                                                   const float* opacities, int64_t id) {
  const float4 quat = reinterpret_cast<const float4*>(quats)[id];
  return {load3(means, id), {quat.x, quat.y, quat.z, quat.w}, load3(scales, id), opacities[id]};
}

#endif

}  // namespace nsmg
