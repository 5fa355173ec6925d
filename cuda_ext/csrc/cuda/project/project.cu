// The forward projection: a thread a row.

#include "cuda/project/project.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;

template <bool Antialiased, typename C>
__global__ void __launch_bounds__(kThreads)
    project_kernel(const __grid_constant__ ProjectInputs in, const __grid_constant__ ViewSizes sizes,
                   const __grid_constant__ ProjectOutputs out) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= in.rows) return;
  const int view = in.view_ids[row];
  if (view < sizes.first || view >= sizes.first + sizes.count) return;  // another launch's
  const int id = in.point_ids[row];
  ProjectedRow<float> r = {};
  if (id >= 0) {
    const Point<float> point = load_point(in.means, in.quats, in.scales, in.opacities, id);
    r = project_row(load_camera<C>(in.cameras, sizes, view), point, in.eps2d, Antialiased);
    if (!r.alive) r.splat = {};
  }
  reinterpret_cast<float2*>(out.means2d)[row] = make_float2(r.splat.x, r.splat.y);
  out.conics[3 * row] = r.splat.conic_a;
  out.conics[3 * row + 1] = r.splat.conic_b;
  out.conics[3 * row + 2] = r.splat.conic_c;
  out.depths[row] = r.splat.depth;
  out.opacities[row] = r.splat.opacity;
  reinterpret_cast<int2*>(out.radii)[row] = make_int2(int(r.rx), int(r.ry));
}

}  // namespace

cudaError_t project(const ProjectInputs& in, const ProjectOutputs& out, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  const int blocks = int((int64_t(in.rows) + kThreads - 1) / kThreads);
  return with_camera(in.intrinsics_rows, [&](auto kind) {
    using C = typename decltype(kind)::type;
    const auto kernel = in.antialiased ? &project_kernel<true, C> : &project_kernel<false, C>;
    return for_view_sizes(in.sizes, in.views, [&](const ViewSizes& sizes) {
      kernel<<<blocks, kThreads, 0, stream>>>(in, sizes, out);
    });
  });
}

}  // namespace nsmg
