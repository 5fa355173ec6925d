// The gradient of the projection: a block owns 512 consecutive points and goes through their rows, view by view. Sums
// are taken in the order of the views and of the rows, so the same inputs give the same bits.

#include "cuda/project/project.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;

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

template <bool Antialiased, typename C>
__global__ void __launch_bounds__(kThreads)
    project_backward_kernel(const __grid_constant__ ProjectInputs in, const __grid_constant__ ViewSizes sizes,
                            const __grid_constant__ ProjectGradients g, int groups) {
  __shared__ PointSums sums;
  const int64_t base = int64_t(blockIdx.x) * kProjectGroup;
  const int here = int(min(int64_t(kProjectGroup), in.points - base));

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

  const auto add = [&](const C& camera, int64_t row, float (&pose)[kPose]) {
    if (g.radii[2 * row] <= 0) return;
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
    sums.add(int(id - base), found);  // within a view no other thread has this point
    add_pose(pose, found.rotation, found.translation);
  };
  for_group_rows<kThreads, C>(in.cameras, sizes, g.starts, g.poses, groups, add);

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
  const cudaError_t error = with_camera(in.intrinsics_rows, [&](auto kind) {
    using C = typename decltype(kind)::type;
    const auto kernel = in.antialiased ? &project_backward_kernel<true, C> : &project_backward_kernel<false, C>;
    return for_view_sizes(in.sizes, in.views, [&](const ViewSizes& sizes) {
      kernel<<<groups, kThreads, 0, stream>>>(in, sizes, g, groups);
    });
  });
  if (error != cudaSuccess) return error;
  return sum_partials(g.poses, kPose * in.views, groups, true, g.viewmats, stream);
}

}  // namespace nsmg
