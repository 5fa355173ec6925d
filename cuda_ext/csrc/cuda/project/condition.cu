// A thread a row on the way there. On the way back a block owns a group of points and sums its rows view by view:
// within a view no other thread has the same point.

#include "cuda/project/condition.h"

#include "common/conditioning.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;
constexpr int kNumbers = 17;  // of a point

__device__ __forceinline__ Quat<float> load4(const float* values, int64_t i) {
  const float4 q = reinterpret_cast<const float4*>(values)[i];
  return {q.x, q.y, q.z, q.w};
}

__device__ __forceinline__ MovingPoint<float> load_moving(const ConditionInputs& in, int64_t i) {
  return {load3(in.means, i),     in.times[i],           load4(in.left, i),
          load4(in.motions, i),     load4(in.scales, i),   in.opacities[i]};
}

__global__ void __launch_bounds__(kThreads)
    condition_kernel(const __grid_constant__ ConditionInputs in, const __grid_constant__ ConditionOutputs out) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= in.rows) return;
  const int id = in.point_ids[row];
  AxesPoint<float> p = {};
  if (id >= 0) p = moment_of(load_moving(in, id), in.view_times[in.view_ids[row]]);
  const float mean[3] = {p.mean.x, p.mean.y, p.mean.z};
  const float axes[9] = {p.axes.r0.x, p.axes.r0.y, p.axes.r0.z, p.axes.r1.x, p.axes.r1.y,
                         p.axes.r1.z, p.axes.r2.x, p.axes.r2.y, p.axes.r2.z};
#pragma unroll
  for (int c = 0; c < 3; ++c) out.means[3 * row + c] = mean[c];
#pragma unroll
  for (int c = 0; c < 9; ++c) out.axes[9 * row + c] = axes[c];
  out.opacities[row] = p.opacity;
}

__global__ void __launch_bounds__(kThreads)
    condition_backward_kernel(const __grid_constant__ ConditionInputs in, const __grid_constant__ ConditionGradients g,
                              int groups) {
  __shared__ float sums[kNumbers][kConditionGroup];
  const int64_t base = int64_t(blockIdx.x) * kConditionGroup;
  const int here = int(min(int64_t(kConditionGroup), in.points - base));
  for (int i = threadIdx.x; i < kNumbers * kConditionGroup; i += kThreads) (&sums[0][0])[i] = 0.f;
  __syncthreads();

  for (int view = 0; view < in.views; ++view) {
    const int64_t part = int64_t(view) * groups + blockIdx.x;
    const int begin = g.starts[part], end = g.starts[part + 1];
    if (begin == end) continue;  // for the whole block
    const float moment = in.view_times[view];
    for (int64_t row = begin + threadIdx.x; row < end; row += kThreads) {
      const int id = in.point_ids[row];
      const float* const a = g.axes + 9 * row;
      const AxesPoint<float> given = {load3(g.row_means, row),
                                      {{a[0], a[1], a[2]}, {a[3], a[4], a[5]}, {a[6], a[7], a[8]}},
                                      g.row_opacities[row]};
      const MovingPoint<float> p = moment_vjp(load_moving(in, id), moment, given);
      const float found[kNumbers] = {p.mean.x,  p.mean.y,  p.mean.z,  p.left.w,  p.left.x,  p.left.y,
                                     p.left.z,  p.motion.w, p.motion.x, p.motion.y, p.motion.z, p.scale.w,
                                     p.scale.x, p.scale.y, p.scale.z, p.time,    p.opacity};
#pragma unroll
      for (int c = 0; c < kNumbers; ++c) sums[c][id - base] += found[c];
    }
    __syncthreads();  // the next view's rows may add to the same points
  }

  for (int i = threadIdx.x; i < 3 * here; i += kThreads) g.means[3 * base + i] = sums[i % 3][i / 3];
  for (int i = threadIdx.x; i < here; i += kThreads) {
    reinterpret_cast<float4*>(g.left)[base + i] = make_float4(sums[3][i], sums[4][i], sums[5][i], sums[6][i]);
    reinterpret_cast<float4*>(g.motions)[base + i] = make_float4(sums[7][i], sums[8][i], sums[9][i], sums[10][i]);
    reinterpret_cast<float4*>(g.scales)[base + i] = make_float4(sums[11][i], sums[12][i], sums[13][i], sums[14][i]);
    g.times[base + i] = sums[15][i];
    g.opacities[base + i] = sums[16][i];
  }
}

}  // namespace

cudaError_t condition(const ConditionInputs& in, const ConditionOutputs& out, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  condition_kernel<<<groups_of(in.rows, kThreads), kThreads, 0, stream>>>(in, out);
  return cudaGetLastError();
}

cudaError_t condition_backward(const ConditionInputs& in, const ConditionGradients& g, cudaStream_t stream) {
  const int groups = groups_of(in.points, kConditionGroup);
  if (groups == 0) return cudaSuccess;
  condition_backward_kernel<<<groups, kThreads, 0, stream>>>(in, g, groups);
  return cudaGetLastError();
}

}  // namespace nsmg
