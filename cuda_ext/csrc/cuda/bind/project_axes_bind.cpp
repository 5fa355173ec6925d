// ns_multigpu::project_axes and its backward on CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "cuda/bind/check.h"
#include "cuda/project/project_axes.h"

namespace nsmg {
namespace project_axes_bind {

// Checked contiguous inputs; they own what the raw pointers of `raw` point at.
struct Inputs {
  at::Tensor means, axes, opacities, viewmats, Ks, view_ids;
  AxesInputs raw;
};

Inputs check_inputs(const at::Tensor& means, const at::Tensor& axes, const at::Tensor& opacities,
                    const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes,
                    const at::Tensor& view_ids, double eps2d, double near_plane, double far_plane, bool antialiased) {
  Inputs in;
  const int rows = cuda_count(means.size(0), "rows"), views = cuda_count(viewmats.size(0), "views");
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2LL * views, "sizes must hold 2 numbers a view.");
  TORCH_CHECK_VALUE(views > 0 || rows == 0, "there are ", rows, " rows and no view.");
  in.means = cuda_floats(means, "means", {-1, 3}, means);
  in.axes = cuda_floats(axes, "axes", {rows, 3, 3}, in.means);
  in.opacities = cuda_floats(opacities, "opacities", {rows}, in.means);
  in.viewmats = cuda_floats(viewmats, "viewmats", {-1, 4, 4}, in.means);
  in.Ks = cuda_floats(Ks, "Ks", {views, 3, 3}, in.means);
  in.view_ids = cuda_ints(view_ids, "view_ids", {rows}, in.means);
  in.raw = {in.means.const_data_ptr<float>(),
            in.axes.const_data_ptr<float>(),
            in.opacities.const_data_ptr<float>(),
            {in.viewmats.const_data_ptr<float>(), in.Ks.const_data_ptr<float>(), static_cast<float>(near_plane),
             static_cast<float>(far_plane)},
            sizes.data(),
            in.view_ids.const_data_ptr<int32_t>(),
            views,
            rows,
            static_cast<float>(eps2d),
            antialiased};
  return in;
}

using Projected = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Projected project_axes_rows(const at::Tensor& means, const at::Tensor& axes, const at::Tensor& opacities,
                            const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes,
                            const at::Tensor& view_ids, double eps2d, double near_plane, double far_plane,
                            bool antialiased) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Inputs in =
      check_inputs(means, axes, opacities, viewmats, Ks, sizes, view_ids, eps2d, near_plane, far_plane, antialiased);
  const int64_t rows = in.raw.rows;
  const auto options = means.options();
  const at::Tensor means2d = at::empty({rows, 2}, options), conics = at::empty({rows, 3}, options);
  const at::Tensor depths = at::empty({rows}, options), row_opacities = at::empty({rows}, options);
  const at::Tensor radii = at::empty({rows, 2}, options.dtype(at::kInt));
  NSMG_CUDA_CHECK(project_axes(in.raw,
                               {means2d.mutable_data_ptr<float>(), conics.mutable_data_ptr<float>(),
                                depths.mutable_data_ptr<float>(), row_opacities.mutable_data_ptr<float>(),
                                radii.mutable_data_ptr<int32_t>()},
                               c10::cuda::getCurrentCUDAStream()));
  return {means2d, conics, depths, row_opacities, radii};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> project_axes_rows_backward(
    const at::Tensor& means, const at::Tensor& axes, const at::Tensor& opacities, const at::Tensor& viewmats,
    const at::Tensor& Ks, at::IntArrayRef sizes, const at::Tensor& view_ids, double eps2d, double near_plane,
    double far_plane, bool antialiased, const at::Tensor& radii_, const at::Tensor& v_means2d_,
    const at::Tensor& v_conics_, const at::Tensor& v_depths_, const at::Tensor& v_row_opacities_) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Inputs in =
      check_inputs(means, axes, opacities, viewmats, Ks, sizes, view_ids, eps2d, near_plane, far_plane, antialiased);
  const int64_t rows = in.raw.rows, views = in.raw.views;
  const at::Tensor radii = cuda_ints(radii_, "radii", {rows, 2}, in.means);
  const at::Tensor v_means2d = cuda_floats(v_means2d_, "v_means2d", {rows, 2}, in.means);
  const at::Tensor v_conics = cuda_floats(v_conics_, "v_conics", {rows, 3}, in.means);
  const at::Tensor v_depths = cuda_floats(v_depths_, "v_depths", {rows}, in.means);
  const at::Tensor v_row_opacities = cuda_floats(v_row_opacities_, "v_row_opacities", {rows}, in.means);
  const auto options = means.options();
  const at::Tensor g_means = at::empty({rows, 3}, options), g_axes = at::empty({rows, 3, 3}, options);
  const at::Tensor g_opacities = at::empty({rows}, options), g_viewmats = at::zeros({views, 4, 4}, options);
  const int groups = groups_of(in.raw.rows, kAxesGroup);
  cuda_count(views * groups, "blocks of rows");
  const at::Tensor own = at::arange(rows, options.dtype(at::kInt));  // each row is a point of its own
  const at::Tensor starts = at::empty({views * groups + 1}, options.dtype(at::kInt));
  const at::Tensor poses = at::empty({views, 12, groups}, options);
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  NSMG_CUDA_CHECK(find_group_starts(in.raw.view_ids, own.const_data_ptr<int32_t>(), in.raw.rows, in.raw.views,
                                    kAxesGroup, groups, starts.mutable_data_ptr<int32_t>(), stream));
  NSMG_CUDA_CHECK(project_axes_backward(
      in.raw,
      {v_means2d.const_data_ptr<float>(), v_conics.const_data_ptr<float>(), v_depths.const_data_ptr<float>(),
       v_row_opacities.const_data_ptr<float>(), radii.const_data_ptr<int32_t>(), g_means.mutable_data_ptr<float>(),
       g_axes.mutable_data_ptr<float>(), g_opacities.mutable_data_ptr<float>(), g_viewmats.mutable_data_ptr<float>(),
       starts.const_data_ptr<int32_t>(), poses.mutable_data_ptr<float>()},
      stream));
  return {g_means, g_axes, g_opacities, g_viewmats};
}

}  // namespace project_axes_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("project_axes", &nsmg::project_axes_bind::project_axes_rows);
  m.impl("project_axes_backward", &nsmg::project_axes_bind::project_axes_rows_backward);
}
