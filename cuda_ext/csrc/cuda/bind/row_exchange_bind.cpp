// `route_lines`, `pack`, `unpack` and `collect` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "cuda/bind/check.h"
#include "cuda/exchange/row_exchange.h"

namespace nsmg {
namespace row_exchange_bind {

int checked_ranks(int64_t ranks) {
  TORCH_CHECK_VALUE(ranks >= 1 && ranks <= kMostExchanging, "the exchange of rows takes 1 to ", kMostExchanging,
                    " ranks, not ", ranks, ".");
  return int(ranks);
}

// Six numbers a patch (rank, view, x0, y0, x1, y1), and its cell where there are any, ascending by view.
std::vector<RankPatch> rank_patches(at::IntArrayRef numbers, int ranks, at::IntArrayRef cells, int64_t cell_count) {
  TORCH_CHECK_VALUE(numbers.size() % 6 == 0, "patches holds 6 integers a patch (rank, view, x0, y0, x1, y1), got ",
                    numbers.size(), " in all.");
  TORCH_CHECK_VALUE(cell_count == 0 || cells.size() * 6 == numbers.size(), "cells must be one for each of ",
                    numbers.size() / 6, " patches, not ", cells.size(), ".");
  std::vector<RankPatch> patches;
  for (size_t k = 0; k < numbers.size(); k += 6) {
    const int64_t* n = numbers.data() + k;
    TORCH_CHECK_VALUE(n[0] >= 0 && n[0] < ranks && n[1] >= 0 && n[2] >= 0 && n[3] >= 0 && n[4] >= n[2] && n[5] >= n[3],
                      "patch ", k / 6, " is (rank, view, x0, y0, x1, y1) = (", n[0], ", ", n[1], ", ", n[2], ", ",
                      n[3], ", ", n[4], ", ", n[5], "): need 0 <= rank < ", ranks,
                      ", view, x0, y0 >= 0, x1 >= x0 and y1 >= y0.");
    const int64_t cell = cell_count == 0 ? 0 : cells[k / 6];
    TORCH_CHECK_VALUE(cell_count == 0 || (cell >= 0 && cell < cell_count), "patch ", k / 6, " is of cell ", cell, " of ",
                      cell_count, ".");
    patches.push_back({int32_t(n[1]), int32_t(n[0]), int32_t(n[2]), int32_t(n[3]), int32_t(n[4]), int32_t(n[5]),
                       int32_t(cell)});
  }
  std::stable_sort(patches.begin(), patches.end(),
                   [](const RankPatch& a, const RankPatch& b) { return a.view < b.view; });
  return patches;
}

void check_lines(int64_t first, int64_t end, int rows) {
  TORCH_CHECK_VALUE(0 <= first && first <= end && end <= rows, "lines ", first, " to ", end,
                    ": need 0 <= first <= end <= ", rows, ", which is all of them.");
}

void route_lines(const at::Tensor& view_ids_, const at::Tensor& count_, const at::Tensor& means2d_,
                 const at::Tensor& radii_, at::IntArrayRef numbers, int64_t ranks_, int64_t first, int64_t end,
                 const at::Tensor& place_, const at::Tensor& counts_, const std::optional<at::Tensor>& reached_,
                 at::IntArrayRef cells) {
  const int rows = cuda_count(means2d_.size(0), "rows"), ranks = checked_ranks(ranks_);
  const at::Tensor means2d = aligned_pairs(cuda_floats(means2d_, "means2d", {rows, 2}, means2d_)),
                   view_ids = cuda_ints(view_ids_, "view_ids", {rows}, means2d_),
                   radii = aligned_pairs(cuda_ints(radii_, "radii", {rows, 2}, means2d_)),
                   count = cuda_checked(count_, "count", {1}, at::kLong, means2d_),
                   place = cuda_ints(place_, "place", {ranks, rows}, means2d_),
                   counts = cuda_checked(counts_, "counts", {ranks}, at::kLong, means2d_);
  TORCH_CHECK_VALUE(place.is_same(place_) && counts.is_same(counts_),
                    "place and counts must be contiguous: they are written in place.");
  check_lines(first, end, rows);
  at::Tensor reached;
  if (reached_) reached = cuda_checked(*reached_, "reached", {-1, rows}, at::kBool, means2d_);
  const std::vector<RankPatch> patches =
      rank_patches(numbers, ranks, cells, reached.defined() ? reached.size(0) : 0);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const at::TensorOptions ints = radii.options(), bytes = ints.dtype(at::kByte);
  const at::Tensor table = at::empty({int64_t(patches.size() * sizeof(RankPatch))}, bytes);
  const at::Tensor block_counts = at::empty({ranks, route_blocks(int(end - first))}, ints);
  const RouteRows lines{view_ids.const_data_ptr<int32_t>(), count.const_data_ptr<int64_t>(),
                        means2d.const_data_ptr<float>(), radii.const_data_ptr<int32_t>(), rows, int(first), int(end),
                        reached.defined() ? reached.const_data_ptr<bool>() : nullptr};
  NSMG_CUDA_CHECK(route_launch(lines, patches.data(), cuda_count(patches.size(), "patches"),
                               static_cast<RankPatch*>(table.mutable_data_ptr()), ranks,
                               block_counts.mutable_data_ptr<int32_t>(), place.mutable_data_ptr<int32_t>(),
                               counts.mutable_data_ptr<int64_t>(), c10::cuda::getCurrentCUDAStream()));
}

void pack(const at::Tensor& view_ids_, const at::Tensor& means2d_, const at::Tensor& conics_,
          const at::Tensor& opacities_, const at::Tensor& features_, const at::Tensor& depths_,
          const at::Tensor& radii_, const at::Tensor& place_, const at::Tensor& destinations_, int64_t capacity_,
          int64_t first, std::optional<int64_t> end_) {
  const int rows = cuda_count(means2d_.size(0), "rows"), capacity = cuda_count(capacity_, "lines of capacity");
  const int ranks = checked_ranks(place_.size(0));
  const int64_t end = end_.value_or(rows);
  check_lines(first, end, rows);
  const at::Tensor means2d = aligned_pairs(cuda_floats(means2d_, "means2d", {rows, 2}, means2d_)),
                   conics = cuda_floats(conics_, "conics", {rows, 3}, means2d_),
                   opacities = cuda_floats(opacities_, "opacities", {rows}, means2d_),
                   features = cuda_floats(features_, "features", {rows, 3}, means2d_),
                   depths = cuda_floats(depths_, "depths", {rows}, means2d_),
                   radii = aligned_pairs(cuda_ints(radii_, "radii", {rows, 2}, means2d_)),
                   view_ids = cuda_ints(view_ids_, "view_ids", {rows}, means2d_),
                   place = cuda_ints(place_, "place", {ranks, rows}, means2d_),
                   destinations = cuda_checked(destinations_, "destinations", {ranks}, at::kLong, means2d_);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const PackRows lines{means2d.const_data_ptr<float>(),   conics.const_data_ptr<float>(),
                       opacities.const_data_ptr<float>(), features.const_data_ptr<float>(),
                       depths.const_data_ptr<float>(),    radii.const_data_ptr<int32_t>(),
                       view_ids.const_data_ptr<int32_t>(), rows, int(first), int(end)};
  NSMG_CUDA_CHECK(pack_launch(lines, place.const_data_ptr<int32_t>(), destinations.const_data_ptr<int64_t>(), ranks,
                              capacity, c10::cuda::getCurrentCUDAStream()));
}

using Arrived = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                           at::Tensor, at::Tensor>;

Arrived unpack(const at::Tensor& records_, const at::Tensor& counts_, int64_t views) {
  const at::Tensor records = aligned(cuda_floats(records_, "records", {-1, -1, 16}, records_));
  const int ranks = checked_ranks(records.size(0)), capacity = cuda_count(records.size(1), "lines of capacity");
  const at::Tensor counts = cuda_checked(counts_, "counts", {ranks}, at::kLong, records_);
  TORCH_CHECK_VALUE(views >= 1, "unpack needs at least one view, not ", views, ".");
  const int64_t rows = cuda_count(int64_t(ranks) * capacity, "rows");
  const c10::cuda::CUDAGuard guard(records.device());
  const at::TensorOptions floats = records.options(), ints = floats.dtype(at::kInt);
  const at::Tensor view_ids = at::empty({rows}, ints), owners = at::empty({rows}, ints), slots = at::empty({rows}, ints);
  const at::Tensor means2d = at::empty({rows, 2}, floats), conics = at::empty({rows, 3}, floats);
  const at::Tensor opacities = at::empty({rows}, floats), features = at::empty({rows, 3}, floats);
  const at::Tensor depths = at::empty({rows}, floats), radii = at::empty({rows, 2}, ints);
  const UnpackedRows lines{means2d.mutable_data_ptr<float>(),   conics.mutable_data_ptr<float>(),
                           opacities.mutable_data_ptr<float>(), features.mutable_data_ptr<float>(),
                           depths.mutable_data_ptr<float>(),    radii.mutable_data_ptr<int32_t>(),
                           view_ids.mutable_data_ptr<int32_t>(), owners.mutable_data_ptr<int32_t>(),
                           slots.mutable_data_ptr<int32_t>()};
  NSMG_CUDA_CHECK(unpack_launch(records.const_data_ptr<float>(), counts.const_data_ptr<int64_t>(), ranks, capacity,
                                cuda_count(views, "views"), lines, c10::cuda::getCurrentCUDAStream()));
  return {view_ids, means2d, conics, opacities, features, depths, radii, owners, slots};
}

at::Tensor collect(const at::Tensor& place_, const at::Tensor& count_, const at::Tensor& sources_, int64_t capacity_) {
  const at::Tensor place = cuda_ints(place_, "place", {-1, -1}, place_);
  const int ranks = checked_ranks(place.size(0)), rows = cuda_count(place.size(1), "rows");
  const int capacity = cuda_count(capacity_, "lines of capacity");
  const at::Tensor count = cuda_checked(count_, "count", {1}, at::kLong, place_),
                   sources = cuda_checked(sources_, "sources", {ranks}, at::kLong, place_);
  const c10::cuda::CUDAGuard guard(place.device());
  const at::Tensor records = at::empty({rows, 16}, place.options().dtype(at::kFloat));
  NSMG_CUDA_CHECK(collect_launch(place.const_data_ptr<int32_t>(), count.const_data_ptr<int64_t>(),
                                 sources.const_data_ptr<int64_t>(), ranks, capacity, rows,
                                 records.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return records;
}

void add_records(const at::Tensor& records_, const at::Tensor& sinks_, const at::Tensor& owners_,
                 const at::Tensor& slots_, bool system_scope) {
  const at::Tensor records = cuda_floats(records_, "records", {-1, -1}, records_);
  const int rows = cuda_count(records.size(0), "rows"), floats = cuda_count(records.size(1), "numbers of a record");
  const at::Tensor sinks = cuda_checked(sinks_, "sinks", {-1}, at::kLong, records_);
  const at::Tensor owners = cuda_ints(owners_, "owners", {rows}, records_), slots = cuda_ints(slots_, "slots", {rows}, records_);
  const c10::cuda::CUDAGuard guard(records.device());
  NSMG_CUDA_CHECK(add_records_launch(records.const_data_ptr<float>(), rows, floats, sinks.const_data_ptr<int64_t>(),
                                     cuda_count(sinks.size(0), "sinks"), owners.const_data_ptr<int32_t>(),
                                     slots.const_data_ptr<int32_t>(), system_scope,
                                     c10::cuda::getCurrentCUDAStream()));
}

}  // namespace row_exchange_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("route_lines", &nsmg::row_exchange_bind::route_lines);
  m.impl("pack", &nsmg::row_exchange_bind::pack);
  m.impl("unpack", &nsmg::row_exchange_bind::unpack);
  m.impl("collect", &nsmg::row_exchange_bind::collect);
  m.impl("add_records", &nsmg::row_exchange_bind::add_records);
}
