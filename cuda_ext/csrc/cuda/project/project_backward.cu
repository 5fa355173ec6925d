// The gradient of the projection: a block owns 512 consecutive points and goes through their rows, view by view. Sums
// are taken in the order of the views and of the rows, so the same inputs give the same bits.

#include "cuda/project/project.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kPose = 12;  // the camera's rotation by rows and its translation

// A block's sums, one array a component: mean 0-2, quaternion 3-6, scale 7-9, opacity 10.
struct PointSums {
  float value[11][kProjectGroup];

  __device__ void add(int at, const PointGradient<float>& g) {
    value[0][at] += g.mean.x;
    value[1][at] += g.mean.y;
    value[2][at] += g.mean.z;
    value[3][at] += g.quat.w;
    value[4][at] += g.quat.x;
    value[5][at] += g.quat.y;
    value[6][at] += g.quat.z;
    value[7][at] += g.scale.x;
    value[8][at] += g.scale.y;
    value[9][at] += g.scale.z;
    value[10][at] += g.opacity;
  }
};

__device__ __forceinline__ void add_pose(float* sums, const PointGradient<float>& g) {
  const Mat3<float>& r = g.rotation;
  const float terms[kPose] = {r.r0.x, r.r0.y, r.r0.z, r.r1.x,          r.r1.y,          r.r1.z,
                              r.r2.x, r.r2.y, r.r2.z, g.translation.x, g.translation.y, g.translation.z};
#pragma unroll
  for (int c = 0; c < kPose; ++c) sums[c] += terms[c];
}

template <bool Antialiased>
__global__ void __launch_bounds__(kThreads)
    project_backward_kernel(const __grid_constant__ ProjectInputs in, const __grid_constant__ ViewSizes sizes,
                            const __grid_constant__ ProjectGradients g, int groups) {
  __shared__ PointSums sums;
  __shared__ float warp_pose[kWarps][kPose];
  const int64_t base = int64_t(blockIdx.x) * kProjectGroup;
  const int here = int(min(int64_t(kProjectGroup), in.points - base));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // What an earlier launch found for its views is already there.
  const bool fresh = sizes.first == 0;
  for (int i = threadIdx.x; i < 3 * here; i += kThreads) {
    sums.value[i % 3][i / 3] = fresh ? 0.f : g.means[3 * base + i];
    sums.value[7 + i % 3][i / 3] = fresh ? 0.f : g.scales[3 * base + i];
  }
  for (int i = threadIdx.x; i < 4 * here; i += kThreads) {
    sums.value[3 + i % 4][i / 4] = fresh ? 0.f : g.quats[4 * base + i];
  }
  for (int i = threadIdx.x; i < here; i += kThreads) sums.value[10][i] = fresh ? 0.f : g.opacities_out[base + i];
  __syncthreads();

  for (int v = 0; v < sizes.count; ++v) {
    const int view = sizes.first + v;
    const int64_t part = int64_t(view) * groups + blockIdx.x;
    const int begin = g.starts[part], end = g.starts[part + 1];
    float* const pose_out = g.poses + int64_t(view) * kPose * groups + blockIdx.x;
    if (begin == end) {  // for the whole block
      if (threadIdx.x < kPose) pose_out[int64_t(threadIdx.x) * groups] = 0.f;
      continue;
    }
    const Camera<float> camera = load_camera(in.cameras, sizes, view);
    float pose[kPose] = {};
    for (int64_t row = begin + threadIdx.x; row < end; row += kThreads) {
      if (g.radii[2 * row] <= 0) continue;
      const int id = in.point_ids[row];
      const Point<float> point = load_point(in.means, in.quats, in.scales, in.opacities, id);
      const float2 at = reinterpret_cast<const float2*>(g.means2d)[row];
      const SplatGradient<float> splat = {at.x,
                                          at.y,
                                          g.conics[3 * row],
                                          g.conics[3 * row + 1],
                                          g.conics[3 * row + 2],
                                          g.depths[row],
                                          g.opacities[row]};
      const PointGradient<float> found = splat_vjp(camera, point, in.eps2d, Antialiased, splat);
      sums.add(int(id - base), found);  // within a view nobody else has this point
      add_pose(pose, found);
    }
#pragma unroll
    for (int c = 0; c < kPose; ++c) {
      const float sum = warp_sum(pose[c]);
      if (lane == 0) warp_pose[warp][c] = sum;
    }
    __syncthreads();  // also: the next view's rows may add to the same points
    if (threadIdx.x < kPose) {
      float sum = 0.f;
      for (int w = 0; w < kWarps; ++w) sum += warp_pose[w][threadIdx.x];
      pose_out[int64_t(threadIdx.x) * groups] = sum;
    }
    __syncthreads();
  }

  for (int i = threadIdx.x; i < 3 * here; i += kThreads) {
    g.means[3 * base + i] = sums.value[i % 3][i / 3];
    g.scales[3 * base + i] = sums.value[7 + i % 3][i / 3];
  }
  for (int i = threadIdx.x; i < here; i += kThreads) {
    reinterpret_cast<float4*>(g.quats)[base + i] =
        make_float4(sums.value[3][i], sums.value[4][i], sums.value[5][i], sums.value[6][i]);
    g.opacities_out[base + i] = sums.value[10][i];
  }
}

}  // namespace

cudaError_t project_backward(const ProjectInputs& in, const ProjectGradients& g, cudaStream_t stream) {
  const int groups = groups_of(in.points, kProjectGroup);
  if (groups == 0 || in.views == 0) return cudaSuccess;
  const auto kernel = in.antialiased ? &project_backward_kernel<true> : &project_backward_kernel<false>;
  const cudaError_t error = for_view_sizes(in.sizes, in.views, [&](const ViewSizes& sizes) {
    kernel<<<groups, kThreads, 0, stream>>>(in, sizes, g, groups);
  });
  if (error != cudaSuccess) return error;
  return sum_partials(g.poses, kPose * in.views, groups, true, g.viewmats, stream);
}

}  // namespace nsmg
