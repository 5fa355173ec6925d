// Projection of 3D convexes and their 2D hulls, and its gradient: a thread a row, by the maths of common/convex.h.
// Backward, a block owns a group of points (cuda/rows.h): no atomics, the same bits on every run.

#include "common/convex.h"
#include "cuda/raster/convexes.h"
#include "cuda/project/project.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kPose = 12;    // the camera's rotation by rows and its translation
constexpr int kLines = 3 * kCorners;
constexpr int kNumbers = 3 + kLines + 3;  // of a point: mean 0-2, corners 3-20, delta, sigma, opacity

__device__ __forceinline__ Convex<float> load_convex(const ConvexInputs& in, int64_t id) {
  Convex<float> point;
  point.mean = load3(in.means, id);
#pragma unroll
  for (int k = 0; k < kCorners; ++k) point.corners[k] = load3(in.corners, kCorners * id + k);
  point.delta = in.deltas[id];
  point.sigma = in.sigmas[id];
  point.opacity = in.opacities[id];
  return point;
}

__global__ void __launch_bounds__(kThreads)
    project_kernel(const __grid_constant__ ConvexInputs in, const __grid_constant__ ViewSizes sizes,
                   const __grid_constant__ ConvexOutputs out) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= in.rows) return;
  const int view = in.view_ids[row];
  if (view < sizes.first || view >= sizes.first + sizes.count) return;  // another launch's
  const int id = in.point_ids[row];
  ConvexRow<float> r = {};
  if (id >= 0) r = project_convex(load_camera(in.cameras, sizes, view), load_convex(in, id));
  reinterpret_cast<int2*>(out.radii)[row] = make_int2(int(r.rx), int(r.ry));
  reinterpret_cast<float2*>(out.means2d)[row] = make_float2(r.x, r.y);
  float* line = out.lines + kLines * row;
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    line[3 * k] = r.lines[k].x;
    line[3 * k + 1] = r.lines[k].y;
    line[3 * k + 2] = r.lines[k].z;
  }
  out.sharpness[row] = r.sharpness;
  out.depths[row] = r.depth;
  out.opacities[row] = r.opacity;
}

// A block's sums, one array a component.
struct PointSums {
  float value[kNumbers][kConvexGroup];

  __device__ void add(int at, const ConvexGradient<float>& g) {
    value[0][at] += g.mean.x;
    value[1][at] += g.mean.y;
    value[2][at] += g.mean.z;
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
      value[3 + 3 * k][at] += g.corners[k].x;
      value[4 + 3 * k][at] += g.corners[k].y;
      value[5 + 3 * k][at] += g.corners[k].z;
    }
    value[3 + kLines][at] += g.delta;
    value[4 + kLines][at] += g.sigma;
    value[5 + kLines][at] += g.opacity;
  }
};

// Where component c of a point's gradient lies.
__device__ __forceinline__ float* place_of(const ConvexGradients& g, int64_t id, int c) {
  if (c < 3) return g.means + 3 * id + c;
  if (c < 3 + kLines) return g.corners + kLines * id + (c - 3);
  return (c == 3 + kLines ? g.deltas : c == 4 + kLines ? g.sigmas : g.opacities_out) + id;
}

__device__ __forceinline__ void add_pose(float* sums, const ConvexGradient<float>& g) {
  const Mat3<float>& r = g.rotation;
  const float terms[kPose] = {r.r0.x, r.r0.y, r.r0.z, r.r1.x,          r.r1.y,          r.r1.z,
                              r.r2.x, r.r2.y, r.r2.z, g.translation.x, g.translation.y, g.translation.z};
#pragma unroll
  for (int c = 0; c < kPose; ++c) sums[c] += terms[c];
}

__global__ void __launch_bounds__(kThreads)
    project_backward_kernel(const __grid_constant__ ConvexInputs in, const __grid_constant__ ViewSizes sizes,
                            const __grid_constant__ ConvexGradients g, int groups) {
  __shared__ PointSums sums;
  __shared__ float warp_pose[kWarps][kPose];
  const int64_t base = int64_t(blockIdx.x) * kConvexGroup;
  const int here = int(min(int64_t(kConvexGroup), in.points - base));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // What an earlier launch found for its views is already there.
  const bool fresh = sizes.first == 0;
  for (int i = threadIdx.x; i < here; i += kThreads) {
    for (int c = 0; c < kNumbers; ++c) sums.value[c][i] = fresh ? 0.f : *place_of(g, base + i, c);
  }
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
      ConvexRowGradient<float> given;
      given.x = g.means2d[2 * row];
      given.y = g.means2d[2 * row + 1];
#pragma unroll
      for (int k = 0; k < kCorners; ++k) given.lines[k] = load3(g.lines, kCorners * row + k);
      given.sharpness = g.sharpness[row];
      given.depth = g.depths[row];
      given.opacity = g.opacities[row];
      const ConvexGradient<float> found = convex_vjp(camera, load_convex(in, id), given);
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

  for (int i = threadIdx.x; i < here; i += kThreads) {
    for (int c = 0; c < kNumbers; ++c) *place_of(g, base + i, c) = sums.value[c][i];
  }
}

}  // namespace

cudaError_t project_convexes(const ConvexInputs& in, const ConvexOutputs& out, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  const int blocks = int((int64_t(in.rows) + kThreads - 1) / kThreads);
  return for_view_sizes(in.sizes, in.views, [&](const ViewSizes& sizes) {
    project_kernel<<<blocks, kThreads, 0, stream>>>(in, sizes, out);
  });
}

cudaError_t project_convexes_backward(const ConvexInputs& in, const ConvexGradients& g, cudaStream_t stream) {
  const int groups = groups_of(in.points, kConvexGroup);
  if (groups == 0 || in.views == 0) return cudaSuccess;
  const cudaError_t error = for_view_sizes(in.sizes, in.views, [&](const ViewSizes& sizes) {
    project_backward_kernel<<<groups, kThreads, 0, stream>>>(in, sizes, g, groups);
  });
  if (error != cudaSuccess) return error;
  return sum_partials(g.poses, kPose * in.views, groups, true, g.viewmats, stream);
}

}  // namespace nsmg
