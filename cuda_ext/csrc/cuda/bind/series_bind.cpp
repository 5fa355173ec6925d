// ns_multigpu::series and its backward on CUDA.

#include "cuda/project/series.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "cuda/bind/check.h"

namespace nsmg {
namespace series_bind {

// Checked contiguous inputs; they own what the raw pointers of `raw` point at.
struct Inputs {
  at::Tensor base, terms, weights, view_ids, point_ids;
  SeriesInputs raw;
};

Inputs check_inputs(const at::Tensor& base, const at::Tensor& terms, const at::Tensor& weights,
                    const at::Tensor& view_ids, const at::Tensor& point_ids, int64_t views) {
  Inputs in;
  const int rows = cuda_count(point_ids.numel(), "rows");
  in.base = cuda_floats(base, "base", {-1, -1}, base);
  const int points = cuda_count(in.base.size(0), "points");
  in.terms = cuda_floats(terms, "terms", {points, -1, in.base.size(1)}, in.base);
  in.weights = cuda_floats(weights, "weights", {rows, in.terms.size(1)}, in.base);
  in.view_ids = cuda_ints(view_ids, "view_ids", {rows}, in.base);
  in.point_ids = cuda_ints(point_ids, "point_ids", {rows}, in.base);
  cuda_count(rows * in.base.size(1), "numbers of rows");
  in.raw = {in.base.const_data_ptr<float>(),
            in.terms.const_data_ptr<float>(),
            in.weights.const_data_ptr<float>(),
            in.point_ids.const_data_ptr<int32_t>(),
            points,
            cuda_count(views, "views"),
            rows,
            cuda_count(in.base.size(1), "numbers of a point"),
            cuda_count(in.terms.size(1), "terms")};
  return in;
}

at::Tensor series_rows(const at::Tensor& base, const at::Tensor& terms, const at::Tensor& weights,
                       const at::Tensor& view_ids, const at::Tensor& point_ids, int64_t views) {
  const c10::cuda::CUDAGuard guard(base.device());
  const Inputs in = check_inputs(base, terms, weights, view_ids, point_ids, views);
  const at::Tensor sums = at::empty({in.raw.rows, in.raw.width}, base.options());
  NSMG_CUDA_CHECK(series(in.raw, sums.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return sums;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> series_rows_backward(const at::Tensor& base, const at::Tensor& terms,
                                                                    const at::Tensor& weights,
                                                                    const at::Tensor& view_ids,
                                                                    const at::Tensor& point_ids, int64_t views,
                                                                    const at::Tensor& v_rows_) {
  const c10::cuda::CUDAGuard guard(base.device());
  const Inputs in = check_inputs(base, terms, weights, view_ids, point_ids, views);
  const at::Tensor v_rows = cuda_floats(v_rows_, "v_rows", {in.raw.rows, in.raw.width}, in.base);
  const auto options = base.options();
  const at::Tensor v_base = at::empty(in.base.sizes(), options), v_terms = at::empty(in.terms.sizes(), options);
  const at::Tensor v_weights = at::empty(in.weights.sizes(), options);
  const int groups = groups_of(in.raw.points, kSeriesGroup);
  cuda_count(views * groups, "blocks of points");
  const at::Tensor starts = at::empty({views * groups + 1}, options.dtype(at::kInt));
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  NSMG_CUDA_CHECK(find_group_starts(in.view_ids.const_data_ptr<int32_t>(), in.raw.point_ids, in.raw.rows, in.raw.views,
                                    kSeriesGroup, groups, starts.mutable_data_ptr<int32_t>(), stream));
  NSMG_CUDA_CHECK(series_backward(in.raw,
                                  {v_rows.const_data_ptr<float>(), v_base.mutable_data_ptr<float>(),
                                   v_terms.mutable_data_ptr<float>(), v_weights.mutable_data_ptr<float>(),
                                   starts.const_data_ptr<int32_t>()},
                                  stream));
  return {v_base, v_terms, v_weights};
}

}  // namespace series_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("series", &nsmg::series_bind::series_rows);
  m.impl("series_backward", &nsmg::series_bind::series_rows_backward);
}
