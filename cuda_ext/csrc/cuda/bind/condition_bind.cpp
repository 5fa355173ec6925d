// ns_multigpu::condition and its backward on CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "cuda/bind/check.h"
#include "cuda/project/condition.h"

namespace nsmg {
namespace condition_bind {

// Checked contiguous inputs; they own what the raw pointers of `raw` point at.
struct Inputs {
  at::Tensor means, times, left, motions, scales, opacities, view_times, view_ids, point_ids;
  ConditionInputs raw;
};

Inputs check_inputs(const at::Tensor& means, const at::Tensor& times, const at::Tensor& left, const at::Tensor& motions,
                    const at::Tensor& scales, const at::Tensor& opacities, const at::Tensor& view_times,
                    const at::Tensor& view_ids, const at::Tensor& point_ids) {
  Inputs in;
  const int points = cuda_count(means.size(0), "points"), views = cuda_count(view_times.numel(), "views");
  const int rows = cuda_count(point_ids.numel(), "rows");
  in.means = cuda_floats(means, "means", {-1, 3}, means);
  in.times = cuda_floats(times, "times", {points}, in.means);
  in.left = aligned(cuda_floats(left, "left", {points, 4}, in.means));
  in.motions = aligned(cuda_floats(motions, "motions", {points, 4}, in.means));
  in.scales = aligned(cuda_floats(scales, "scales", {points, 4}, in.means));
  in.opacities = cuda_floats(opacities, "opacities", {points}, in.means);
  in.view_times = cuda_floats(view_times, "view_times", {views}, in.means);
  in.view_ids = cuda_ints(view_ids, "view_ids", {rows}, in.means);
  in.point_ids = cuda_ints(point_ids, "point_ids", {rows}, in.means);
  in.raw = {in.means.const_data_ptr<float>(),      in.times.const_data_ptr<float>(),
            in.left.const_data_ptr<float>(),       in.motions.const_data_ptr<float>(),
            in.scales.const_data_ptr<float>(),     in.opacities.const_data_ptr<float>(),
            in.view_times.const_data_ptr<float>(), in.view_ids.const_data_ptr<int32_t>(),
            in.point_ids.const_data_ptr<int32_t>(), points, views, rows};
  return in;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> condition_rows(
    const at::Tensor& means, const at::Tensor& times, const at::Tensor& left, const at::Tensor& motions,
    const at::Tensor& scales, const at::Tensor& opacities, const at::Tensor& view_times, const at::Tensor& view_ids,
    const at::Tensor& point_ids) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Inputs in = check_inputs(means, times, left, motions, scales, opacities, view_times, view_ids, point_ids);
  const auto options = means.options();
  const int64_t rows = in.raw.rows;
  const at::Tensor row_means = at::empty({rows, 3}, options), axes = at::empty({rows, 3, 3}, options);
  const at::Tensor row_opacities = at::empty({rows}, options);
  NSMG_CUDA_CHECK(condition(in.raw,
                            {row_means.mutable_data_ptr<float>(), axes.mutable_data_ptr<float>(),
                             row_opacities.mutable_data_ptr<float>()},
                            c10::cuda::getCurrentCUDAStream()));
  return {row_means, axes, row_opacities};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> condition_rows_backward(
    const at::Tensor& means, const at::Tensor& times, const at::Tensor& left, const at::Tensor& motions,
    const at::Tensor& scales, const at::Tensor& opacities, const at::Tensor& view_times, const at::Tensor& view_ids,
    const at::Tensor& point_ids, const at::Tensor& v_means_, const at::Tensor& v_axes_,
    const at::Tensor& v_opacities_) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Inputs in = check_inputs(means, times, left, motions, scales, opacities, view_times, view_ids, point_ids);
  const int64_t rows = in.raw.rows, points = in.raw.points, views = in.raw.views;
  const at::Tensor v_means = cuda_floats(v_means_, "v_row_means", {rows, 3}, in.means);
  const at::Tensor v_axes = cuda_floats(v_axes_, "v_axes", {rows, 3, 3}, in.means);
  const at::Tensor v_opacities = cuda_floats(v_opacities_, "v_row_opacities", {rows}, in.means);
  const auto options = means.options();
  const at::Tensor g_means = at::empty({points, 3}, options), g_times = at::empty({points}, options);
  const at::Tensor g_left = at::empty({points, 4}, options), g_motions = at::empty({points, 4}, options);
  const at::Tensor g_scales = at::empty({points, 4}, options), g_opacities = at::empty({points}, options);
  const int groups = groups_of(in.raw.points, kConditionGroup);
  cuda_count(views * groups, "blocks of points");
  const at::Tensor starts = at::empty({views * groups + 1}, options.dtype(at::kInt));
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  NSMG_CUDA_CHECK(find_group_starts(in.raw.view_ids, in.raw.point_ids, in.raw.rows, in.raw.views, kConditionGroup,
                                    groups, starts.mutable_data_ptr<int32_t>(), stream));
  NSMG_CUDA_CHECK(condition_backward(
      in.raw,
      {v_means.const_data_ptr<float>(), v_axes.const_data_ptr<float>(), v_opacities.const_data_ptr<float>(),
       g_means.mutable_data_ptr<float>(), g_times.mutable_data_ptr<float>(), g_left.mutable_data_ptr<float>(),
       g_motions.mutable_data_ptr<float>(), g_scales.mutable_data_ptr<float>(), g_opacities.mutable_data_ptr<float>(),
       starts.const_data_ptr<int32_t>()},
      stream));
  return {g_means, g_times, g_left, g_motions, g_scales, g_opacities};
}

}  // namespace condition_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("condition", &nsmg::condition_bind::condition_rows);
  m.impl("condition_backward", &nsmg::condition_bind::condition_rows_backward);
}
