// `cell_windows` and `cells_reached` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/exchange/cells.h"
#include "cuda/bind/check.h"

namespace nsmg {
namespace cells_bind {

at::Tensor cell_windows(const at::Tensor& viewmats_, const at::Tensor& Ks_, at::IntArrayRef axes,
                        at::ArrayRef<double> planes, at::IntArrayRef paths, at::IntArrayRef order,
                        at::IntArrayRef upward, at::IntArrayRef drawn, at::IntArrayRef patches) {
  const int views = cuda_count(viewmats_.size(0), "views"), splits = cuda_count(axes.size(), "planes");
  const at::Tensor viewmats = cuda_floats(viewmats_, "viewmats", {views, 4, 4}, viewmats_),
                   Ks = cuda_floats(Ks_, "Ks", {views, 3, 3}, viewmats_);
  TORCH_CHECK_VALUE(views > 0 && order.size() > 0 && order.size() % size_t(views) == 0,
                    "order must hold the cells of each of ", views, " views.");
  const int cells = int(order.size()) / views, depth = int(paths.size()) / cells;
  TORCH_CHECK_VALUE(planes.size() == axes.size() && paths.size() == size_t(cells) * size_t(depth) &&
                        upward.size() == size_t(views) * size_t(splits) && drawn.size() % 6 == 0 &&
                        patches.size() % 6 == 0,
                    "cell_windows: tables of a length that is not theirs.");
  std::vector<uint32_t> words(2 * size_t(splits));
  if (splits > 0) std::memcpy(words.data(), planes.data(), 8 * size_t(splits));
  for (const at::IntArrayRef part : {axes, paths, order, upward, drawn}) {
    for (const int64_t number : part) words.push_back(uint32_t(int32_t(number)));
  }
  int64_t tiles = 0;
  for (size_t k = 0; k < patches.size(); k += 6) {
    const int64_t* n = patches.data() + k;
    words.push_back(uint32_t(int32_t(tiles)));
    for (int i = 0; i < 6; ++i) words.push_back(uint32_t(int32_t(n[i])));
    tiles += ((n[4] - n[2] + kCellTile - 1) / kCellTile) * ((n[5] - n[3] + kCellTile - 1) / kCellTile);
  }
  const CellTables sizes{splits, cells, depth, views, int(drawn.size() / 6), int(patches.size() / 6)};
  const c10::cuda::CUDAGuard guard(viewmats.device());
  const at::Tensor table = at::empty({int64_t(words.size())}, viewmats.options().dtype(at::kInt));
  at::Tensor windows = at::empty({tiles, 2}, viewmats.options().dtype(at::kDouble));
  NSMG_CUDA_CHECK(cell_windows_launch(sizes, words.data(), reinterpret_cast<uint32_t*>(table.mutable_data_ptr()),
                                      viewmats.const_data_ptr<float>(), Ks.const_data_ptr<float>(),
                                      cuda_count(tiles, "tiles"), windows.mutable_data_ptr<double>(),
                                      c10::cuda::getCurrentCUDAStream()));
  return windows;
}

at::Tensor cells_reached(const at::Tensor& view_ids_, const at::Tensor& means2d_, const at::Tensor& radii_,
                         const at::Tensor& depths_, const at::Tensor& viewmats_, const at::Tensor& Ks_,
                         at::ArrayRef<double> boxes) {
  const int rows = cuda_count(means2d_.size(0), "rows"), views = cuda_count(viewmats_.size(0), "views");
  const at::Tensor means2d = cuda_floats(means2d_, "means2d", {rows, 2}, means2d_),
                   depths = cuda_floats(depths_, "depths", {rows}, means2d_),
                   view_ids = cuda_ints(view_ids_, "view_ids", {rows}, means2d_),
                   radii = cuda_ints(radii_, "radii", {rows, 2}, means2d_),
                   viewmats = cuda_floats(viewmats_, "viewmats", {views, 4, 4}, means2d_),
                   Ks = cuda_floats(Ks_, "Ks", {views, 3, 3}, means2d_);
  TORCH_CHECK_VALUE(views > 0 && boxes.size() % 6 == 0, "boxes must hold 6 numbers a cell, and there must be a view.");
  const int cells = int(boxes.size() / 6);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const at::Tensor table = at::empty({cells, 6}, means2d.options().dtype(at::kDouble));
  at::Tensor reached = at::empty({cells, rows}, means2d.options().dtype(at::kBool));
  const CellRows lines{view_ids.const_data_ptr<int32_t>(), means2d.const_data_ptr<float>(),
                       radii.const_data_ptr<int32_t>(), depths.const_data_ptr<float>(), rows};
  NSMG_CUDA_CHECK(cells_reached_launch(lines, viewmats.const_data_ptr<float>(), Ks.const_data_ptr<float>(), views,
                                       boxes.data(), cells, table.mutable_data_ptr<double>(),
                                       reached.mutable_data_ptr<bool>(), c10::cuda::getCurrentCUDAStream()));
  return reached;
}

}  // namespace cells_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("cell_windows", &nsmg::cells_bind::cell_windows);
  m.impl("cells_reached", &nsmg::cells_bind::cells_reached);
}
