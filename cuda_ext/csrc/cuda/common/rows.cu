// The rows of each group of points, and the second stage of sums over all blocks.

#include "cuda/common/rows.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;

// As unsigned numbers padding's ids (-1) come last, so rows with padding are sorted too.
__device__ __forceinline__ uint64_t order(int view, int point) {
  return (uint64_t(uint32_t(view)) << 32) | uint32_t(point);
}

__global__ void __launch_bounds__(kThreads)
    group_starts_kernel(const int* __restrict__ view_ids, const int* __restrict__ point_ids, int rows, int views,
                        int group_points, int groups, int* __restrict__ starts) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t count = int64_t(views) * groups;
  if (i > count) return;
  const int view = i == count ? views - 1 : int(i / groups);
  const int point = i == count ? -1 : int(i % groups) * group_points;
  const uint64_t sought = order(view, point);
  int begin = 0, end = rows;
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (order(view_ids[middle], point_ids[middle]) < sought) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  starts[i] = begin;
}

__global__ void __launch_bounds__(kThreads)
    sum_partials_kernel(const float* __restrict__ partials, int count, bool poses, float* __restrict__ out) {
  __shared__ double sums[kThreads];
  const float* mine = partials + int64_t(blockIdx.x) * count;
  double sum = 0.0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += mine[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  int64_t at = blockIdx.x;
  if (poses) {
    const int view = blockIdx.x / 12, c = blockIdx.x % 12;
    at = int64_t(16) * view + (c < 9 ? 4 * (c / 3) + c % 3 : 4 * (c - 9) + 3);
  }
  out[at] = float(sums[0]);
}

}  // namespace

cudaError_t find_group_starts(const int* view_ids, const int* point_ids, int rows, int views, int group_points,
                              int groups, int* starts, cudaStream_t stream) {
  const int64_t count = int64_t(views) * groups + 1;
  const int blocks = int((count + kThreads - 1) / kThreads);
  group_starts_kernel<<<blocks, kThreads, 0, stream>>>(view_ids, point_ids, rows, views, group_points, groups, starts);
  return cudaGetLastError();
}

cudaError_t sum_partials(const float* partials, int sums, int count, bool poses, float* out, cudaStream_t stream) {
  if (sums == 0) return cudaSuccess;
  sum_partials_kernel<<<sums, kThreads, 0, stream>>>(partials, count, poses, out);
  return cudaGetLastError();
}

}  // namespace nsmg
