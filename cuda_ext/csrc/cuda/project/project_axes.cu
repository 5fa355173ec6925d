// A thread a row on the way there; on the way back a block takes a group of rows, view by view, for the cameras' sums.

#include "cuda/project/project_axes.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ AxesPoint<float> load_axes(const AxesInputs& in, int64_t row) {
  const float* const a = in.axes + 9 * row;
  return {load3(in.means, row), {{a[0], a[1], a[2]}, {a[3], a[4], a[5]}, {a[6], a[7], a[8]}}, in.opacities[row]};
}

template <bool Antialiased, typename C>
__global__ void __launch_bounds__(kThreads)
    project_axes_kernel(const __grid_constant__ AxesInputs in, const __grid_constant__ ViewSizes sizes,
                        const __grid_constant__ ProjectOutputs out) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= in.rows) return;
  const int view = in.view_ids[row];
  if (view < sizes.first || view >= sizes.first + sizes.count) return;  // another launch's
  ProjectedRow<float> r = project_row(load_camera<C>(in.cameras, sizes, view), load_axes(in, row), in.eps2d, Antialiased);
  if (!r.alive) r.splat = {};
  reinterpret_cast<float2*>(out.means2d)[row] = make_float2(r.splat.x, r.splat.y);
  out.conics[3 * row] = r.splat.conic_a;
  out.conics[3 * row + 1] = r.splat.conic_b;
  out.conics[3 * row + 2] = r.splat.conic_c;
  out.depths[row] = r.splat.depth;
  out.opacities[row] = r.splat.opacity;
  reinterpret_cast<int2*>(out.radii)[row] = make_int2(int(r.rx), int(r.ry));
}

template <bool Antialiased, typename C>
__global__ void __launch_bounds__(kThreads)
    project_axes_backward_kernel(const __grid_constant__ AxesInputs in, const __grid_constant__ ViewSizes sizes,
                                 const __grid_constant__ AxesGradients g, int groups) {
  const auto add = [&](const C& camera, int64_t row, float (&pose)[kPose]) {
    AxesGradient<float> found = {};
    if (g.radii[2 * row] > 0) {
      const SplatGradient<float> splat = {g.means2d[2 * row],    g.means2d[2 * row + 1], g.conics[3 * row],
                                          g.conics[3 * row + 1], g.conics[3 * row + 2],  g.depths[row],
                                          g.row_opacities[row]};
      found = splat_vjp(camera, load_axes(in, row), in.eps2d, Antialiased, splat);
    }
    const Mat3<float>& a = found.axes;
    const float mean[3] = {found.mean.x, found.mean.y, found.mean.z};
    const float axes[9] = {a.r0.x, a.r0.y, a.r0.z, a.r1.x, a.r1.y, a.r1.z, a.r2.x, a.r2.y, a.r2.z};
#pragma unroll
    for (int c = 0; c < 3; ++c) g.means[3 * row + c] = mean[c];
#pragma unroll
    for (int c = 0; c < 9; ++c) g.axes[9 * row + c] = axes[c];
    g.opacities[row] = found.opacity;
    add_pose(pose, found.rotation, found.translation);
  };
  for_group_rows<kThreads, C>(in.cameras, sizes, g.starts, g.poses, groups, add);
}

}  // namespace

cudaError_t project_axes(const AxesInputs& in, const ProjectOutputs& out, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  return with_camera(in.intrinsics_rows, [&](auto kind) {
    using C = typename decltype(kind)::type;
    const auto kernel = in.antialiased ? &project_axes_kernel<true, C> : &project_axes_kernel<false, C>;
    return for_view_sizes(in.sizes, in.views, [&](const ViewSizes& sizes) {
      kernel<<<groups_of(in.rows, kThreads), kThreads, 0, stream>>>(in, sizes, out);
    });
  });
}

cudaError_t project_axes_backward(const AxesInputs& in, const AxesGradients& g, cudaStream_t stream) {
  const int groups = groups_of(in.rows, kAxesGroup);
  if (groups == 0 || in.views == 0) return cudaSuccess;
  const cudaError_t error = with_camera(in.intrinsics_rows, [&](auto kind) {
    using C = typename decltype(kind)::type;
    const auto kernel = in.antialiased ? &project_axes_backward_kernel<true, C> : &project_axes_backward_kernel<false, C>;
    return for_view_sizes(in.sizes, in.views, [&](const ViewSizes& sizes) {
      kernel<<<groups, kThreads, 0, stream>>>(in, sizes, g, groups);
    });
  });
  if (error != cudaSuccess) return error;
  return sum_partials(g.poses, kPose * in.views, groups, true, g.viewmats, stream);
}

}  // namespace nsmg
