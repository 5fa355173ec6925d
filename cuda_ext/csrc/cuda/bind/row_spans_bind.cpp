// `row_spans` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

#include "cuda/bind/check.h"
#include "cuda/exchange/row_spans.h"

namespace nsmg {
namespace row_spans_bind {

at::Tensor row_spans(const at::Tensor& layers_, const at::Tensor& means2d_, const at::Tensor& radii_, int64_t width,
                     int64_t height, int64_t count_of_layers, const std::optional<at::Tensor>& count_,
                     const std::optional<at::Tensor>& cells_) {
  const int rows = cuda_count(means2d_.size(0), "rows"), layer_count = cuda_count(count_of_layers, "layers");
  TORCH_CHECK_VALUE(width >= 0 && height >= 0 && width < (1 << 24) && height < (1 << 24), "layers of ", width, "x",
                    height, " pixels.");
  const at::Tensor means2d = aligned_pairs(cuda_floats(means2d_, "means2d", {rows, 2}, means2d_)),
                   layers = cuda_ints(layers_, "layers", {rows}, means2d_),
                   radii = aligned_pairs(cuda_ints(radii_, "radii", {rows, 2}, means2d_));
  at::Tensor count, cells;
  if (count_) count = cuda_checked(*count_, "count", {1}, at::kLong, means2d_);
  if (cells_) cells = cuda_checked(*cells_, "cells", {-1, rows}, at::kBool, means2d_);
  const int cells_count = cells.defined() ? cuda_count(cells.size(0), "cells") : 1;
  const int64_t lines = (height + 15) / 16;
  const c10::cuda::CUDAGuard guard(means2d.device());
  at::Tensor spans = at::empty({int64_t(layer_count) * cells_count * 2 * lines}, means2d.options().dtype(at::kLong));
  const SpanRows given{layers.const_data_ptr<int32_t>(),
                       count.defined() ? count.const_data_ptr<int64_t>() : nullptr,
                       means2d.const_data_ptr<float>(),
                       radii.const_data_ptr<int32_t>(),
                       cells.defined() ? cells.const_data_ptr<bool>() : nullptr,
                       rows,
                       cells_count};
  NSMG_CUDA_CHECK(spans_launch(given, int(width), int(height), layer_count, spans.mutable_data_ptr<int64_t>(),
                               c10::cuda::getCurrentCUDAStream()));
  return spans;
}

}  // namespace row_spans_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) { m.impl("row_spans", &nsmg::row_spans_bind::row_spans); }
