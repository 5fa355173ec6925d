// A thread a number on the way there. On the way back a warp a row for the weights, and for base and terms a block for a
// group of points, which meets each of its points at most once a view and sums in the order of the views.

#include "cuda/project/series.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kViews = 8;  // that the backward kernel looks at between two passes over its outputs

__global__ void __launch_bounds__(kThreads)
    series_kernel(const __grid_constant__ SeriesInputs in, float* __restrict__ sums) {
  const unsigned place = blockIdx.x * unsigned(kThreads) + threadIdx.x;
  const unsigned row = place / unsigned(in.width), k = place - row * unsigned(in.width);
  if (row >= unsigned(in.rows)) return;
  const int id = in.point_ids[row];
  float sum = 0.f;
  if (id >= 0) {
    const float* term = in.terms + int64_t(id) * in.count * in.width + k;
    const float* const weight = in.weights + int64_t(row) * in.count;
    sum = in.base[int64_t(id) * in.width + k];
    for (int c = 0; c < in.count; ++c, term += in.width) sum += weight[c] * *term;
  }
  sums[place] = sum;
}

__global__ void __launch_bounds__(kThreads)
    weights_kernel(const __grid_constant__ SeriesInputs in, const __grid_constant__ SeriesGradients g) {
  const int64_t row = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= in.rows) return;  // for the whole warp
  const int id = in.point_ids[row];
  for (int c = 0; c < in.count; ++c) {
    float sum = 0.f;
    if (id >= 0) {
      const float* const term = in.terms + (int64_t(id) * in.count + c) * in.width;
      for (int k = lane; k < in.width; k += 32) sum += term[k] * g.rows[row * in.width + k];
    }
    sum = warp_sum(sum);
    if (lane == 0) g.weights[row * in.count + c] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    points_kernel(const __grid_constant__ SeriesInputs in, const __grid_constant__ SeriesGradients g, int groups) {
  __shared__ int rows[kViews][kSeriesGroup];  // of these views, for each point of the group; -1 for none
  const int64_t base = int64_t(blockIdx.x) * kSeriesGroup;
  const int here = int(min(int64_t(kSeriesGroup), in.points - base)) * in.width;
  for (int first = 0; first == 0 || first < in.views; first += kViews) {
    const int views = min(kViews, in.views - first);
    __syncthreads();  // the views before have been read
    for (int i = threadIdx.x; i < kViews * kSeriesGroup; i += kThreads) rows[i / kSeriesGroup][i % kSeriesGroup] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < views * kSeriesGroup; i += kThreads) {
      const int v = i / kSeriesGroup;
      const int* const start = g.starts + int64_t(first + v) * groups + blockIdx.x;
      const int row = start[0] + i % kSeriesGroup;  // a group has at most one row a point
      if (row < start[1]) rows[v][in.point_ids[row] - base] = row;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < here; e += kThreads) {
      const int slot = e / in.width, k = e - slot * in.width;
      const int64_t point = base + slot;
      for (int c = -1; c < in.count; ++c) {
        float* const out = c < 0 ? g.base + point * in.width + k : g.terms + (point * in.count + c) * in.width + k;
        float sum = first == 0 ? 0.f : *out;
        for (int v = 0; v < views; ++v) {
          const int64_t row = rows[v][slot];
          if (row < 0) continue;
          sum += (c < 0 ? 1.f : in.weights[row * in.count + c]) * g.rows[row * in.width + k];
        }
        *out = sum;
      }
    }
  }
}

}  // namespace

cudaError_t series(const SeriesInputs& in, float* sums, cudaStream_t stream) {
  if (in.rows == 0 || in.width == 0) return cudaSuccess;
  series_kernel<<<groups_of(in.rows * in.width, kThreads), kThreads, 0, stream>>>(in, sums);
  return cudaGetLastError();
}

cudaError_t series_backward(const SeriesInputs& in, const SeriesGradients& g, cudaStream_t stream) {
  if (in.rows > 0 && in.count > 0) {
    weights_kernel<<<groups_of(in.rows, kThreads / 32), kThreads, 0, stream>>>(in, g);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  const int groups = groups_of(in.points, kSeriesGroup);
  if (groups == 0 || in.width == 0) return cudaSuccess;
  points_kernel<<<groups, kThreads, 0, stream>>>(in, g, groups);
  return cudaGetLastError();
}

}  // namespace nsmg
