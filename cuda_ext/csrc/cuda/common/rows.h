// What the kernels over rows share: the views' sizes as kernel arguments, and where the rows of a group of points lie.
//
// Rows are sorted by (view, point), so those of one view in a group of consecutive points are consecutive rows. A block
// that owns a group of points therefore meets each of its points at most once a view, sums its gradients without atomics
// in the order of the views, and writes dense gradients in one pass that needs no zeroing before.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/lens.h"

namespace nsmg {

// Sizes come from the host. As a kernel's arguments they need no copy, and a CUDA graph keeps them.
constexpr int kViewsPerLaunch = 64;

struct ViewSizes {
  int first, count;  // the views [first, first + count) are those of this launch
  float width[kViewsPerLaunch], height[kViewsPerLaunch];
};

struct Cameras {
  const float *viewmats, *Ks;  // [V, 4, 4], [V, 3, 3] or with lenses [V, 7, 3]
  float near_plane, far_plane;
};

template <typename C>
struct CameraKind {
  using type = C;
};

// Returns f(CameraKind) of the type of cameras with so many rows of intrinsics: 3, or 7 with lenses.
template <typename F>
cudaError_t with_camera(int intrinsics_rows, const F& f) {
  return intrinsics_rows == kLensNumbers / 3 ? f(CameraKind<LensCamera<float>>()) : f(CameraKind<Camera<float>>());
}

// Writes starts[view * groups + group] for `groups` groups of `group_points` points: the first row of that view whose
// point lies in that group or a later one. starts[views * groups] is the number of rows without padding.
cudaError_t find_group_starts(const int* view_ids, const int* point_ids, int rows, int views, int group_points,
                              int groups, int* starts, cudaStream_t stream);

// out[j] = the sum of partials[j * count ... (j + 1) * count), for j < sums, in double precision and a fixed order.
// With `poses`, 12 sums a view (the rotation's nine by rows, then the translation) go to a [V, 4, 4] instead.
cudaError_t sum_partials(const float* partials, int sums, int count, bool poses, float* out, cudaStream_t stream);

inline int groups_of(int points, int group_points) { return (points + group_points - 1) / group_points; }

constexpr int kPose = 12;  // numbers of a camera's pose: its rotation by rows, and its translation

#ifdef __CUDACC__

template <typename C = Camera<float>>
__device__ __forceinline__ C load_camera(const Cameras& cameras, const ViewSizes& sizes, int view) {
  const int i = view - sizes.first;
  return camera_of<C>(cameras.viewmats, cameras.Ks, int64_t{view}, sizes.width[i], sizes.height[i], cameras.near_plane,
                      cameras.far_plane);
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

// Sums 16 numbers over the warp, halving what a lane holds with each exchange: 16 shuffles instead of 80. Returns, in
// lanes 2 k and 2 k + 1, the sum of number k; the same bits on every run.
template <int Half = 8>
__device__ __forceinline__ float warp_sums(float (&numbers)[16], int lane) {
  const bool upper = (lane & (2 * Half)) != 0;
#pragma unroll
  for (int i = 0; i < Half; ++i) {
    const float sent = upper ? numbers[i] : numbers[i + Half], kept = upper ? numbers[i + Half] : numbers[i];
    numbers[i] = kept + __shfl_xor_sync(~0u, sent, 2 * Half);
  }
  if constexpr (Half > 1) {
    return warp_sums<Half / 2>(numbers, lane);
  } else {
    return numbers[0] + __shfl_xor_sync(~0u, numbers[0], 1);
  }
}

// Adds a gradient by a pose.
__device__ __forceinline__ void add_pose(float* sums, const Mat3<float>& r, const Vec3<float>& translation) {
  const float terms[kPose] = {r.r0.x, r.r0.y, r.r0.z, r.r1.x,        r.r1.y,        r.r1.z,
                              r.r2.x, r.r2.y, r.r2.z, translation.x, translation.y, translation.z};
#pragma unroll
  for (int c = 0; c < kPose; ++c) sums[c] += terms[c];
}

// Calls add(camera, row, pose) for the rows of the block's group of points, view by view; `pose` [kPose] is the thread's
// own, to be added to. Between two views is a barrier. Leaves the block's sums in poses [V, kPose, groups].
template <int kThreads, typename C = Camera<float>, typename F>
__device__ __forceinline__ void for_group_rows(const Cameras& cameras, const ViewSizes& sizes, const int* starts,
                                               float* poses, int groups, const F& add) {
  __shared__ float warp_pose[kThreads / 32][kPose];
  for (int v = 0; v < sizes.count; ++v) {
    const int view = sizes.first + v;
    const int64_t part = int64_t(view) * groups + blockIdx.x;
    const int begin = starts[part], end = starts[part + 1];
    float* const pose_out = poses + int64_t(view) * kPose * groups + blockIdx.x;
    if (begin == end) {  // for the whole block
      if (threadIdx.x < kPose) pose_out[int64_t(threadIdx.x) * groups] = 0.0f;
      continue;
    }
    const C camera = load_camera<C>(cameras, sizes, view);
    float pose[kPose] = {};
    for (int64_t row = begin + threadIdx.x; row < end; row += kThreads) add(camera, row, pose);
#pragma unroll
    for (int c = 0; c < kPose; ++c) {
      const float sum = warp_sum(pose[c]);
      if (threadIdx.x % 32 == 0) warp_pose[threadIdx.x / 32][c] = sum;
    }
    __syncthreads();  // also: the next view's rows may add to the same points
    if (threadIdx.x < kPose) {
      float sum = 0.0f;
      for (int w = 0; w < kThreads / 32; ++w) sum += warp_pose[w][threadIdx.x];
      pose_out[int64_t(threadIdx.x) * groups] = sum;
    }
    __syncthreads();
  }
}

#endif

}  // namespace nsmg
