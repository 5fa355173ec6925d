// The projection of 2D Gaussians, a thread a row; and its gradient, as that of 3D ones: a block owns consecutive points
// and goes through their rows, view by view, so that the same inputs give the same bits.

#include "common/surfel.h"
#include "cuda/project/project.h"
#include "cuda/raster/surfels.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kPose = 12;    // the camera's rotation by rows and its translation
constexpr int kNumbers = 10;  // of a point: mean 0-2, quaternion 3-6, scales 7-8, opacity 9

__device__ __forceinline__ Surfel<float> load_surfel(const SurfelInputs& in, int64_t id) {
  const float4 quat = reinterpret_cast<const float4*>(in.quats)[id];
  return {load3(in.means, id), {quat.x, quat.y, quat.z, quat.w}, in.scales[2 * id], in.scales[2 * id + 1],
          in.opacities[id]};
}

__device__ __forceinline__ void store3(float* to, const Vec3<float>& from) {
  to[0] = from.x;
  to[1] = from.y;
  to[2] = from.z;
}

__global__ void __launch_bounds__(kThreads)
    project_kernel(const __grid_constant__ SurfelInputs in, const __grid_constant__ ViewSizes sizes,
                   const __grid_constant__ SurfelOutputs out) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= in.rows) return;
  const int view = in.view_ids[row];
  if (view < sizes.first || view >= sizes.first + sizes.count) return;  // another launch's
  const int id = in.point_ids[row];
  SurfelRow<float> r = {};
  if (id >= 0) r = project_surfel(load_camera(in.cameras, sizes, view), load_surfel(in, id));
  reinterpret_cast<int2*>(out.radii)[row] = make_int2(int(r.rx), int(r.ry));
  if (!r.alive) r = {};
  reinterpret_cast<float2*>(out.means2d)[row] = make_float2(r.x, r.y);
  store3(out.transforms + 9 * row, r.u);
  store3(out.transforms + 9 * row + 3, r.v);
  store3(out.transforms + 9 * row + 6, r.w);
  store3(out.normals + 3 * row, r.normal);
  out.depths[row] = r.depth;
  out.opacities[row] = r.opacity;
}

// A block's sums, one array a component.
struct PointSums {
  float value[kNumbers][kSurfelGroup];

  __device__ void add(int at, const SurfelGradient<float>& g) {
    const float terms[kNumbers] = {g.mean.x, g.mean.y, g.mean.z,  g.quat.w,  g.quat.x,
                                   g.quat.y, g.quat.z, g.scale_u, g.scale_v, g.opacity};
#pragma unroll
    for (int c = 0; c < kNumbers; ++c) value[c][at] += terms[c];
  }
};

__device__ __forceinline__ void add_pose(float* sums, const SurfelGradient<float>& g) {
  const Mat3<float>& r = g.rotation;
  const float terms[kPose] = {r.r0.x, r.r0.y, r.r0.z, r.r1.x,          r.r1.y,          r.r1.z,
                              r.r2.x, r.r2.y, r.r2.z, g.translation.x, g.translation.y, g.translation.z};
#pragma unroll
  for (int c = 0; c < kPose; ++c) sums[c] += terms[c];
}

__global__ void __launch_bounds__(kThreads)
    project_backward_kernel(const __grid_constant__ SurfelInputs in, const __grid_constant__ ViewSizes sizes,
                            const __grid_constant__ SurfelGradients g, int groups) {
  __shared__ PointSums sums;
  __shared__ float warp_pose[kWarps][kPose];
  const int64_t base = int64_t(blockIdx.x) * kSurfelGroup;
  const int here = int(min(int64_t(kSurfelGroup), in.points - base));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // What an earlier launch found for its views is already there.
  const bool fresh = sizes.first == 0;
  for (int i = threadIdx.x; i < here; i += kThreads) {
    const int64_t id = base + i;
    for (int c = 0; c < 3; ++c) sums.value[c][i] = fresh ? 0.f : g.means[3 * id + c];
    for (int c = 0; c < 4; ++c) sums.value[3 + c][i] = fresh ? 0.f : g.quats[4 * id + c];
    for (int c = 0; c < 2; ++c) sums.value[7 + c][i] = fresh ? 0.f : g.scales[2 * id + c];
    sums.value[9][i] = fresh ? 0.f : g.opacities_out[id];
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
      const SurfelRowGradient<float> given = {g.means2d[2 * row],
                                              g.means2d[2 * row + 1],
                                              load3(g.transforms, 3 * row),
                                              load3(g.transforms, 3 * row + 1),
                                              load3(g.transforms, 3 * row + 2),
                                              load3(g.normals, row),
                                              g.depths[row],
                                              g.opacities[row]};
      const SurfelGradient<float> found = surfel_vjp(camera, load_surfel(in, id), given);
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
    const int64_t id = base + i;
    for (int c = 0; c < 3; ++c) g.means[3 * id + c] = sums.value[c][i];
    for (int c = 0; c < 4; ++c) g.quats[4 * id + c] = sums.value[3 + c][i];
    for (int c = 0; c < 2; ++c) g.scales[2 * id + c] = sums.value[7 + c][i];
    g.opacities_out[id] = sums.value[9][i];
  }
}

}  // namespace

cudaError_t project_surfels(const SurfelInputs& in, const SurfelOutputs& out, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  const int blocks = int((int64_t(in.rows) + kThreads - 1) / kThreads);
  return for_view_sizes(in.sizes, in.views, [&](const ViewSizes& sizes) {
    project_kernel<<<blocks, kThreads, 0, stream>>>(in, sizes, out);
  });
}

cudaError_t project_surfels_backward(const SurfelInputs& in, const SurfelGradients& g, cudaStream_t stream) {
  const int groups = groups_of(in.points, kSurfelGroup);
  if (groups == 0 || in.views == 0) return cudaSuccess;
  const cudaError_t error = for_view_sizes(in.sizes, in.views, [&](const ViewSizes& sizes) {
    project_backward_kernel<<<groups, kThreads, 0, stream>>>(in, sizes, g, groups);
  });
  if (error != cudaSuccess) return error;
  return sum_partials(g.poses, kPose * in.views, groups, true, g.viewmats, stream);
}

}  // namespace nsmg
