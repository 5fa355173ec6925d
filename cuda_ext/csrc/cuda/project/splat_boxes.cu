// The boxes of groups of points: 24 bytes a point to make them, one to look at them. A thread of the second kernel has
// a box, and goes over the views.

#include "cuda/project/splat_boxes_device.h"
#include "cuda/optim/splat_lazy_device.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    boxes_kernel(const float* means, const float* log_scales, int points, float* boxes) {
  const int lane = threadIdx.x & 31;
  const int64_t id = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t group = id / kBoxPoints;
  if (group >= box_groups(points)) return;
  const float mine = box_number(id < points, means, log_scales, id, lane);
  if (lane < kBoxFloats) boxes[kBoxFloats * group + lane] = mine;
}

// The largest bound in the table on the motion of a tensor's parameters, for any last step. Each warp finds it.
__device__ __forceinline__ float largest_bound(const float* table, int tensor) {
  int most = 0;  // floats that are not negative are ordered as integers are; a NaN is above all
  for (int last = threadIdx.x & 31; last <= kLazySteps; last += 32) {
    most = larger(most, __float_as_int(load_lazy_bound(table, last, tensor)) & 0x7fffffff);
  }
  return __int_as_float(__reduce_max_sync(0xffffffffu, most));
}

template <bool Lazy, typename Moment, typename C>
__global__ void __launch_bounds__(kThreads)
    shows_kernel(const float* boxes, int groups, const __grid_constant__ Views views, float eps2d, const float* table,
                 uint8_t* shows) {
  extern __shared__ float4 storage[];
  auto* setups = reinterpret_cast<ViewSetup<C>*>(storage);
  load_views(setups, views);
  Motion<float> motion = {0.0f, 0.0f};
  if constexpr (Lazy) {
    // As the point's test computes them.
    motion.moved = 1.7321f * (wander<Moment>() * largest_bound(table, kMeans));
    motion.grown = wander<Moment>() * largest_bound(table, kLogScales);
  }
  const int group = blockIdx.x * kThreads + threadIdx.x;
  if (group >= groups) return;
  const float4* at = reinterpret_cast<const float4*>(boxes) + 2 * int64_t{group};
  const float4 a = at[0], b = at[1];
  const Box<float> box = {{a.x, a.y, a.z}, {a.w, b.x, b.y}, b.z};
  for (int v = 0; v < views.count; ++v) {
    shows[int64_t{v} * groups + group] = may_show<Lazy>(setups[v].camera, box, motion, eps2d);
  }
}

}  // namespace

cudaError_t splat_boxes_launch(const float* means, const float* log_scales, int points, float* boxes,
                               cudaStream_t stream) {
  if (points == 0) return cudaSuccess;
  const int64_t threads = int64_t{box_groups(points)} * kBoxPoints;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  boxes_kernel<<<blocks, kThreads, 0, stream>>>(means, log_scales, points, boxes);
  return cudaGetLastError();
}

cudaError_t box_views_launch(const float* boxes, int groups, const Views& views, float eps2d, const float* table,
                             bool compact, uint8_t* shows, cudaStream_t stream) {
  if (groups == 0 || views.count == 0) return cudaSuccess;
  const int blocks = (groups + kThreads - 1) / kThreads;
  return with_camera(views.intrinsics_rows, [&](auto kind) {
    using C = typename decltype(kind)::type;
    return with_moments(compact, [&](auto moment) {
      using Moment = decltype(moment);
      const auto kernel = table == nullptr ? shows_kernel<false, float, C> : shows_kernel<true, Moment, C>;
      kernel<<<blocks, kThreads, view_bytes<C>(views.count), stream>>>(boxes, groups, views, eps2d, table, shows);
      return cudaGetLastError();
    });
  });
}

}  // namespace nsmg
