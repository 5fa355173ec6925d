// What the kernels over rows share: the views' sizes as kernel arguments, and where the rows of a group of points lie.
//
// Rows are sorted by (view, point), so those of one view in a group of consecutive points are consecutive rows. A block
// that owns a group of points therefore meets each of its points at most once a view, sums its gradients without atomics
// in the order of the views, and writes dense gradients in one pass that needs no zeroing before.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/projection.h"

namespace nsmg {

// Sizes come from the host. As a kernel's arguments they need no copy, and a CUDA graph keeps them.
constexpr int kViewsPerLaunch = 64;

struct ViewSizes {
  int first, count;  // the views [first, first + count) are those of this launch
  float width[kViewsPerLaunch], height[kViewsPerLaunch];
};

struct Cameras {
  const float *viewmats, *Ks;  // [V, 4, 4], [V, 3, 3]
  float near_plane, far_plane;
};

// Writes starts[view * groups + group] for `groups` groups of `group_points` points: the first row of that view whose
// point lies in that group or a later one. starts[views * groups] is the number of rows without padding.
cudaError_t find_group_starts(const int* view_ids, const int* point_ids, int rows, int views, int group_points,
                              int groups, int* starts, cudaStream_t stream);

// out[j] = the sum of partials[j * count ... (j + 1) * count), for j < sums, in double precision and a fixed order.
// With `poses`, 12 sums a view (the rotation's nine by rows, then the translation) go to a [V, 4, 4] instead.
cudaError_t sum_partials(const float* partials, int sums, int count, bool poses, float* out, cudaStream_t stream);

inline int groups_of(int points, int group_points) { return (points + group_points - 1) / group_points; }

#ifdef __CUDACC__

__device__ __forceinline__ Camera<float> load_camera(const Cameras& cameras, const ViewSizes& sizes, int view) {
  const int i = view - sizes.first;
  return make_camera(cameras.viewmats + int64_t(16) * view, cameras.Ks + int64_t(9) * view, sizes.width[i],
                     sizes.height[i], cameras.near_plane, cameras.far_plane);
}

__device__ __forceinline__ Vec3<float> load3(const float* values, int64_t i) {
  return {values[3 * i], values[3 * i + 1], values[3 * i + 2]};
}

// The sum over the warp, in every lane; the same bits on every run.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

#endif

}  // namespace nsmg
