// ns_multigpu::project_axes and its backward on CPU.

#include <ATen/Dispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "common/lens.h"
#include "cpu/common/cameras.h"
#include "cpu/common/rows.h"

namespace nsmg::project_axes_cpu {
namespace {

// The checked inputs that forward and backward share.
struct Inputs {
  at::Tensor means, axes, opacities, viewmats, Ks;
  std::vector<int64_t> starts;  // of each view's rows
  std::vector<int64_t> sizes;
  double near_plane, far_plane;

  int64_t views() const { return viewmats.size(0); }
  int64_t rows() const { return means.size(0); }

  template <typename C, typename T>
  C camera(int64_t view) const {
    return camera_of<C>(viewmats.const_data_ptr<T>(), Ks.const_data_ptr<T>(), view, T(sizes[2 * view]),
                        T(sizes[2 * view + 1]), T(near_plane), T(far_plane));
  }

  template <typename T>
  AxesPoint<T> point(int64_t row) const {
    const T *m = means.const_data_ptr<T>() + 3 * row, *a = axes.const_data_ptr<T>() + 9 * row;
    return {{m[0], m[1], m[2]},
            {{a[0], a[1], a[2]}, {a[3], a[4], a[5]}, {a[6], a[7], a[8]}},
            opacities.const_data_ptr<T>()[row]};
  }
};

Inputs check_inputs(const at::Tensor& means, const at::Tensor& axes, const at::Tensor& opacities,
                    const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes,
                    const at::Tensor& view_ids, double near_plane, double far_plane) {
  const auto dtype = means.scalar_type();
  const int64_t rows = means.size(0), views = viewmats.size(0);
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2 * views, "sizes must hold 2 numbers a view.");
  const at::Tensor own = at::arange(rows, view_ids.options().dtype(at::kInt));  // each row is a point of its own
  return {checked(means, "means", {-1, 3}, dtype),
          checked(axes, "axes", {rows, 3, 3}, dtype),
          checked(opacities, "opacities", {rows}, dtype),
          checked(viewmats, "viewmats", {-1, 4, 4}, dtype),
          checked(Ks, "Ks", {views, intrinsics_rows(Ks), 3}, dtype),
          view_starts(view_ids.contiguous(), own, views, rows),
          sizes.vec(),
          near_plane,
          far_plane};
}

using Projected = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Projected project_axes(const at::Tensor& means, const at::Tensor& axes, const at::Tensor& opacities,
                       const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes,
                       const at::Tensor& view_ids, double eps2d, double near_plane, double far_plane,
                       bool antialiased) {
  const Inputs in = check_inputs(means, axes, opacities, viewmats, Ks, sizes, view_ids, near_plane, far_plane);
  const auto options = means.options();
  at::Tensor means2d = at::zeros({in.rows(), 2}, options), conics = at::zeros({in.rows(), 3}, options);
  at::Tensor depths = at::zeros({in.rows()}, options), row_opacities = at::zeros({in.rows()}, options);
  at::Tensor radii = at::empty({in.rows(), 2}, options.dtype(at::kInt));
  AT_DISPATCH_FLOATING_TYPES(means.scalar_type(), "project_axes", [&] {
    using T = scalar_t;
    T *const to_means = means2d.mutable_data_ptr<T>(), *const to_conics = conics.mutable_data_ptr<T>();
    T *const to_depths = depths.mutable_data_ptr<T>(), *const to_opacities = row_opacities.mutable_data_ptr<T>();
    int32_t* const to_radii = radii.mutable_data_ptr<int32_t>();
    with_camera<T>(in.Ks, [&](auto kind) {
      for_chunks(chunks_of(in.starts, 0, in.views()), [&](int64_t, const Chunk& chunk) {
        const auto camera = in.camera<typename decltype(kind)::type, T>(chunk.view);
        for (int64_t i = chunk.begin; i < chunk.end; ++i) {
          const ProjectedRow<T> row = project_row(camera, in.point<T>(i), T(eps2d), antialiased);
          to_radii[2 * i] = static_cast<int32_t>(row.rx);
          to_radii[2 * i + 1] = static_cast<int32_t>(row.ry);
          if (!row.alive) continue;
          to_means[2 * i] = row.splat.x;
          to_means[2 * i + 1] = row.splat.y;
          to_conics[3 * i] = row.splat.conic_a;
          to_conics[3 * i + 1] = row.splat.conic_b;
          to_conics[3 * i + 2] = row.splat.conic_c;
          to_depths[i] = row.splat.depth;
          to_opacities[i] = row.splat.opacity;
        }
      });
    });
  });
  return {means2d, conics, depths, row_opacities, radii};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients project_axes_backward(const at::Tensor& means, const at::Tensor& axes, const at::Tensor& opacities,
                                const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes,
                                const at::Tensor& view_ids, double eps2d, double near_plane, double far_plane,
                                bool antialiased, const at::Tensor& radii_, const at::Tensor& v_means2d_,
                                const at::Tensor& v_conics_, const at::Tensor& v_depths_,
                                const at::Tensor& v_row_opacities_) {
  const Inputs in = check_inputs(means, axes, opacities, viewmats, Ks, sizes, view_ids, near_plane, far_plane);
  const auto dtype = means.scalar_type();
  const at::Tensor radii = checked(radii_, "radii", {in.rows(), 2}, at::kInt);
  const at::Tensor v_means2d = checked(v_means2d_, "v_means2d", {in.rows(), 2}, dtype);
  const at::Tensor v_conics = checked(v_conics_, "v_conics", {in.rows(), 3}, dtype);
  const at::Tensor v_depths = checked(v_depths_, "v_depths", {in.rows()}, dtype);
  const at::Tensor v_row_opacities = checked(v_row_opacities_, "v_row_opacities", {in.rows()}, dtype);
  const auto options = means.options();
  const at::Tensor g_means = at::zeros({in.rows(), 3}, options), g_axes = at::zeros({in.rows(), 3, 3}, options);
  const at::Tensor g_opacities = at::zeros({in.rows()}, options);
  const at::Tensor g_viewmats = at::zeros({in.views(), 4, 4}, options);
  AT_DISPATCH_FLOATING_TYPES(dtype, "project_axes_backward", [&] {
    using T = scalar_t;
    const int32_t* const radius = radii.const_data_ptr<int32_t>();
    const T *const at_mean = v_means2d.const_data_ptr<T>(), *const conic = v_conics.const_data_ptr<T>();
    const T *const depth = v_depths.const_data_ptr<T>(), *const opacity = v_row_opacities.const_data_ptr<T>();
    T *const to_means = g_means.mutable_data_ptr<T>(), *const to_axes = g_axes.mutable_data_ptr<T>();
    T *const to_opacities = g_opacities.mutable_data_ptr<T>(), *const poses = g_viewmats.mutable_data_ptr<T>();
    for (int64_t view = 0; view < in.views(); ++view) {
      const std::vector<Chunk> chunks = chunks_of(in.starts, view, view + 1);
      std::vector<double> sums(12 * chunks.size());  // of each chunk: the pose's, the rotation's nine first
      with_camera<T>(in.Ks, [&](auto kind) {
        for_chunks(chunks, [&](int64_t number, const Chunk& chunk) {
          const auto camera = in.camera<typename decltype(kind)::type, T>(view);
          double* const pose = sums.data() + 12 * number;
          for (int64_t i = chunk.begin; i < chunk.end; ++i) {
            if (radius[2 * i] <= 0) continue;
            const SplatGradient<T> splat = {at_mean[2 * i],   at_mean[2 * i + 1], conic[3 * i], conic[3 * i + 1],
                                            conic[3 * i + 2], depth[i],           opacity[i]};
            const AxesGradient<T> g = splat_vjp(camera, in.point<T>(i), T(eps2d), antialiased, splat);
            const T mean[3] = {g.mean.x, g.mean.y, g.mean.z};
            const T by_axes[9] = {g.axes.r0.x, g.axes.r0.y, g.axes.r0.z, g.axes.r1.x, g.axes.r1.y,
                                  g.axes.r1.z, g.axes.r2.x, g.axes.r2.y, g.axes.r2.z};
            std::copy_n(mean, 3, to_means + 3 * i);
            std::copy_n(by_axes, 9, to_axes + 9 * i);
            to_opacities[i] = g.opacity;
            const Mat3<T>& r = g.rotation;
            const T turn[12] = {r.r0.x, r.r0.y, r.r0.z, r.r1.x,          r.r1.y,          r.r1.z,
                                r.r2.x, r.r2.y, r.r2.z, g.translation.x, g.translation.y, g.translation.z};
            for (int c = 0; c < 12; ++c) pose[c] += static_cast<double>(turn[c]);
          }
        });
      });
      double total[12] = {};
      for (size_t i = 0; i < sums.size(); ++i) total[i % 12] += sums[i];
      for (int r = 0; r < 3; ++r) {
        for (int c = 0; c < 3; ++c) poses[16 * view + 4 * r + c] = static_cast<T>(total[3 * r + c]);
        poses[16 * view + 4 * r + 3] = static_cast<T>(total[9 + r]);
      }
    }
  });
  return {g_means, g_axes, g_opacities, g_viewmats};
}

}  // namespace
}  // namespace nsmg::project_axes_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("project_axes", &nsmg::project_axes_cpu::project_axes);
  m.impl("project_axes_backward", &nsmg::project_axes_cpu::project_axes_backward);
}
