// ns_multigpu::project and its backward on CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "cuda/bind/check.h"
#include "cuda/project/project.h"

namespace nsmg {
namespace project_bind {

// Checked contiguous inputs; they own what the raw pointers of `raw` point at.
struct Inputs {
  at::Tensor means, quats, scales, opacities, viewmats, Ks, view_ids, point_ids;
  ProjectInputs raw;
};

Inputs check_inputs(const at::Tensor& means_, const at::Tensor& quats_, const at::Tensor& scales_,
                    const at::Tensor& opacities_, const at::Tensor& viewmats_, const at::Tensor& Ks_,
                    at::IntArrayRef sizes, const at::Tensor& view_ids_, const at::Tensor& point_ids_, double eps2d,
                    double near_plane, double far_plane, bool antialiased) {
  Inputs in;
  const int points = cuda_count(means_.size(0), "points"), views = cuda_count(viewmats_.size(0), "views");
  const int rows = cuda_count(point_ids_.numel(), "rows");
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2LL * views, "sizes must hold 2 numbers a view.");
  in.means = cuda_floats(means_, "means", {-1, 3}, means_);
  in.quats = aligned(cuda_floats(quats_, "quats", {points, 4}, in.means));
  in.scales = cuda_floats(scales_, "scales", {points, 3}, in.means);
  in.opacities = cuda_floats(opacities_, "opacities", {points}, in.means);
  in.viewmats = cuda_floats(viewmats_, "viewmats", {-1, 4, 4}, in.means);
  in.Ks = cuda_floats(Ks_, "Ks", {views, 3, 3}, in.means);
  in.view_ids = cuda_ints(view_ids_, "view_ids", {rows}, in.means);
  in.point_ids = cuda_ints(point_ids_, "point_ids", {rows}, in.means);
  in.raw = {in.means.const_data_ptr<float>(),
            in.quats.const_data_ptr<float>(),
            in.scales.const_data_ptr<float>(),
            in.opacities.const_data_ptr<float>(),
            {in.viewmats.const_data_ptr<float>(), in.Ks.const_data_ptr<float>(), static_cast<float>(near_plane),
             static_cast<float>(far_plane)},
            sizes.data(),
            in.view_ids.const_data_ptr<int32_t>(),
            in.point_ids.const_data_ptr<int32_t>(),
            points,
            views,
            rows,
            static_cast<float>(eps2d),
            antialiased};
  return in;
}

// An output. The kernels write every element of it, but without views none runs.
at::Tensor made(const Inputs& in, at::IntArrayRef shape, const at::TensorOptions& options) {
  return in.raw.views == 0 ? at::zeros(shape, options) : at::empty(shape, options);
}

using Projected = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Projected project_rows(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales,
                       const at::Tensor& opacities, const at::Tensor& viewmats, const at::Tensor& Ks,
                       at::IntArrayRef sizes, const at::Tensor& view_ids, const at::Tensor& point_ids, double eps2d,
                       double near_plane, double far_plane, bool antialiased) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Inputs in = check_inputs(means, quats, scales, opacities, viewmats, Ks, sizes, view_ids, point_ids, eps2d,
                                 near_plane, far_plane, antialiased);
  const int64_t rows = in.raw.rows;
  const auto options = means.options();
  const at::Tensor means2d = made(in, {rows, 2}, options), conics = made(in, {rows, 3}, options);
  const at::Tensor depths = made(in, {rows}, options), row_opacities = made(in, {rows}, options);
  const at::Tensor radii = made(in, {rows, 2}, options.dtype(at::kInt));
  NSMG_CUDA_CHECK(project(in.raw,
                          {means2d.mutable_data_ptr<float>(), conics.mutable_data_ptr<float>(),
                           depths.mutable_data_ptr<float>(), row_opacities.mutable_data_ptr<float>(),
                           radii.mutable_data_ptr<int32_t>()},
                          c10::cuda::getCurrentCUDAStream()));
  return {means2d, conics, depths, row_opacities, radii};
}

// The conics are recomputed with the rest of the footprint, which costs less than to read them.
Projected project_rows_backward(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales,
                                const at::Tensor& opacities, const at::Tensor& viewmats, const at::Tensor& Ks,
                                at::IntArrayRef sizes, const at::Tensor& view_ids, const at::Tensor& point_ids,
                                double eps2d, double near_plane, double far_plane, bool antialiased,
                                const at::Tensor& /*conics*/, const at::Tensor& radii_, const at::Tensor& v_means2d_,
                                const at::Tensor& v_conics_, const at::Tensor& v_depths_,
                                const at::Tensor& v_row_opacities_) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Inputs in = check_inputs(means, quats, scales, opacities, viewmats, Ks, sizes, view_ids, point_ids, eps2d,
                                 near_plane, far_plane, antialiased);
  const int64_t rows = in.raw.rows, points = in.raw.points, views = in.raw.views;
  const at::Tensor radii = cuda_ints(radii_, "radii", {rows, 2}, in.means);
  const at::Tensor v_means2d = aligned(cuda_floats(v_means2d_, "v_means2d", {rows, 2}, in.means));
  const at::Tensor v_conics = cuda_floats(v_conics_, "v_conics", {rows, 3}, in.means);
  const at::Tensor v_depths = cuda_floats(v_depths_, "v_depths", {rows}, in.means);
  const at::Tensor v_row_opacities = cuda_floats(v_row_opacities_, "v_row_opacities", {rows}, in.means);

  const auto options = means.options();
  const at::Tensor v_means = made(in, {points, 3}, options), v_quats = made(in, {points, 4}, options);
  const at::Tensor v_scales = made(in, {points, 3}, options), v_opacities = made(in, {points}, options);
  const at::Tensor v_viewmats = at::zeros({views, 4, 4}, options);
  const int groups = groups_of(in.raw.points, kProjectGroup);
  cuda_count(views * groups, "blocks of points");
  const at::Tensor starts = at::empty({views * groups + 1}, options.dtype(at::kInt));
  const at::Tensor poses = at::empty({views, 12, groups}, options);
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  NSMG_CUDA_CHECK(find_group_starts(in.raw.view_ids, in.raw.point_ids, in.raw.rows, in.raw.views, kProjectGroup, groups,
                                    starts.mutable_data_ptr<int32_t>(), stream));
  NSMG_CUDA_CHECK(project_backward(
      in.raw,
      {v_means2d.const_data_ptr<float>(), v_conics.const_data_ptr<float>(), v_depths.const_data_ptr<float>(),
       v_row_opacities.const_data_ptr<float>(), radii.const_data_ptr<int32_t>(), v_means.mutable_data_ptr<float>(),
       v_quats.mutable_data_ptr<float>(), v_scales.mutable_data_ptr<float>(), v_opacities.mutable_data_ptr<float>(),
       v_viewmats.mutable_data_ptr<float>(), starts.const_data_ptr<int32_t>(), poses.mutable_data_ptr<float>()},
      stream));
  return {v_means, v_quats, v_scales, v_opacities, v_viewmats};
}

}  // namespace project_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("project", &nsmg::project_bind::project_rows);
  m.impl("project_backward", &nsmg::project_bind::project_rows_backward);
}
