// `step_message` and `step_gate` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "cuda/bind/check.h"
#include "cuda/optim/step_control.h"

namespace nsmg {
namespace step_control_bind {

using Optional = std::optional<at::Tensor>;

// Three numbers a band (line, tile, count).
std::vector<MessageBand> message_bands(at::IntArrayRef numbers, int64_t lines, int64_t columns, int64_t tiles) {
  TORCH_CHECK_VALUE(numbers.size() % 3 == 0 && columns >= 1, "bands holds (line, tile, count) a band, of ", columns,
                    " columns; got ", numbers.size(), " integers.");
  std::vector<MessageBand> bands;
  for (size_t k = 0; k < numbers.size(); k += 3) {
    const int64_t line = numbers[k], tile = numbers[k + 1], count = numbers[k + 2];
    TORCH_CHECK_VALUE(line >= 0 && tile >= 0 && count >= 0 && line <= lines && count <= lines - line &&
                          tile <= tiles && count <= (tiles - tile) / columns,
                      "band (line, tile, count) = (", line, ", ", tile, ", ", count, ") leaves the ", lines,
                      " lines or the ", tiles, " tiles.");
    bands.push_back({int32_t(line), int32_t(tile), int32_t(count)});
  }
  return bands;
}

// The numbers of a tensor that is written in place.
int64_t* written(const at::Tensor& tensor, const char* name, at::IntArrayRef shape, const at::Tensor& like) {
  const at::Tensor same = cuda_checked(tensor, name, shape, at::kLong, like);
  TORCH_CHECK_VALUE(same.is_same(tensor), name, " must be contiguous: it is written in place.");
  return tensor.mutable_data_ptr<int64_t>();
}

at::Tensor step_message(const at::Tensor& own_rows_, const at::Tensor& segment_counts_,
                        const at::Tensor& segment_room_, const at::Tensor& segment_most, const at::Tensor& met_,
                        const at::Tensor& tile_offsets_, at::IntArrayRef numbers, int64_t rank, int64_t lines_,
                        int64_t columns) {
  const at::Tensor own_rows = cuda_checked(own_rows_, "own_rows", {1}, at::kLong, met_),
                   segments = cuda_checked(segment_counts_, "segment_counts", {-1}, at::kLong, met_),
                   room = cuda_checked(segment_room_, "segment_room", {segments.numel()}, at::kLong, met_),
                   met = cuda_checked(met_, "met", {1}, at::kLong, met_),
                   tile_offsets = cuda_ints(tile_offsets_, "tile_offsets", {-1}, met_);
  TORCH_CHECK_VALUE(rank >= 0 && rank < segments.numel(), "a message is of one of the ", segments.numel(),
                    " ranks that have a segment, not of rank ", rank, ".");
  const int lines = cuda_count(lines_, "rows of tiles");
  const std::vector<MessageBand> bands = message_bands(numbers, lines, columns, tile_offsets.numel() - 1);
  const MessageCounts counts{own_rows.const_data_ptr<int64_t>(),
                             segments.const_data_ptr<int64_t>(),
                             room.const_data_ptr<int64_t>(),
                             written(segment_most, "segment_most", {segments.numel()}, met_),
                             met.const_data_ptr<int64_t>(),
                             static_cast<int>(rank),
                             cuda_count(segments.numel(), "ranks")};
  const c10::cuda::CUDAGuard guard(met.device());
  const at::Tensor message = at::empty({int64_t{kMessageHead} + lines}, met.options());
  NSMG_CUDA_CHECK(message_launch(counts, tile_offsets.const_data_ptr<int32_t>(), cuda_count(columns, "columns"),
                                 bands.data(), cuda_count(static_cast<int64_t>(bands.size()), "bands"), lines,
                                 message.mutable_data_ptr<int64_t>(), c10::cuda::getCurrentCUDAStream()));
  return message;
}

// A tensor [count] of int64 (-1: any count), where it lies.
Column column_of(const at::Tensor& tensor, const char* name, int64_t count, const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.dim() == 1 && (count < 0 || tensor.size(0) == count), name, " must have the shape [", count,
                    "] (-1: any size), not ", tensor.sizes(), ".");
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong && tensor.device() == like.device(), name, " is ",
                   tensor.scalar_type(), " on ", tensor.device(), "; it must be Long on ", like.device(), ".");
  return {tensor.const_data_ptr<int64_t>(), tensor.stride(0)};
}

