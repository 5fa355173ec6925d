// `draw_sources`, `share_out`, `copy_rows`, `take_rows` and `turn` on CUDA.
#include "cuda/densify/relocation.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "cuda/bind/check.h"

namespace nsmg {
namespace relocation_bind {

RowArrays row_arrays(at::TensorList tensors, int64_t points, const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensors.size() <= kMostRowArrays, "there are ", tensors.size(), " tensors of rows; the CUDA ",
                    "operators take up to ", kMostRowArrays, ".");
  RowArrays arrays{};
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.dim() >= 1 && tensor.size(0) == points && tensor.is_contiguous(),
                      "tensors of rows must be contiguous, as they are changed in place, and have ", points,
                      " rows; one is ", tensor.sizes(), ".");
    TORCH_CHECK_TYPE(tensor.device() == like.device(), "a tensor of rows is on ", tensor.device(),
                     "; it must be on ", like.device(), " like the rest.");
    const int64_t bytes = points == 0 ? 0 : int64_t(tensor.nbytes()) / points;
    if (bytes == 0) continue;
    const uintptr_t both = uintptr_t(bytes) | reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    const int unit = both % 4 == 0 ? 4 : both % 2 == 0 ? 2 : 1;
    arrays.rows[arrays.count] = tensor.mutable_data_ptr();
    arrays.words[arrays.count] = cuda_count(bytes / unit, "numbers of a row");
    arrays.unit[arrays.count++] = unit;
  }
  return arrays;
}

std::tuple<at::Tensor, at::Tensor> draw_sources(const at::Tensor& sums_, const at::Tensor& empty_,
                                                const at::Tensor& slots_, int64_t start,
                                                const std::optional<at::Tensor>& taken_) {
  const c10::cuda::CUDAGuard guard(sums_.device());
  const int points = cuda_count(sums_.size(0), "points");
  const at::Tensor sums = cuda_checked(sums_, "sums", {points}, at::kLong, sums_);
  const at::Tensor empty = cuda_checked(empty_, "empty", {points}, at::kBool, sums);
  const at::Tensor slots = cuda_checked(slots_, "slots", {points}, at::kLong, sums);
  at::Tensor taken;
  if (taken_.has_value()) taken = cuda_checked(*taken_, "taken", {}, at::kBool, sums);
  const at::Tensor sources = at::empty({points}, sums.options().dtype(at::kInt));
  const at::Tensor copies = at::zeros({points}, sums.options().dtype(at::kInt));
  const DrawInputs in = {sums.const_data_ptr<int64_t>(),
                         slots.const_data_ptr<int64_t>(),
                         empty.const_data_ptr<bool>(),
                         taken.defined() ? taken.const_data_ptr<bool>() : nullptr,
                         static_cast<uint64_t>(start),
                         points};
  NSMG_CUDA_CHECK(draw_sources_launch(in, sources.mutable_data_ptr<int32_t>(), copies.mutable_data_ptr<int32_t>(),
                                      c10::cuda::getCurrentCUDAStream()));
  return {sources, copies};
}

void share_out(at::Tensor logits, at::Tensor log_scales, const at::Tensor& copies_, const at::Tensor& coefficients_,
               double min_opacity, at::TensorList cleared) {
  const c10::cuda::CUDAGuard guard(logits.device());
  const int points = cuda_count(logits.size(0), "points");
  cuda_floats(logits, "logits", {points}, logits);
  cuda_floats(log_scales, "log_scales", {points, -1}, logits);
  TORCH_CHECK_VALUE(logits.is_contiguous() && log_scales.is_contiguous(),
                    "logits and log_scales must be contiguous: they are changed in place.");
  const at::Tensor copies = cuda_ints(copies_, "copies", {points}, logits);
  const at::Tensor coefficients =
      cuda_checked(coefficients_, "coefficients", {kMostCopies, kMostCopies + 1}, at::kDouble, logits);
  const ShareInputs in = {copies.const_data_ptr<int32_t>(), coefficients.const_data_ptr<double>(),
                          static_cast<float>(min_opacity), points, static_cast<int>(log_scales.size(1))};
  NSMG_CUDA_CHECK(share_out_launch(in, logits.mutable_data_ptr<float>(), log_scales.mutable_data_ptr<float>(),
                                   row_arrays(cleared, points, logits), c10::cuda::getCurrentCUDAStream()));
}

