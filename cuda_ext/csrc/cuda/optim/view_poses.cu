// A few numbers a view: what counts is that each is one launch. A thread takes one number of one correction, and finds
// the views that have it; sums are taken in the order of views and ranks, so all ranks get the same bits.
#include <cuda_runtime.h>

#include "cuda/optim/pose.h"
#include "cuda/optim/view_poses.h"

namespace nsmg {
namespace {

constexpr int kThreads = 96;  // of 16 corrections

__global__ void __launch_bounds__(kThreads) correct_views_kernel(const PoseCorrections in, float* out) {
  const int b = blockIdx.x * kThreads + threadIdx.x;
  if (b >= in.views) return;
  const int which = int(in.indices[b]);
  const ViewPose<Dual<float>> pose = corrected_slopes(in.viewmats + 16 * b, in.corrections + 6 * which, in.se3, -1);
  const auto put = [&](int row, const Vec3<Dual<float>>& r, const Dual<float>& t) {
    float* to = out + 16 * b + 4 * row;
    to[0] = r.x.value, to[1] = r.y.value, to[2] = r.z.value, to[3] = t.value;
  };
  put(0, pose.rotation.r0, pose.translation.x);
  put(1, pose.rotation.r1, pose.translation.y);
  put(2, pose.rotation.r2, pose.translation.z);
  put(3, {}, 1.0f);
}

__device__ __forceinline__ float slope(const Vec3<Dual<float>>& r, const Dual<float>& t, const float* v) {
  return r.x.slope * v[0] + r.y.slope * v[1] + r.z.slope * v[2] + t.slope * v[3];
}

__global__ void __launch_bounds__(kThreads)
    correction_gradients_kernel(const PoseCorrections in, const PoseGradients g) {
  const int i = blockIdx.x * kThreads + threadIdx.x, n = i / 6, k = i % 6;
  if (n >= in.number) return;
  const float* part = in.corrections + 6 * n + (k < 3 ? 0 : 3);
  const float length = sqrtf(part[0] * part[0] + part[1] * part[1] + part[2] * part[2]);
  const float penalty = (k < 3 ? g.shift_penalty : g.turn_penalty) / float(in.number);
  float sum = length > 0.0f ? penalty * part[k % 3] / length : 0.0f;
  for (int b = 0; b < in.views; ++b) {
    if (int(in.indices[b]) != n) continue;
    const ViewPose<Dual<float>> pose = corrected_slopes(in.viewmats + 16 * b, in.corrections + 6 * n, in.se3, k);
    float total[12] = {};
    for (int r = 0; r < g.ranks; ++r) {
      const float* of_rank = g.v_viewmats + 16 * (r * in.views + b);
#pragma unroll
      for (int c = 0; c < 12; ++c) total[c] += of_rank[c];
    }
    sum += slope(pose.rotation.r0, pose.translation.x, total) + slope(pose.rotation.r1, pose.translation.y, total + 4) +
           slope(pose.rotation.r2, pose.translation.z, total + 8);
  }
  g.out[i] = sum;
}

}  // namespace

cudaError_t correct_views_launch(const PoseCorrections& in, float* out, cudaStream_t stream) {
  if (in.views == 0) return cudaSuccess;
  const int blocks = (in.views + kThreads - 1) / kThreads;
  correct_views_kernel<<<blocks, kThreads, 0, stream>>>(in, out);
  return cudaGetLastError();
}

cudaError_t correction_gradients_launch(const PoseCorrections& in, const PoseGradients& g, cudaStream_t stream) {
  if (in.number == 0) return cudaSuccess;
  const int blocks = (6 * in.number + kThreads - 1) / kThreads;
  correction_gradients_kernel<<<blocks, kThreads, 0, stream>>>(in, g);
  return cudaGetLastError();
}

}  // namespace nsmg
