// `intersect` and `intersect_capacity` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu/common/patches.h"
#include "cuda/bind/check.h"
#include "cuda/intersect/intersect.h"

namespace nsmg {
namespace intersect_bind {

constexpr int64_t kMostPairs = std::numeric_limits<int32_t>::max();

// The patches that have tiles, ascending by view.
std::vector<PatchTiles> tiled_patches(const PatchList& list) {
  std::vector<PatchTiles> table;
  for (const Patch& p : list.patches)
    if (p.tiles_x > 0) table.push_back({p.view, p.x0, p.y0, p.x1, p.y1, int32_t(p.first_tile), p.tiles_x});
  std::stable_sort(table.begin(), table.end(),
                   [](const PatchTiles& a, const PatchTiles& b) { return a.view < b.view; });
  return table;
}

// Lists up to `capacity` pairs of tile and row; `total` on the device says how many there are.
template <typename Key>
at::Tensor list_pairs(const IntersectRows& rows, const PatchTable& table, const RowOrder& order, const int64_t* total,
                      int capacity, int tiles, at::Tensor& tile_offsets, cudaStream_t stream) {
  const at::TensorOptions ints = tile_offsets.options();
  const at::TensorOptions bytes = ints.dtype(at::kByte);
  const at::Tensor keys[2] = {at::empty({int64_t(sizeof(Key)) * capacity}, bytes),
                              at::empty({int64_t(sizeof(Key)) * capacity}, bytes)};
  const at::Tensor ids[2] = {at::empty({capacity}, ints), at::empty({capacity}, ints)};
  TileLists<Key> lists;
  for (int k = 0; k < 2; ++k) {
    lists.tiles[k] = static_cast<Key*>(keys[k].mutable_data_ptr());
    lists.rows[k] = ids[k].mutable_data_ptr<int32_t>();
  }
  size_t room = 0;
  NSMG_CUDA_CHECK(intersect_emit_bytes<Key>(capacity, tiles, &room));
  const at::Tensor temporary = at::empty({int64_t(room)}, bytes);
  int current = 0;
  NSMG_CUDA_CHECK(intersect_emit<Key>(rows, table, order, total, capacity, tiles, lists, &current,
                                      temporary.mutable_data_ptr(), room, stream));
  NSMG_CUDA_CHECK(intersect_offsets<Key>(lists.tiles[current], total, capacity, tiles,
                                         tile_offsets.mutable_data_ptr<int32_t>(), stream));
  return ids[current];
}

// capacity < 0: exactly as many as there are, which waits for the device.
std::tuple<at::Tensor, at::Tensor, at::Tensor> run(const at::Tensor& means2d_, const at::Tensor& conics_,
                                                   const at::Tensor& row_opacities_, const at::Tensor& radii_,
                                                   const at::Tensor& depths_, const at::Tensor& view_ids_,
                                                   at::IntArrayRef patches, int64_t tile_size, int64_t capacity) {
  const PatchList list(patches, tile_size);
  const int tiles = cuda_count(list.tiles, "tiles"), count = cuda_count(means2d_.size(0), "rows");
  const at::Tensor means2d = aligned_pairs(cuda_floats(means2d_, "means2d", {count, 2}, means2d_)),
                   conics = cuda_floats(conics_, "conics", {count, 3}, means2d_),
                   row_opacities = cuda_floats(row_opacities_, "row_opacities", {count}, means2d_),
                   depths = cuda_floats(depths_, "depths", {count}, means2d_),
                   radii = aligned_pairs(cuda_ints(radii_, "radii", {count, 2}, means2d_)),
                   view_ids = cuda_ints(view_ids_, "view_ids", {count}, means2d_);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::TensorOptions ints = radii.options();
  const std::vector<PatchTiles> host = tiled_patches(list);
  if (count == 0 || host.empty())
    return {at::zeros({int64_t(tiles) + 1}, ints), at::full({std::max<int64_t>(capacity, 0)}, -1, ints),
            at::zeros({1}, ints.dtype(at::kLong))};

  const IntersectRows rows{means2d.const_data_ptr<float>(), conics.const_data_ptr<float>(),
                           row_opacities.const_data_ptr<float>(), depths.const_data_ptr<float>(),
                           radii.const_data_ptr<int32_t>(), view_ids.const_data_ptr<int32_t>(), count};
  const at::TensorOptions bytes = ints.dtype(at::kByte);
  const at::Tensor device_table = at::empty({int64_t(host.size() * sizeof(PatchTiles))}, bytes);
  const at::Tensor number = at::empty({1}, ints.dtype(at::kLong));
  int64_t* total = number.mutable_data_ptr<int64_t>();
  auto* patches_on_device = static_cast<PatchTiles*>(device_table.mutable_data_ptr());
  const PatchTable table{patches_on_device, int(host.size()), list.tile_size};
  NSMG_CUDA_CHECK(intersect_upload(host.data(), table.count, patches_on_device, total, stream));

  size_t room = 0;
  NSMG_CUDA_CHECK(intersect_order_bytes(count, &room));
  const at::Tensor workspace = at::empty({int64_t(room)}, bytes);
  RowOrder order;
  NSMG_CUDA_CHECK(intersect_order(rows, table, workspace.mutable_data_ptr(), total, &order, stream));
  if (capacity < 0) {
    capacity = number.item<int64_t>();
    TORCH_CHECK(capacity <= kMostPairs,
                "intersect: over 2^31 - 1 intersections of splats and tiles; render fewer patches at once");
  }
  at::Tensor tile_offsets = at::empty({int64_t(tiles) + 1}, ints);
  if (capacity == 0) return {tile_offsets.zero_(), at::empty({0}, ints), number};
  // 16 bits hold the ids of the tiles and one above them.
  const bool narrow = tiles <= std::numeric_limits<uint16_t>::max();
  const at::Tensor row_ids =
      narrow ? list_pairs<uint16_t>(rows, table, order, total, int(capacity), tiles, tile_offsets, stream)
             : list_pairs<uint32_t>(rows, table, order, total, int(capacity), tiles, tile_offsets, stream);
  return {tile_offsets, row_ids, number};
}

std::tuple<at::Tensor, at::Tensor> intersect(const at::Tensor& means2d, const at::Tensor& conics,
                                             const at::Tensor& row_opacities, const at::Tensor& radii,
                                             const at::Tensor& depths, const at::Tensor& view_ids,
                                             at::IntArrayRef patches, int64_t tile_size) {
  const auto [tile_offsets, row_ids, number] =
      run(means2d, conics, row_opacities, radii, depths, view_ids, patches, tile_size, -1);
  return {tile_offsets, row_ids};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> intersect_capacity(
    const at::Tensor& means2d, const at::Tensor& conics, const at::Tensor& row_opacities, const at::Tensor& radii,
    const at::Tensor& depths, const at::Tensor& view_ids, at::IntArrayRef patches, int64_t tile_size,
    int64_t capacity) {
  TORCH_CHECK_VALUE(capacity >= 0 && capacity <= kMostPairs,
                    "intersect_capacity: capacity must lie in 0..2^31 - 1, got ", capacity);
  return run(means2d, conics, row_opacities, radii, depths, view_ids, patches, tile_size, capacity);
}

}  // namespace intersect_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("intersect", &nsmg::intersect_bind::intersect);
  m.impl("intersect_capacity", &nsmg::intersect_bind::intersect_capacity);
}