void copy_rows(at::TensorList tensors, const at::Tensor& sources_) {
  const c10::cuda::CUDAGuard guard(sources_.device());
  const int points = cuda_count(sources_.size(0), "points");
  const at::Tensor sources = cuda_ints(sources_, "sources", {points}, sources_);
  NSMG_CUDA_CHECK(copy_rows_launch(row_arrays(tensors, points, sources), sources.const_data_ptr<int32_t>(), points,
                                   c10::cuda::getCurrentCUDAStream()));
}

std::vector<at::Tensor> take_rows(at::TensorList tensors, const at::Tensor& index_) {
  const c10::cuda::CUDAGuard guard(index_.device());
  const int taken = cuda_count(index_.size(0), "rows");
  const at::Tensor index = cuda_checked(index_, "index", {taken}, at::kLong, index_);
  std::vector<at::Tensor> out, from;
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.dim() >= 1 && (tensor.size(0) > 0 || taken == 0), "of a tensor without rows, ",
                      tensor.sizes(), ", none can be taken.");
    auto shape = tensor.sizes().vec();
    shape[0] = taken;
    out.push_back(at::empty(shape, tensor.options()));
    from.push_back(tensor.contiguous());
  }
  for (size_t first = 0; taken > 0 && first < from.size(); first += kMostRowArrays) {
    const size_t count = std::min(from.size() - first, size_t(kMostRowArrays));
    RowArrays arrays{}, to{};
    for (size_t k = first; k < first + count; ++k) {
      const int64_t bytes = int64_t(out[k].nbytes()) / taken;
      if (bytes == 0) continue;
      TORCH_CHECK_TYPE(from[k].device() == index.device(), "a tensor of rows is on ", from[k].device(),
                       "; it must be on ", index.device(), " like the rest.");
      const uintptr_t both = uintptr_t(bytes) | reinterpret_cast<uintptr_t>(from[k].const_data_ptr());
      const int unit = both % 4 == 0 ? 4 : both % 2 == 0 ? 2 : 1;
      arrays.rows[arrays.count] = const_cast<void*>(from[k].const_data_ptr());
      to.rows[arrays.count] = out[k].mutable_data_ptr();
      arrays.words[arrays.count] = to.words[arrays.count] = cuda_count(bytes / unit, "numbers of a row");
      arrays.unit[arrays.count] = to.unit[arrays.count] = unit;
      to.count = ++arrays.count;
    }
    NSMG_CUDA_CHECK(take_rows_launch(arrays, to, index.const_data_ptr<int64_t>(), taken,
                                     c10::cuda::getCurrentCUDAStream()));
  }
  return out;
}

at::Tensor turn(const at::Tensor& quats_, const at::Tensor& vectors_) {
  const c10::cuda::CUDAGuard guard(quats_.device());
  const int points = cuda_count(quats_.size(0), "points");
  const at::Tensor quats = aligned(cuda_floats(quats_, "quats", {points, 4}, quats_));
  const at::Tensor vectors = cuda_floats(vectors_, "vectors", {-1, points, 3}, quats);
  const at::Tensor turned = at::empty(vectors.sizes(), vectors.options());
  NSMG_CUDA_CHECK(turn_launch(quats.const_data_ptr<float>(), vectors.const_data_ptr<float>(), points, vectors.size(0),
                              turned.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return turned;
}

}  // namespace relocation_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("draw_sources", &nsmg::relocation_bind::draw_sources);
  m.impl("share_out", &nsmg::relocation_bind::share_out);
  m.impl("copy_rows", &nsmg::relocation_bind::copy_rows);
  m.impl("take_rows", &nsmg::relocation_bind::take_rows);
  m.impl("turn", &nsmg::relocation_bind::turn);
}