std::tuple<at::Tensor, at::Tensor> step_gate(at::TensorList counts, const at::Tensor& limits_, const at::Tensor& status,
                                             const at::Tensor& scalars_, const at::Tensor& still_,
                                             const at::Tensor& row_counts, const Optional& lazy_steps_,
                                             int64_t most_steps, const Optional& sent_, const Optional& work,
                                             const Optional& totals) {
  const int64_t kinds = static_cast<int64_t>(counts.size());
  TORCH_CHECK_VALUE(kinds >= 1 && kinds <= kMostLimits && counts[0].numel() > 0, "counts must be 1 to ", kMostLimits,
                    " tensors [ranks], not ", kinds, ".");
  TORCH_CHECK_VALUE(work.has_value() == totals.has_value(), "work and totals belong together: give both or neither.");
  GateLaunch launch = {};
  const int64_t ranks = counts[0].numel();
  for (int64_t k = 0; k < kinds; ++k) launch.counts[k] = column_of(counts[k], "counts", ranks, scalars_);
  launch.kinds = static_cast<int>(kinds);
  launch.ranks = cuda_count(ranks, "ranks");
  const at::Tensor limits = cuda_checked(limits_, "limits", {kinds}, at::kLong, scalars_);
  launch.limits = limits.const_data_ptr<int64_t>();
  launch.status = written(status, "status", {kinds + 2 + (sent_.has_value() ? 1 : 0)}, scalars_);
  if (lazy_steps_.has_value()) {
    launch.lazy_steps = cuda_ints(*lazy_steps_, "lazy_steps", {1}, scalars_).const_data_ptr<int32_t>();
  }
  launch.most_steps = cuda_count(most_steps, "steps");
  if (sent_.has_value()) launch.sent = column_of(*sent_, "sent", 1, scalars_).first;
  const at::Tensor scalars = cuda_floats(scalars_, "scalars", scalars_.sizes(), scalars_),
                   still = cuda_floats(still_, "still", scalars_.sizes(), scalars_);
  launch.scalars = scalars.const_data_ptr<float>();
  launch.still = still.const_data_ptr<float>();
  launch.scalar_count = cuda_count(scalars.numel(), "scalars");
  launch.row_counts = column_of(row_counts, "row_counts", -1, scalars_);
  launch.segments = cuda_count(row_counts.numel(), "segments");
  if (work.has_value()) {
    const int64_t lines = totals->numel();
    launch.lines = cuda_count(lines, "rows of tiles");
    launch.totals = written(*totals, "totals", totals->sizes(), scalars_);
    TORCH_CHECK_VALUE(work->dim() == 2 && work->size(0) == ranks && work->size(1) == lines &&
                          (lines <= 1 || work->stride(1) == 1),
                      "work must have the shape [", ranks, ", ", lines, "], its rows contiguous, not ", work->sizes(),
                      " with strides ", work->strides(), ".");
    TORCH_CHECK_TYPE(work->scalar_type() == at::kLong && work->device() == scalars_.device(), "work is ",
                     work->scalar_type(), " on ", work->device(), "; it must be Long on ", scalars_.device(), ".");
    launch.work = work->const_data_ptr<int64_t>();
    launch.work_stride = work->stride(0);
  }
  const c10::cuda::CUDAGuard guard(scalars.device());
  const at::Tensor gated_scalars = at::empty(scalars.sizes(), scalars.options());
  const at::Tensor gated_counts = at::empty(row_counts.sizes(), row_counts.options());
  launch.gated_scalars = gated_scalars.mutable_data_ptr<float>();
  launch.gated_counts = gated_counts.mutable_data_ptr<int64_t>();
  NSMG_CUDA_CHECK(gate_launch(launch, c10::cuda::getCurrentCUDAStream()));
  return {gated_scalars, gated_counts};
}

}  // namespace step_control_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("step_message", &nsmg::step_control_bind::step_message);
  m.impl("step_gate", &nsmg::step_control_bind::step_gate);
}
