// `clip_lists` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <tuple>

#include "cuda/bind/check.h"
#include "cuda/intersect/list_windows.h"

namespace nsmg {
namespace list_windows_bind {

std::tuple<at::Tensor, at::Tensor> clip_lists(const at::Tensor& offsets_, const at::Tensor& row_ids_,
                                              const at::Tensor& depths_, const at::Tensor& windows_) {
  const int tiles = cuda_count(windows_.size(0), "tiles"), room = cuda_count(row_ids_.size(0), "intersections"),
            rows = cuda_count(depths_.size(0), "rows");
  const at::Tensor depths = cuda_floats(depths_, "depths", {rows}, depths_),
                   windows = cuda_floats(windows_, "windows", {tiles, 2}, depths_),
                   offsets = cuda_ints(offsets_, "tile_offsets", {tiles + 1}, depths_),
                   row_ids = cuda_ints(row_ids_, "row_ids", {room}, depths_);
  const c10::cuda::CUDAGuard guard(depths.device());
  const at::TensorOptions ints = offsets.options();
  at::Tensor found = at::empty({tiles + 1}, ints), clipped = at::empty({room}, ints);
  const at::Tensor runs = at::empty({2, tiles + 1}, ints);
  size_t bytes = 0;
  NSMG_CUDA_CHECK(clip_bytes(tiles, &bytes));
  const at::Tensor temporary = at::empty({int64_t(bytes)}, ints.dtype(at::kByte));
  const TileListing lists{offsets.const_data_ptr<int32_t>(), row_ids.const_data_ptr<int32_t>(),
                          depths.const_data_ptr<float>(),    windows.const_data_ptr<float>(),
                          tiles,                             rows,
                          room};
  int32_t* firsts = runs.mutable_data_ptr<int32_t>();
  NSMG_CUDA_CHECK(clip_launch(lists, firsts, firsts + tiles + 1, temporary.mutable_data_ptr(), bytes,
                              found.mutable_data_ptr<int32_t>(), clipped.mutable_data_ptr<int32_t>(),
                              c10::cuda::getCurrentCUDAStream()));
  return {found, clipped};
}

}  // namespace list_windows_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) { m.impl("clip_lists", &nsmg::list_windows_bind::clip_lists); }
