// Which points may be seen in which views' rectangles: a bit for each, a count for each 1024, their sum, and the rows in
// that order. Points are read once for all views. Ties in depth fall to the order of rows, so it must not vary: no
// atomics here.

#include <algorithm>
#include <cub/device/device_scan.cuh>

#include "cuda/project/cull.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kPointsPerThread = kCullPoints / kThreads;
constexpr int kWarps = kThreads / 32;

struct ViewRects {
  float x0[kViewsPerLaunch], y0[kViewsPerLaunch], x1[kViewsPerLaunch], y1[kViewsPerLaunch];
};

template <typename C>
__global__ void __launch_bounds__(kThreads)
    mark_kernel(const float* __restrict__ means, const float* __restrict__ scales, const float* __restrict__ opacities,
                int points, Cameras cameras, float eps2d, const __grid_constant__ ViewSizes sizes,
                const __grid_constant__ ViewRects rects, int groups, uint32_t* __restrict__ masks,
                int64_t* __restrict__ counts) {
  __shared__ int warp_counts[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Vec3<float> mean[kPointsPerThread];
  float largest[kPointsPerThread], cutoff2[kPointsPerThread];
#pragma unroll
  for (int k = 0; k < kPointsPerThread; ++k) {
    const int64_t i = int64_t(blockIdx.x) * kCullPoints + k * kThreads + threadIdx.x;
    mean[k] = {0.f, 0.f, 0.f};
    largest[k] = 0.f;
    cutoff2[k] = -1.f;  // what lies behind the last point
    if (i < points) {
      mean[k] = load3(means, i);
      const Vec3<float> scale = load3(scales, i);
      largest[k] = larger(larger(scale.x, scale.y), scale.z);
      cutoff2[k] = cutoff_squared(opacities[i]);
    }
  }
  for (int v = 0; v < sizes.count; ++v) {
    const C camera = load_camera<C>(cameras, sizes, sizes.first + v);
    const float x0 = rects.x0[v], y0 = rects.y0[v], x1 = rects.x1[v], y1 = rects.y1[v];
    const bool empty = x1 <= x0 || y1 <= y0;
    const int64_t part = int64_t(sizes.first + v) * groups + blockIdx.x;
    int count = 0;
#pragma unroll
    for (int k = 0; k < kPointsPerThread; ++k) {
      const bool keep = !empty && may_touch(camera, mean[k], largest[k], cutoff2[k], eps2d, x0, y0, x1, y1);
      const uint32_t mask = __ballot_sync(~0u, keep);
      if (lane == 0) masks[part * kCullWords + k * kWarps + warp] = mask;
      count += __popc(mask);
    }
    if (lane == 0) warp_counts[warp] = count;
    __syncthreads();
    if (threadIdx.x == 0) {
      int sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += warp_counts[w];
      counts[part] = sum;
    }
    __syncthreads();
  }
}

__global__ void end_kernel(int64_t* end) { *end = 0; }

// A warp writes the rows of one part: 32 words of 32 points.
__global__ void __launch_bounds__(kThreads)
    write_kernel(const uint32_t* __restrict__ masks, const int64_t* __restrict__ offsets, int64_t parts, int groups,
                 int* __restrict__ view_ids, int* __restrict__ point_ids) {
  const int lane = threadIdx.x % 32;
  const int64_t part = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (part >= parts) return;
  const int64_t begin = offsets[part];
  if (begin == offsets[part + 1]) return;
  const int view = int(part / groups), base = int(part % groups) * kCullPoints;
  const uint32_t mine = masks[part * kCullWords + lane];
  int64_t at = begin;
  for (int w = 0; w < kCullWords; ++w) {
    const uint32_t word = __shfl_sync(~0u, mine, w);
    if (word >> lane & 1) {
      const int64_t row = at + __popc(word & ((1u << lane) - 1));
      view_ids[row] = view;
      point_ids[row] = base + 32 * w + lane;
    }
    at += __popc(word);
  }
}

}  // namespace

cudaError_t cull_mark(const CullInputs& in, uint32_t* masks, int64_t* counts, cudaStream_t stream) {
  const int groups = groups_of(in.points, kCullPoints);
  for (int first = 0; first < in.views && groups > 0; first += kViewsPerLaunch) {
    ViewSizes sizes = {};
    ViewRects rects = {};
    sizes.first = first;
    sizes.count = std::min(kViewsPerLaunch, in.views - first);
    for (int v = 0; v < sizes.count; ++v) {
      const int64_t *size = in.sizes + 2 * (first + v), *rect = in.rects + 4 * (first + v);
      sizes.width[v] = float(size[0]);
      sizes.height[v] = float(size[1]);
      rects.x0[v] = float(rect[0]);
      rects.y0[v] = float(rect[1]);
      rects.x1[v] = float(rect[2]);
      rects.y1[v] = float(rect[3]);
    }
    const cudaError_t error = with_camera(in.intrinsics_rows, [&](auto kind) {
      const auto kernel = &mark_kernel<typename decltype(kind)::type>;
      kernel<<<groups, kThreads, 0, stream>>>(in.means, in.scales, in.opacities, in.points, in.cameras, in.eps2d,
                                              sizes, rects, groups, masks, counts);
      return cudaGetLastError();
    });
    if (error != cudaSuccess) return error;
  }
  end_kernel<<<1, 1, 0, stream>>>(counts + int64_t(in.views) * groups);
  return cudaGetLastError();
}

cudaError_t exclusive_sum(void* temp, size_t& bytes, const int64_t* in, int64_t* out, int count, cudaStream_t stream) {
  return cub::DeviceScan::ExclusiveSum(temp, bytes, in, out, count, stream);
}

cudaError_t cull_write(const uint32_t* masks, const int64_t* offsets, int points, int views, int* view_ids,
                       int* point_ids, cudaStream_t stream) {
  const int groups = groups_of(points, kCullPoints);
  const int64_t parts = int64_t(views) * groups;
  if (parts == 0) return cudaSuccess;
  const int blocks = int((parts + kWarps - 1) / kWarps);
  write_kernel<<<blocks, kThreads, 0, stream>>>(masks, offsets, parts, groups, view_ids, point_ids);
  return cudaGetLastError();
}

}  // namespace nsmg
