// The views of a batch as the fused kernels take them: image sizes by value, so that a launch needs no copy from the
// host, and cameras set up once a block in shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/rows.h"

namespace nsmg {

// The parameters, in the order of adam_step's lines of scalars.
enum UpdateTensor { kMeans, kQuats, kLogScales, kLogits, kShDc, kShRest, kUpdateTensors };

// Bounded by a kernel's 4 KB of parameters and by shared memory.
constexpr int kMaxViews = 128, kMaxLensViews = 96;

struct Views {
  const float *viewmats, *Ks;  // [count, 4, 4] and [count, intrinsics_rows, 3]
  int intrinsics_rows;         // 3, or 7 with lenses
  int count;
  float near_plane, far_plane;
  int32_t size[2 * kMaxViews];  // width and height of each
};

// C: Camera<float> or LensCamera<float>.
template <typename C>
struct ViewSetup {
  C camera;
  Vec3<float> center;
};

// Bytes of shared memory for a number of views, in whole 16 bytes.
template <typename C>
__host__ __device__ inline size_t view_bytes(int views) {
  return (views * sizeof(ViewSetup<C>) + 15) / 16 * 16;
}

#ifdef __CUDACC__

template <typename C>
__device__ __forceinline__ ViewSetup<C> view_setup(const Views& views, int i) {
  const C camera =
      camera_of<C>(views.viewmats, views.Ks, int64_t{i}, static_cast<float>(views.size[2 * i]),
                   static_cast<float>(views.size[2 * i + 1]), views.near_plane, views.far_plane);
  return {camera, -1.0f * (camera.translation * camera.rotation)};
}

// All threads of the block call it; it ends with a barrier.
template <typename C>
__device__ __forceinline__ void load_views(ViewSetup<C>* shared, const Views& views) {
  for (int i = threadIdx.x; i < views.count; i += blockDim.x) shared[i] = view_setup<C>(views, i);
  __syncthreads();
}

__device__ __forceinline__ Quat<float> load_quat(const float* p, int64_t i) {
  const float4 q = reinterpret_cast<const float4*>(p)[i];
  return {q.x, q.y, q.z, q.w};
}

#endif  // __CUDACC__

}  // namespace nsmg
