// ns_multigpu::project_convexes and its backward on CPU: a row at a time, by the maths of common/convex.h.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "common/convex.h"
#include "cpu/common/rows.h"

namespace nsmg {
namespace {

constexpr int kLines = 3 * kCorners;

// The checked inputs that forward and backward share.
struct Inputs {
  at::Tensor means, corners, deltas, sigmas, opacities, viewmats, Ks, point_ids;
  std::vector<int64_t> starts;  // of each view's rows
  std::vector<int64_t> sizes;
  double near_plane, far_plane;

  int64_t points() const { return means.size(0); }
  int64_t views() const { return viewmats.size(0); }
  int64_t rows() const { return point_ids.size(0); }

  template <typename T>
  Camera<T> camera(int64_t view) const {
    return make_camera<T>(viewmats.const_data_ptr<T>() + 16 * view, Ks.const_data_ptr<T>() + 9 * view,
                          T(sizes[2 * view]), T(sizes[2 * view + 1]), T(near_plane), T(far_plane));
  }

  template <typename T>
  Convex<T> point(int64_t row) const {
    const int64_t id = point_ids.const_data_ptr<int32_t>()[row];
    const T *mean = means.const_data_ptr<T>() + 3 * id, *corner = corners.const_data_ptr<T>() + kLines * id;
    Convex<T> found;
    found.mean = {mean[0], mean[1], mean[2]};
    for (int k = 0; k < kCorners; ++k) found.corners[k] = {corner[3 * k], corner[3 * k + 1], corner[3 * k + 2]};
    found.delta = deltas.const_data_ptr<T>()[id];
    found.sigma = sigmas.const_data_ptr<T>()[id];
    found.opacity = opacities.const_data_ptr<T>()[id];
    return found;
  }
};

Inputs check_inputs(const at::Tensor& means, const at::Tensor& corners, const at::Tensor& deltas,
                    const at::Tensor& sigmas, const at::Tensor& opacities, const at::Tensor& viewmats,
                    const at::Tensor& Ks, at::IntArrayRef sizes, const at::Tensor& view_ids,
                    const at::Tensor& point_ids, double near_plane, double far_plane) {
  const auto dtype = means.scalar_type();
  const int64_t points = means.size(0), views = viewmats.size(0);
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2 * views, "sizes must hold 2 numbers a view.");
  return {checked(means, "means", {-1, 3}, dtype),
          checked(corners, "corners", {points, kLines}, dtype),
          checked(deltas, "deltas", {points}, dtype),
          checked(sigmas, "sigmas", {points}, dtype),
          checked(opacities, "opacities", {points}, dtype),
          checked(viewmats, "viewmats", {-1, 4, 4}, dtype),
          checked(Ks, "Ks", {views, 3, 3}, dtype),
          point_ids.contiguous(),
          view_starts(view_ids.contiguous(), point_ids.contiguous(), views, points),
          sizes.vec(),
          near_plane,
          far_plane};
}

using Projected = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Projected project_convexes(const at::Tensor& means, const at::Tensor& corners, const at::Tensor& deltas,
                           const at::Tensor& sigmas, const at::Tensor& opacities, const at::Tensor& viewmats,
                           const at::Tensor& Ks, at::IntArrayRef sizes, const at::Tensor& view_ids,
                           const at::Tensor& point_ids, double near_plane, double far_plane) {
  const Inputs in = check_inputs(means, corners, deltas, sigmas, opacities, viewmats, Ks, sizes, view_ids, point_ids,
                                 near_plane, far_plane);
  const auto options = means.options();
  const int64_t rows = in.rows();
  at::Tensor means2d = at::empty({rows, 2}, options), lines = at::empty({rows, kLines}, options);
  at::Tensor sharpness = at::empty({rows}, options), depths = at::empty({rows}, options);
  at::Tensor row_opacities = at::empty({rows}, options), radii = at::empty({rows, 2}, options.dtype(at::kInt));
  for (const at::Tensor& out : {means2d, lines, sharpness, depths, row_opacities, radii}) zero_padding(out, in.starts);
  AT_DISPATCH_FLOATING_TYPES(means.scalar_type(), "project_convexes", [&] {
    using T = scalar_t;
    T *xy = means2d.mutable_data_ptr<T>(), *line = lines.mutable_data_ptr<T>(),
      *sharp = sharpness.mutable_data_ptr<T>(), *depth = depths.mutable_data_ptr<T>(),
      *opacity = row_opacities.mutable_data_ptr<T>();
    int32_t* radius = radii.mutable_data_ptr<int32_t>();
    for_chunks(chunks_of(in.starts, 0, in.views()), [&](int64_t, const Chunk& chunk) {
      const Camera<T> camera = in.camera<T>(chunk.view);
      for (int64_t i = chunk.begin; i < chunk.end; ++i) {
        const ConvexRow<T> row = project_convex(camera, in.point<T>(i));
        radius[2 * i] = static_cast<int32_t>(row.rx);
        radius[2 * i + 1] = static_cast<int32_t>(row.ry);
        xy[2 * i] = row.x;
        xy[2 * i + 1] = row.y;
        for (int k = 0; k < kCorners; ++k) {
          line[kLines * i + 3 * k] = row.lines[k].x;
          line[kLines * i + 3 * k + 1] = row.lines[k].y;
          line[kLines * i + 3 * k + 2] = row.lines[k].z;
        }
        sharp[i] = row.sharpness;
        depth[i] = row.depth;
        opacity[i] = row.opacity;
      }
    });
  });
  return {means2d, lines, sharpness, depths, row_opacities, radii};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients project_convexes_backward(const at::Tensor& means, const at::Tensor& corners, const at::Tensor& deltas,
                                    const at::Tensor& sigmas, const at::Tensor& opacities, const at::Tensor& viewmats,
                                    const at::Tensor& Ks, at::IntArrayRef sizes, const at::Tensor& view_ids,
                                    const at::Tensor& point_ids, double near_plane, double far_plane,
                                    const at::Tensor& radii_, const at::Tensor& v_means2d_, const at::Tensor& v_lines_,
                                    const at::Tensor& v_sharpness_, const at::Tensor& v_depths_,
                                    const at::Tensor& v_row_opacities_) {
  const Inputs in = check_inputs(means, corners, deltas, sigmas, opacities, viewmats, Ks, sizes, view_ids, point_ids,
                                 near_plane, far_plane);
  const auto dtype = means.scalar_type();
  const int64_t rows = in.rows();
  const at::Tensor radii = checked(radii_, "radii", {rows, 2}, at::kInt);
  const at::Tensor v_means2d = checked(v_means2d_, "v_means2d", {rows, 2}, dtype);
  const at::Tensor v_lines = checked(v_lines_, "v_lines", {rows, kLines}, dtype);
  const at::Tensor v_sharpness = checked(v_sharpness_, "v_sharpness", {rows}, dtype);
  const at::Tensor v_depths = checked(v_depths_, "v_depths", {rows}, dtype);
  const at::Tensor v_row_opacities = checked(v_row_opacities_, "v_row_opacities", {rows}, dtype);
  const auto options = means.options();
  at::Tensor v_means = at::zeros({in.points(), 3}, options), v_corners = at::zeros({in.points(), kLines}, options);
  at::Tensor v_deltas = at::zeros({in.points()}, options), v_sigmas = at::zeros({in.points()}, options);
  at::Tensor v_opacities = at::zeros({in.points()}, options), v_viewmats = at::zeros({in.views(), 4, 4}, options);
  AT_DISPATCH_FLOATING_TYPES(dtype, "project_convexes_backward", [&] {
    using T = scalar_t;
    const T *xy = v_means2d.const_data_ptr<T>(), *line = v_lines.const_data_ptr<T>(),
            *sharp = v_sharpness.const_data_ptr<T>(), *depth = v_depths.const_data_ptr<T>(),
            *opacity = v_row_opacities.const_data_ptr<T>();
    const int32_t *radius = radii.const_data_ptr<int32_t>(), *ids = in.point_ids.const_data_ptr<int32_t>();
    T *mean = v_means.mutable_data_ptr<T>(), *corner = v_corners.mutable_data_ptr<T>(),
      *delta = v_deltas.mutable_data_ptr<T>(), *sigma = v_sigmas.mutable_data_ptr<T>(),
      *own = v_opacities.mutable_data_ptr<T>(), *pose = v_viewmats.mutable_data_ptr<T>();
    // One view after the other: within a view each point appears once, so the rows of a view never meet.
    for (int64_t view = 0; view < in.views(); ++view) {
      const Camera<T> camera = in.camera<T>(view);
      const std::vector<Chunk> chunks = chunks_of(in.starts, view, view + 1);
      std::vector<double> sums(12 * chunks.size(), 0.0);
      for_chunks(chunks, [&](int64_t at, const Chunk& chunk) {
        double* sum = sums.data() + 12 * at;
        for (int64_t i = chunk.begin; i < chunk.end; ++i) {
          if (radius[2 * i] <= 0) continue;
          ConvexRowGradient<T> given;
          given.x = xy[2 * i];
          given.y = xy[2 * i + 1];
          for (int k = 0; k < kCorners; ++k) {
            const T* from = line + kLines * i + 3 * k;
            given.lines[k] = {from[0], from[1], from[2]};
          }
          given.sharpness = sharp[i];
          given.depth = depth[i];
          given.opacity = opacity[i];
          const ConvexGradient<T> g = convex_vjp(camera, in.point<T>(i), given);
          const int64_t id = ids[i];
          const T means_of[3] = {g.mean.x, g.mean.y, g.mean.z};
          for (int c = 0; c < 3; ++c) mean[3 * id + c] += means_of[c];
          for (int k = 0; k < kCorners; ++k) {
            T* to = corner + kLines * id + 3 * k;
            to[0] += g.corners[k].x;
            to[1] += g.corners[k].y;
            to[2] += g.corners[k].z;
          }
          delta[id] += g.delta;
          sigma[id] += g.sigma;
          own[id] += g.opacity;
          const Mat3<T>& r = g.rotation;
          const T terms[12] = {r.r0.x, r.r0.y, r.r0.z, r.r1.x, r.r1.y, r.r1.z, r.r2.x, r.r2.y, r.r2.z,
                               g.translation.x, g.translation.y, g.translation.z};
          for (int c = 0; c < 12; ++c) sum[c] += double(terms[c]);
        }
      });
      double total[12] = {};
      for (size_t i = 0; i < sums.size(); ++i) total[i % 12] += sums[i];
      for (int r = 0; r < 3; ++r) {
        for (int c = 0; c < 3; ++c) pose[16 * view + 4 * r + c] = static_cast<T>(total[3 * r + c]);
        pose[16 * view + 4 * r + 3] = static_cast<T>(total[9 + r]);
      }
    }
  });
  return {v_means, v_corners, v_deltas, v_sigmas, v_opacities, v_viewmats};
}

}  // namespace
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("project_convexes", &nsmg::project_convexes);
  m.impl("project_convexes_backward", &nsmg::project_convexes_backward);
}
