// ns_multigpu::sh_colors and its backward on CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "cuda/bind/check.h"
#include "cuda/project/sh.h"

namespace nsmg {
namespace sh_bind {

// Checked contiguous inputs; they own what the raw pointers of `raw` point at.
struct Inputs {
  at::Tensor means, centers, dc, rest, view_ids, point_ids;
  ShInputs raw;
};

Inputs check_inputs(int64_t degree, const at::Tensor& means_, const at::Tensor& camera_centers_,
                    const at::Tensor& sh_dc_, const at::Tensor& sh_rest_, const at::Tensor& view_ids_,
                    const at::Tensor& point_ids_) {
  Inputs in;
  TORCH_CHECK_VALUE(degree >= 0 && degree <= 3, "degree must be 0, 1, 2 or 3, not ", degree, ".");
  const int points = cuda_count(means_.size(0), "points"), views = cuda_count(camera_centers_.size(0), "views");
  const int rows = cuda_count(point_ids_.numel(), "rows");
  in.means = cuda_floats(means_, "means", {-1, 3}, means_);
  in.centers = cuda_floats(camera_centers_, "camera_centers", {-1, 3}, in.means);
  in.dc = cuda_floats(sh_dc_, "sh_dc", {points, 3}, in.means);
  in.rest = cuda_floats(sh_rest_, "sh_rest", {points, -1, 3}, in.means);
  in.view_ids = cuda_ints(view_ids_, "view_ids", {rows}, in.means);
  in.point_ids = cuda_ints(point_ids_, "point_ids", {rows}, in.means);
  const int64_t needed = (degree + 1) * (degree + 1) - 1;
  TORCH_CHECK_VALUE(in.rest.size(1) >= needed && in.rest.size(1) < (1 << 20), "sh_rest must hold at least ", needed,
                    " bases for degree ", degree, ", not ", in.rest.size(1), ".");
  in.raw = {in.means.const_data_ptr<float>(),
            in.centers.const_data_ptr<float>(),
            in.dc.const_data_ptr<float>(),
            in.rest.const_data_ptr<float>(),
            in.view_ids.const_data_ptr<int32_t>(),
            in.point_ids.const_data_ptr<int32_t>(),
            points,
            views,
            rows,
            static_cast<int>(in.rest.size(1)),
            static_cast<int>(degree)};
  return in;
}

at::Tensor sh_rows(int64_t degree, const at::Tensor& means, const at::Tensor& camera_centers, const at::Tensor& sh_dc,
                   const at::Tensor& sh_rest, const at::Tensor& view_ids, const at::Tensor& point_ids) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Inputs in = check_inputs(degree, means, camera_centers, sh_dc, sh_rest, view_ids, point_ids);
  const at::Tensor colors = at::empty({in.raw.rows, 3}, means.options());
  NSMG_CUDA_CHECK(sh_colors(in.raw, colors.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return colors;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> sh_rows_backward(
    int64_t degree, const at::Tensor& means, const at::Tensor& camera_centers, const at::Tensor& sh_dc,
    const at::Tensor& sh_rest, const at::Tensor& view_ids, const at::Tensor& point_ids, const at::Tensor& colors_,
    const at::Tensor& v_colors_) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Inputs in = check_inputs(degree, means, camera_centers, sh_dc, sh_rest, view_ids, point_ids);
  const at::Tensor colors = cuda_floats(colors_, "colors", {in.raw.rows, 3}, in.means);
  const at::Tensor v_colors = cuda_floats(v_colors_, "v_colors", {in.raw.rows, 3}, in.means);

  const auto options = means.options();
  const int64_t points = in.raw.points, views = in.raw.views;
  const at::Tensor v_means = at::empty({points, 3}, options), v_centers = at::empty({views, 3}, options);
  const at::Tensor v_dc = at::empty({points, 3}, options);
  const at::Tensor v_rest = at::empty({points, in.raw.rest_bases, 3}, options);
  const int groups = groups_of(in.raw.points, kShGroup);
  cuda_count(views * groups, "blocks of points");
  const at::Tensor starts = at::empty({views * groups + 1}, options.dtype(at::kInt));
  const at::Tensor partial_centers = at::empty({views, 3, groups}, options);
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  NSMG_CUDA_CHECK(find_group_starts(in.raw.view_ids, in.raw.point_ids, in.raw.rows, in.raw.views, kShGroup, groups,
                                    starts.mutable_data_ptr<int32_t>(), stream));
  NSMG_CUDA_CHECK(sh_colors_backward(
      in.raw,
      {colors.const_data_ptr<float>(), v_colors.const_data_ptr<float>(), v_means.mutable_data_ptr<float>(),
       v_centers.mutable_data_ptr<float>(), v_dc.mutable_data_ptr<float>(), v_rest.mutable_data_ptr<float>(),
       starts.const_data_ptr<int32_t>(), partial_centers.mutable_data_ptr<float>()},
      stream));
  return {v_means, v_centers, v_dc, v_rest};
}

}  // namespace sh_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("sh_colors", &nsmg::sh_bind::sh_rows);
  m.impl("sh_colors_backward", &nsmg::sh_bind::sh_rows_backward);
}
