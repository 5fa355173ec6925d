// ns_multigpu::project_surfels and its backward on CPU: a row at a time, by the maths of common/surfel.h.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "common/surfel.h"
#include "cpu/common/rows.h"

namespace nsmg {
namespace {

// The checked inputs that forward and backward share.
struct Inputs {
  at::Tensor means, quats, scales, opacities, viewmats, Ks, point_ids;
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
  Surfel<T> point(int64_t row) const {
    const int64_t id = point_ids.const_data_ptr<int32_t>()[row];
    const T* mean = means.const_data_ptr<T>() + 3 * id;
    const T* quat = quats.const_data_ptr<T>() + 4 * id;
    const T* scale = scales.const_data_ptr<T>() + 2 * id;
    return {{mean[0], mean[1], mean[2]},
            {quat[0], quat[1], quat[2], quat[3]},
            scale[0],
            scale[1],
            opacities.const_data_ptr<T>()[id]};
  }
};

Inputs check_inputs(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales,
                    const at::Tensor& opacities, const at::Tensor& viewmats, const at::Tensor& Ks,
                    at::IntArrayRef sizes, const at::Tensor& view_ids, const at::Tensor& point_ids, double near_plane,
                    double far_plane) {
  const auto dtype = means.scalar_type();
  const int64_t points = means.size(0), views = viewmats.size(0);
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2 * views, "sizes must hold 2 numbers a view.");
  return {checked(means, "means", {-1, 3}, dtype),
          checked(quats, "quats", {points, 4}, dtype),
          checked(scales, "scales", {points, 2}, dtype),
          checked(opacities, "opacities", {points}, dtype),
          checked(viewmats, "viewmats", {-1, 4, 4}, dtype),
          checked(Ks, "Ks", {views, 3, 3}, dtype),
          point_ids.contiguous(),
          view_starts(view_ids.contiguous(), point_ids.contiguous(), views, points),
          sizes.vec(),
          near_plane,
          far_plane};
}

template <typename T>
void put3(T* to, const Vec3<T>& from) {
  to[0] = from.x;
  to[1] = from.y;
  to[2] = from.z;
}

template <typename T>
Vec3<T> get3(const T* from) {
  return {from[0], from[1], from[2]};
}

using Projected = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Projected project_surfels(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales,
                          const at::Tensor& opacities, const at::Tensor& viewmats, const at::Tensor& Ks,
                          at::IntArrayRef sizes, const at::Tensor& view_ids, const at::Tensor& point_ids,
                          double near_plane, double far_plane) {
  const Inputs in = check_inputs(means, quats, scales, opacities, viewmats, Ks, sizes, view_ids, point_ids, near_plane,
                                 far_plane);
  const auto options = means.options();
  const int64_t rows = in.rows();
  at::Tensor means2d = at::empty({rows, 2}, options), transforms = at::empty({rows, 9}, options);
  at::Tensor normals = at::empty({rows, 3}, options), depths = at::empty({rows}, options);
  at::Tensor row_opacities = at::empty({rows}, options), radii = at::empty({rows, 2}, options.dtype(at::kInt));
  for (const at::Tensor& out : {means2d, transforms, normals, depths, row_opacities, radii})
    zero_padding(out, in.starts);
  AT_DISPATCH_FLOATING_TYPES(means.scalar_type(), "project_surfels", [&] {
    using T = scalar_t;
    T *xy = means2d.mutable_data_ptr<T>(), *frame = transforms.mutable_data_ptr<T>(),
      *normal = normals.mutable_data_ptr<T>(), *depth = depths.mutable_data_ptr<T>(),
      *opacity = row_opacities.mutable_data_ptr<T>();
    int32_t* radius = radii.mutable_data_ptr<int32_t>();
    for_chunks(chunks_of(in.starts, 0, in.views()), [&](int64_t, const Chunk& chunk) {
      const Camera<T> camera = in.camera<T>(chunk.view);
      for (int64_t i = chunk.begin; i < chunk.end; ++i) {
        SurfelRow<T> row = project_surfel(camera, in.point<T>(i));
        radius[2 * i] = static_cast<int32_t>(row.rx);
        radius[2 * i + 1] = static_cast<int32_t>(row.ry);
        if (!row.alive) row = {};
        xy[2 * i] = row.x;
        xy[2 * i + 1] = row.y;
        put3(frame + 9 * i, row.u);
        put3(frame + 9 * i + 3, row.v);
        put3(frame + 9 * i + 6, row.w);
        put3(normal + 3 * i, row.normal);
        depth[i] = row.depth;
        opacity[i] = row.opacity;
      }
    });
  });
  return {means2d, transforms, normals, depths, row_opacities, radii};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients project_surfels_backward(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales,
                                   const at::Tensor& opacities, const at::Tensor& viewmats, const at::Tensor& Ks,
                                   at::IntArrayRef sizes, const at::Tensor& view_ids, const at::Tensor& point_ids,
                                   double near_plane, double far_plane, const at::Tensor& radii_,
                                   const at::Tensor& v_means2d_, const at::Tensor& v_transforms_,
                                   const at::Tensor& v_normals_, const at::Tensor& v_depths_,
                                   const at::Tensor& v_row_opacities_) {
  const Inputs in = check_inputs(means, quats, scales, opacities, viewmats, Ks, sizes, view_ids, point_ids, near_plane,
                                 far_plane);
  const auto dtype = means.scalar_type();
  const int64_t rows = in.rows();
  const at::Tensor radii = checked(radii_, "radii", {rows, 2}, at::kInt);
  const at::Tensor v_means2d = checked(v_means2d_, "v_means2d", {rows, 2}, dtype);
  const at::Tensor v_transforms = checked(v_transforms_, "v_transforms", {rows, 9}, dtype);
  const at::Tensor v_normals = checked(v_normals_, "v_normals", {rows, 3}, dtype);
  const at::Tensor v_depths = checked(v_depths_, "v_depths", {rows}, dtype);
  const at::Tensor v_row_opacities = checked(v_row_opacities_, "v_row_opacities", {rows}, dtype);
  const auto options = means.options();
  at::Tensor v_means = at::zeros({in.points(), 3}, options), v_quats = at::zeros({in.points(), 4}, options);
  at::Tensor v_scales = at::zeros({in.points(), 2}, options), v_opacities = at::zeros({in.points()}, options);
  at::Tensor v_viewmats = at::zeros({in.views(), 4, 4}, options);
  AT_DISPATCH_FLOATING_TYPES(dtype, "project_surfels_backward", [&] {
    using T = scalar_t;
    const T *xy = v_means2d.const_data_ptr<T>(), *frame = v_transforms.const_data_ptr<T>(),
            *normal = v_normals.const_data_ptr<T>(), *depth = v_depths.const_data_ptr<T>(),
            *opacity = v_row_opacities.const_data_ptr<T>();
    const int32_t *radius = radii.const_data_ptr<int32_t>(), *ids = in.point_ids.const_data_ptr<int32_t>();
    T *mean = v_means.mutable_data_ptr<T>(), *quat = v_quats.mutable_data_ptr<T>(),
      *scale = v_scales.mutable_data_ptr<T>(), *own = v_opacities.mutable_data_ptr<T>(),
      *pose = v_viewmats.mutable_data_ptr<T>();
    // One view after the other: within a view each point appears once, so the rows of a view never meet.
    for (int64_t view = 0; view < in.views(); ++view) {
      const Camera<T> camera = in.camera<T>(view);
      const std::vector<Chunk> chunks = chunks_of(in.starts, view, view + 1);
      std::vector<double> sums(12 * chunks.size(), 0.0);
      for_chunks(chunks, [&](int64_t at, const Chunk& chunk) {
        double* sum = sums.data() + 12 * at;
        for (int64_t i = chunk.begin; i < chunk.end; ++i) {
          if (radius[2 * i] <= 0) continue;
          const SurfelRowGradient<T> given = {xy[2 * i],          xy[2 * i + 1],          get3(frame + 9 * i),
                                              get3(frame + 9 * i + 3), get3(frame + 9 * i + 6), get3(normal + 3 * i),
                                              depth[i],           opacity[i]};
          const SurfelGradient<T> g = surfel_vjp(camera, in.point<T>(i), given);
          const int64_t id = ids[i];
          const T means_of[3] = {g.mean.x, g.mean.y, g.mean.z};
          const T quats_of[4] = {g.quat.w, g.quat.x, g.quat.y, g.quat.z};
          for (int c = 0; c < 3; ++c) mean[3 * id + c] += means_of[c];
          for (int c = 0; c < 4; ++c) quat[4 * id + c] += quats_of[c];
          scale[2 * id] += g.scale_u;
          scale[2 * id + 1] += g.scale_v;
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
  return {v_means, v_quats, v_scales, v_opacities, v_viewmats};
}

}  // namespace
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("project_surfels", &nsmg::project_surfels);
  m.impl("project_surfels_backward", &nsmg::project_surfels_backward);
}
