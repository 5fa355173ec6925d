// `pack_wire`, `unpack_wire`, `keep_rows`, `pack_gradients` and `collect_wire` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <tuple>

#include "cuda/bind/check.h"
#include "cuda/exchange/row_wire.h"

namespace nsmg {
namespace row_wire_bind {

// Segments that lie within the wire, of `full` columns for this rank's own (0: it is not there) and `others` else.
WireSegments checked_segments(const at::Tensor& wire, at::IntArrayRef starts, at::IntArrayRef capacities, int64_t rank,
                              bool half, int full, int others) {
  const int64_t ranks = static_cast<int64_t>(capacities.size());
  TORCH_CHECK_VALUE(ranks >= 1 && ranks <= kMostSegments, "the wire takes 1 to ", kMostSegments, " ranks, not ", ranks,
                    ".");
  TORCH_CHECK_VALUE(static_cast<int64_t>(starts.size()) == ranks && rank >= 0 && rank < ranks, starts.size(),
                    " starts and ", ranks, " capacities of segments, rank ", rank, ".");
  WireSegments segments = {};
  segments.ranks = static_cast<int>(ranks);
  segments.rank = static_cast<int>(rank);
  segments.half = half;
  int64_t lines = 0;
  for (int64_t k = 0; k < ranks; ++k) {
    const int words = k == rank ? full : others;
    const bool inside = starts[k] >= 0 && starts[k] + words * capacities[k] <= wire.numel();
    TORCH_CHECK_VALUE(capacities[k] >= 0 && (starts[k] == kStays || inside),
                      "the segment of rank ", k, ", ", capacities[k], " rows of ", words, " words from word ",
                      starts[k], " on, leaves the ", wire.numel(), " words of the wire.");
    segments.starts[k] = starts[k];
    segments.capacities[k] = static_cast<int32_t>(cuda_count(capacities[k], "rows of a segment"));
    lines += capacities[k];
  }
  cuda_count(lines, "rows");
  return segments;
}

int64_t lines_of(const WireSegments& segments) {
  int64_t lines = 0;
  for (int k = 0; k < segments.ranks; ++k) lines += segments.capacities[k];
  return lines;
}

// The words of a wire that is written in place.
uint32_t* written(const at::Tensor& wire, const at::Tensor& like) {
  TORCH_CHECK_VALUE(cuda_ints(wire, "wire", {-1}, like).is_same(wire),
                    "wire must be contiguous: it is written in place.");
  return reinterpret_cast<uint32_t*>(wire.mutable_data_ptr<int32_t>());
}

const uint32_t* words_of(const at::Tensor& wire) {
  return reinterpret_cast<const uint32_t*>(wire.const_data_ptr<int32_t>());
}

void pack_wire(const at::Tensor& view_ids_, const at::Tensor& means2d_, const at::Tensor& conics_,
               const at::Tensor& opacities_, const at::Tensor& features_, const at::Tensor& depths_,
               const at::Tensor& radii_, const at::Tensor& place_, const at::Tensor& wire, at::IntArrayRef starts,
               at::IntArrayRef capacities, int64_t rank, bool half, bool slots, int64_t first, int64_t end) {
  const int rows = cuda_count(means2d_.size(0), "rows");
  TORCH_CHECK_VALUE(0 <= first && first <= end && end <= rows, "lines ", first, " to ", end,
                    ": need 0 <= first <= end <= ", rows, ", which is all of them.");
  const int64_t ranks = static_cast<int64_t>(capacities.size());
  const at::Tensor means2d = aligned_pairs(cuda_floats(means2d_, "means2d", {rows, 2}, means2d_)),
                   conics = cuda_floats(conics_, "conics", {rows, 3}, means2d_),
                   opacities = cuda_floats(opacities_, "opacities", {rows}, means2d_),
                   features = cuda_floats(features_, "features", {rows, 3}, means2d_),
                   depths = cuda_floats(depths_, "depths", {rows}, means2d_),
                   radii = aligned_pairs(cuda_ints(radii_, "radii", {rows, 2}, means2d_)),
                   view_ids = cuda_ints(view_ids_, "view_ids", {rows}, means2d_),
                   place = cuda_ints(place_, "place", {ranks, rows}, means2d_);
  const WireSegments to = checked_segments(wire, starts, capacities, rank, half, full_row_words(slots),
                                           half ? half_row_words(slots) : full_row_words(slots));
  const c10::cuda::CUDAGuard guard(means2d.device());
  const PackRows lines{means2d.const_data_ptr<float>(),   conics.const_data_ptr<float>(),
                       opacities.const_data_ptr<float>(), features.const_data_ptr<float>(),
                       depths.const_data_ptr<float>(),    radii.const_data_ptr<int32_t>(),
                       view_ids.const_data_ptr<int32_t>(), rows, int(first), int(end)};
  NSMG_CUDA_CHECK(pack_wire_launch(lines, place.const_data_ptr<int32_t>(), to, slots, written(wire, means2d_),
                                   c10::cuda::getCurrentCUDAStream()));
}

using Arrived = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                           at::Tensor, at::Tensor>;

Arrived unpack_wire(const at::Tensor& wire_, at::IntArrayRef starts, at::IntArrayRef capacities,
                    const at::Tensor& counts_, int64_t rank, bool half, bool slots, int64_t views) {
  const at::Tensor wire = cuda_ints(wire_, "wire", {-1}, wire_);
  const WireSegments come = checked_segments(wire, starts, capacities, rank, half, full_row_words(slots),
                                             half ? half_row_words(slots) : full_row_words(slots));
  const at::Tensor counts = cuda_checked(counts_, "counts", {come.ranks}, at::kLong, wire_);
  TORCH_CHECK_VALUE(views >= 1 && views <= kMostViews, "rows are of 1 to ", kMostViews, " views on the wire, not of ",
                    views, ".");
  const int64_t rows = lines_of(come);
  const c10::cuda::CUDAGuard guard(wire.device());
  const at::TensorOptions ints = wire.options(), floats = ints.dtype(at::kFloat);
  const at::Tensor view_ids = at::empty({rows}, ints), owners = at::empty({rows}, ints), lines = at::empty({rows}, ints);
  const at::Tensor means2d = at::empty({rows, 2}, floats), conics = at::empty({rows, 3}, floats);
  const at::Tensor opacities = at::empty({rows}, floats), features = at::empty({rows, 3}, floats);
  const at::Tensor depths = at::empty({rows}, floats), radii = at::empty({rows, 2}, ints);
  const UnpackedRows out{means2d.mutable_data_ptr<float>(),    conics.mutable_data_ptr<float>(),
                         opacities.mutable_data_ptr<float>(),  features.mutable_data_ptr<float>(),
                         depths.mutable_data_ptr<float>(),     radii.mutable_data_ptr<int32_t>(),
                         view_ids.mutable_data_ptr<int32_t>(), owners.mutable_data_ptr<int32_t>(),
                         lines.mutable_data_ptr<int32_t>()};
  NSMG_CUDA_CHECK(unpack_wire_launch(words_of(wire), come, counts.const_data_ptr<int64_t>(), slots,
                                     cuda_count(views, "views"), out, c10::cuda::getCurrentCUDAStream()));
  return {view_ids, means2d, conics, opacities, features, depths, radii, owners, lines};
}

// A column of what has arrived, which is written in place.
template <class T>
T* column(const at::Tensor& tensor, const char* name, at::IntArrayRef shape, at::ScalarType type,
          const at::Tensor& like) {
  TORCH_CHECK_VALUE(cuda_checked(tensor, name, shape, type, like).is_same(tensor), name,
                    " must be contiguous: it is written in place.");
  return tensor.mutable_data_ptr<T>();
}

void keep_rows(const at::Tensor& view_ids_, const at::Tensor& means2d_, const at::Tensor& conics_,
               const at::Tensor& opacities_, const at::Tensor& features_, const at::Tensor& depths_,
               const at::Tensor& radii_, const at::Tensor& place_, const at::Tensor& to_view_ids,
               const at::Tensor& to_means2d, const at::Tensor& to_conics, const at::Tensor& to_opacities,
               const at::Tensor& to_features, const at::Tensor& to_depths, const at::Tensor& to_radii,
               const at::Tensor& to_slots, int64_t start, int64_t capacity, bool slots) {
  const int rows = cuda_count(means2d_.size(0), "rows");
  const int64_t there = cuda_count(to_means2d.size(0), "lines that arrived");
  TORCH_CHECK_VALUE(0 <= start && 0 <= capacity && start + capacity <= there, "lines ", start, " to ",
                    start + capacity, " are to be kept, of ", there, " that arrived.");
  const at::Tensor means2d = aligned_pairs(cuda_floats(means2d_, "means2d", {rows, 2}, means2d_)),
                   conics = cuda_floats(conics_, "conics", {rows, 3}, means2d_),
                   opacities = cuda_floats(opacities_, "opacities", {rows}, means2d_),
                   features = cuda_floats(features_, "features", {rows, 3}, means2d_),
                   depths = cuda_floats(depths_, "depths", {rows}, means2d_),
                   radii = aligned_pairs(cuda_ints(radii_, "radii", {rows, 2}, means2d_)),
                   view_ids = cuda_ints(view_ids_, "view_ids", {rows}, means2d_),
                   place = cuda_ints(place_, "place", {rows}, means2d_);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const PackRows lines{means2d.const_data_ptr<float>(),   conics.const_data_ptr<float>(),
                       opacities.const_data_ptr<float>(), features.const_data_ptr<float>(),
                       depths.const_data_ptr<float>(),    radii.const_data_ptr<int32_t>(),
                       view_ids.const_data_ptr<int32_t>(), rows, 0, rows};
  const UnpackedRows to{column<float>(to_means2d, "to_means2d", {there, 2}, at::kFloat, means2d_),
                        column<float>(to_conics, "to_conics", {there, 3}, at::kFloat, means2d_),
                        column<float>(to_opacities, "to_opacities", {there}, at::kFloat, means2d_),
                        column<float>(to_features, "to_features", {there, 3}, at::kFloat, means2d_),
                        column<float>(to_depths, "to_depths", {there}, at::kFloat, means2d_),
                        column<int32_t>(to_radii, "to_radii", {there, 2}, at::kInt, means2d_),
                        column<int32_t>(to_view_ids, "to_view_ids", {there}, at::kInt, means2d_),
                        nullptr,
                        column<int32_t>(to_slots, "to_slots", {there}, at::kInt, means2d_)};
  NSMG_CUDA_CHECK(keep_rows_launch(lines, place.const_data_ptr<int32_t>(), to, start,
                                   cuda_count(capacity, "rows of a segment"), slots,
                                   c10::cuda::getCurrentCUDAStream()));
}

void pack_gradients(const at::Tensor& records_, const at::Tensor& counts_, const at::Tensor& wire,
                    at::IntArrayRef starts, at::IntArrayRef capacities, int64_t rank, bool half, bool absgrad) {
  const WireSegments to = checked_segments(wire, starts, capacities, rank, half, 0, gradient_words(half, absgrad));
  const at::Tensor records = aligned(cuda_floats(records_, "records", {lines_of(to), 16}, wire)),
                   counts = cuda_checked(counts_, "counts", {to.ranks}, at::kLong, wire);
  const c10::cuda::CUDAGuard guard(records.device());
  NSMG_CUDA_CHECK(pack_gradients_launch(records.const_data_ptr<float>(), counts.const_data_ptr<int64_t>(), to, absgrad,
                                        written(wire, records), c10::cuda::getCurrentCUDAStream()));
}

at::Tensor collect_wire(const at::Tensor& place_, const at::Tensor& count_, const at::Tensor& wire_,
                        at::IntArrayRef starts, at::IntArrayRef capacities, const at::Tensor& own_, int64_t rank,
                        bool half, bool absgrad) {
  const at::Tensor wire = cuda_ints(wire_, "wire", {-1}, place_);
  const WireSegments come = checked_segments(wire, starts, capacities, rank, half, 0, gradient_words(half, absgrad));
  const at::Tensor place = cuda_ints(place_, "place", {come.ranks, -1}, place_),
                   count = cuda_checked(count_, "count", {1}, at::kLong, place_),
                   own = aligned(cuda_floats(own_, "own", {come.capacities[come.rank], 16}, place_));
  const int rows = cuda_count(place.size(1), "rows");
  const c10::cuda::CUDAGuard guard(place.device());
  const at::Tensor records = at::empty({rows, 16}, own.options());
  NSMG_CUDA_CHECK(collect_wire_launch(place.const_data_ptr<int32_t>(), count.const_data_ptr<int64_t>(), words_of(wire),
                                      come, own.const_data_ptr<float>(), absgrad, rows,
                                      records.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return records;
}

}  // namespace row_wire_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("pack_wire", &nsmg::row_wire_bind::pack_wire);
  m.impl("unpack_wire", &nsmg::row_wire_bind::unpack_wire);
  m.impl("keep_rows", &nsmg::row_wire_bind::keep_rows);
  m.impl("pack_gradients", &nsmg::row_wire_bind::pack_gradients);
  m.impl("collect_wire", &nsmg::row_wire_bind::collect_wire);
}
