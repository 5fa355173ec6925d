// The operators of the sort over ranks, on CUDA: `sort_pairs`, `publish_count`, `merge_level`, `intersect_keys` and
// `band_lists`. Addresses come as integers: they are memory of this GPU or of its peers.
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
#include "cuda/sort/merge.h"

namespace nsmg {
namespace merge_bind {

using Lists = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

int checked_ranks(size_t ranks) {
  TORCH_CHECK_VALUE(ranks >= 1 && ranks <= size_t(kMostRanks), "there are addresses of ", ranks,
                    " ranks; the sort over peer memory takes 1 to ", kMostRanks, ".");
  return int(ranks);
}

PairAddresses pair_addresses(at::IntArrayRef keys_at, at::IntArrayRef values_at) {
  TORCH_CHECK_VALUE(keys_at.size() == values_at.size(), "keys_at and values_at hold one address a rank each, not ",
                    keys_at.size(), " and ", values_at.size(), ".");
  const int ranks = checked_ranks(keys_at.size());
  PairAddresses addresses = {};
  for (int rank = 0; rank < ranks; ++rank) {
    addresses.keys[rank] = reinterpret_cast<const int64_t*>(keys_at[rank]);
    addresses.values[rank] = reinterpret_cast<const int32_t*>(values_at[rank]);
  }
  return addresses;
}

at::Tensor longs(const at::Tensor& tensor, const char* name, int64_t size, const at::Tensor& like) {
  return cuda_checked(tensor, name, {size}, at::kLong, like);
}

// A tensor that is written to: no copy of it will do.
void check_written(const at::Tensor& tensor, const char* name, int64_t size, at::ScalarType dtype,
                   const at::Tensor& like) {
  cuda_checked(tensor, name, {size}, dtype, like);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " must be contiguous: it is written to.");
}

void sort_pairs(const at::Tensor& keys, const at::Tensor& values_, const at::Tensor& count_, int64_t begin_bit,
                int64_t end_bit, const at::Tensor& out_keys, const at::Tensor& out_values) {
  const int capacity = cuda_count(keys.size(0), "pairs");
  TORCH_CHECK_VALUE(0 <= begin_bit && begin_bit < end_bit && end_bit <= 64, "bits [", begin_bit, ", ", end_bit,
                    ") of a key: need 0 <= begin_bit < end_bit <= 64.");
  check_written(keys, "keys", capacity, at::kLong, keys);
  check_written(out_keys, "out_keys", capacity, at::kLong, keys);
  check_written(out_values, "out_values", capacity, at::kInt, keys);
  const at::Tensor values = cuda_ints(values_, "values", {capacity}, keys), count = longs(count_, "count", 1, keys);
  if (capacity == 0) return;
  const c10::cuda::CUDAGuard guard(keys.device());
  size_t room = 0;
  NSMG_CUDA_CHECK(pair_sort_bytes(capacity, int(begin_bit), int(end_bit), &room));
  const at::Tensor temporary = at::empty({int64_t(room)}, keys.options().dtype(at::kByte));
  NSMG_CUDA_CHECK(pair_sort(keys.mutable_data_ptr<int64_t>(), values.const_data_ptr<int32_t>(),
                            count.const_data_ptr<int64_t>(), capacity, int(begin_bit), int(end_bit),
                            out_keys.mutable_data_ptr<int64_t>(), out_values.mutable_data_ptr<int32_t>(),
                            temporary.mutable_data_ptr(), room, c10::cuda::getCurrentCUDAStream()));
}

void publish(const at::Tensor& count_, at::IntArrayRef addresses, int64_t limit) {
  const at::Tensor count = longs(count_, "count", 1, count_);
  const int ranks = checked_ranks(addresses.size());
  CountAddresses places = {};
  for (int rank = 0; rank < ranks; ++rank) places.places[rank] = reinterpret_cast<int64_t*>(addresses[rank]);
  const c10::cuda::CUDAGuard guard(count.device());
  NSMG_CUDA_CHECK(publish_count(count.const_data_ptr<int64_t>(), limit, places, ranks,
                                c10::cuda::getCurrentCUDAStream()));
}

at::Tensor merge(at::IntArrayRef keys_at, at::IntArrayRef values_at, const at::Tensor& counts_, int64_t first,
                 int64_t middle, int64_t end, int64_t rank, const at::Tensor& out_keys, const at::Tensor& out_values) {
  const PairAddresses addresses = pair_addresses(keys_at, values_at);
  const int64_t ranks = int64_t(keys_at.size());
  TORCH_CHECK_VALUE(0 <= first && first < middle && middle < end && end <= ranks && first <= rank && rank < end,
                    "a merge of ranks [", first, ", ", middle, ") and [", middle, ", ", end, ") by rank ", rank, " of ",
                    ranks, ": need 0 <= first < middle < end <= ranks and first <= rank < end.");
  const int capacity = cuda_count(out_keys.size(0), "pairs");
  check_written(out_keys, "out_keys", capacity, at::kLong, out_keys);
  check_written(out_values, "out_values", capacity, at::kInt, out_keys);
  const at::Tensor counts = longs(counts_, "counts", ranks, out_keys);
  const c10::cuda::CUDAGuard guard(out_keys.device());
  const at::Tensor starts = at::empty({merge_tiles(capacity) + 1}, counts.options());
  const at::Tensor result = at::empty({1}, counts.options());
  const MergePlace place = {int(first), int(middle), int(end), int(rank)};
  NSMG_CUDA_CHECK(merge_level(addresses, place, counts.const_data_ptr<int64_t>(), capacity,
                              starts.mutable_data_ptr<int64_t>(), out_keys.mutable_data_ptr<int64_t>(),
                              out_values.mutable_data_ptr<int32_t>(), result.mutable_data_ptr<int64_t>(),
                              c10::cuda::getCurrentCUDAStream()));
  return result;
}

// The tiles of whole views, view after view.
std::vector<PatchTiles> view_tiles(at::IntArrayRef sizes, int64_t tile_size, int64_t* tiles) {
  TORCH_CHECK_VALUE(sizes.size() % 2 == 0, "sizes holds 2 integers a view (width, height), got ", sizes.size(), ".");
  std::vector<int64_t> patches;
  for (size_t view = 0; 2 * view < sizes.size(); ++view)
    for (const int64_t number : {int64_t(view), int64_t(0), int64_t(0), sizes[2 * view], sizes[2 * view + 1]})
      patches.push_back(number);
  const PatchList list(patches, tile_size);
  std::vector<PatchTiles> table;
  for (const Patch& p : list.patches)
    if (p.tiles_x > 0) table.push_back({p.view, p.x0, p.y0, p.x1, p.y1, int32_t(p.first_tile), p.tiles_x});
  *tiles = list.tiles;
  return table;
}

Lists intersect_keys(const at::Tensor& means2d_, const at::Tensor& conics_, const at::Tensor& row_opacities_,
                     const at::Tensor& radii_, const at::Tensor& depths_, const at::Tensor& view_ids_,
                     at::IntArrayRef sizes, int64_t tile_size, int64_t owner, int64_t capacity) {
  TORCH_CHECK_VALUE(owner >= 0 && owner < (int64_t(1) << (32 - kOwnerShift)), "intersect_keys: owner ", owner,
                    " does not fit the values: it must lie in 0..15.");
  TORCH_CHECK_VALUE(capacity >= 0 && capacity < std::numeric_limits<int32_t>::max(),
                    "intersect_keys: capacity must lie in 0..2^31 - 2, got ", capacity);
  const int count = cuda_count(means2d_.size(0), "rows");
  TORCH_CHECK_VALUE(count <= (int64_t(1) << kOwnerShift), "intersect_keys: ", count, " rows; values hold 2^28.");
  int64_t tiles = 0;
  const std::vector<PatchTiles> host = view_tiles(sizes, tile_size, &tiles);
  cuda_count(tiles, "tiles");
  const at::Tensor means2d = aligned_pairs(cuda_floats(means2d_, "means2d", {count, 2}, means2d_)),
                   conics = cuda_floats(conics_, "conics", {count, 3}, means2d_),
                   row_opacities = cuda_floats(row_opacities_, "row_opacities", {count}, means2d_),
                   depths = cuda_floats(depths_, "depths", {count}, means2d_),
                   radii = aligned_pairs(cuda_ints(radii_, "radii", {count, 2}, means2d_)),
                   view_ids = cuda_ints(view_ids_, "view_ids", {count}, means2d_);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::TensorOptions ints = radii.options(), long_ints = ints.dtype(at::kLong), bytes = ints.dtype(at::kByte);
  if (count == 0 || host.empty())
    return {at::full({capacity}, std::numeric_limits<int64_t>::max(), long_ints), at::full({capacity}, -1, ints),
            at::zeros({1}, long_ints)};

  const IntersectRows rows{means2d.const_data_ptr<float>(), conics.const_data_ptr<float>(),
                           row_opacities.const_data_ptr<float>(), depths.const_data_ptr<float>(),
                           radii.const_data_ptr<int32_t>(), view_ids.const_data_ptr<int32_t>(), count};
  const at::Tensor device_table = at::empty({int64_t(host.size() * sizeof(PatchTiles))}, bytes);
  const at::Tensor keys = at::empty({capacity}, long_ints), values = at::empty({capacity}, ints),
                   number = at::empty({1}, long_ints);
  int64_t* total = number.mutable_data_ptr<int64_t>();
  auto* patches_on_device = static_cast<PatchTiles*>(device_table.mutable_data_ptr());
  const PatchTable table{patches_on_device, int(host.size()), int(tile_size)};
  NSMG_CUDA_CHECK(intersect_upload(host.data(), table.count, patches_on_device, total, stream));
  size_t room = 0;
  NSMG_CUDA_CHECK(intersect_order_bytes(count, &room));
  const at::Tensor workspace = at::empty({int64_t(room)}, bytes);
  RowOrder order;
  NSMG_CUDA_CHECK(intersect_order(rows, table, workspace.mutable_data_ptr(), total, &order, stream));
  if (capacity > 0)
    NSMG_CUDA_CHECK(tile_keys(rows, table, order, total, int(capacity), int(owner), keys.mutable_data_ptr<int64_t>(),
                              values.mutable_data_ptr<int32_t>(), stream));
  return {keys, values, number};
}

Lists lists_of_bands(at::IntArrayRef keys_at, at::IntArrayRef values_at, const at::Tensor& counts_,
                     at::IntArrayRef bands, const at::Tensor& where_, int64_t segment, int64_t capacity) {
  const PairAddresses addresses = pair_addresses(keys_at, values_at);
  const int ranks = int(keys_at.size());
  const at::Tensor counts = longs(counts_, "counts", ranks, counts_);
  const at::Tensor where = cuda_ints(where_, "where", {-1, -1}, counts_);
  TORCH_CHECK_VALUE(where.numel() > 0, "where must have a line of at least one row for each owner.");
  TORCH_CHECK_VALUE(bands.size() % 2 == 0, "bands holds 2 integers a band (first tile, end tile), got ", bands.size());
  TORCH_CHECK_VALUE(segment >= 1 && segment * where.size(0) < std::numeric_limits<int32_t>::max(),
                    "segment ", segment, " of ", where.size(0), " owners: lines must lie in 0..2^31 - 2.");
  TORCH_CHECK_VALUE(capacity >= 0 && capacity < std::numeric_limits<int32_t>::max(),
                    "band_lists: capacity must lie in 0..2^31 - 2, got ", capacity);
  std::vector<TileStretch> host;
  int64_t tiles = 0;
  for (size_t k = 0; k < bands.size(); k += 2) {
    TORCH_CHECK_VALUE(0 <= bands[k] && bands[k] <= bands[k + 1] && bands[k + 1] < std::numeric_limits<int32_t>::max(),
                      "band ", k / 2, " has the tiles [", bands[k], ", ", bands[k + 1], ").");
    const int64_t number = bands[k + 1] - bands[k];
    if (number > 0) host.push_back({int32_t(bands[k]), int32_t(number), int32_t(tiles)});
    tiles += number;
    cuda_count(tiles, "tiles");
  }
  const c10::cuda::CUDAGuard guard(counts.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::TensorOptions ints = where.options(), long_ints = counts.options();
  if (host.empty()) return {at::zeros({1}, ints), at::full({capacity}, -1, ints), at::zeros({1}, long_ints)};

  const int64_t number = int64_t(host.size());
  const at::Tensor device_bands = at::empty({number * int64_t(sizeof(TileStretch))}, ints.dtype(at::kByte));
  const at::Tensor places = at::empty({tiles + number}, long_ints), bases = at::empty({number + 1}, long_ints),
                   total = at::empty({1}, long_ints), offsets = at::empty({tiles + 1}, ints),
                   ids = at::empty({capacity}, ints);
  auto* on_device = static_cast<TileStretch*>(device_bands.mutable_data_ptr());
  NSMG_CUDA_CHECK(band_upload(host.data(), int(number), on_device, stream));
  const BandTable table{on_device, int(number), int(tiles)};
  const ReceivedRows received{where.const_data_ptr<int32_t>(), int(where.size(0)), where.size(1), int(segment)};
  NSMG_CUDA_CHECK(band_lists(addresses, ranks, counts.const_data_ptr<int64_t>(), table, received, int(capacity),
                             places.mutable_data_ptr<int64_t>(), bases.mutable_data_ptr<int64_t>(),
                             offsets.mutable_data_ptr<int32_t>(), ids.mutable_data_ptr<int32_t>(),
                             total.mutable_data_ptr<int64_t>(), stream));
  return {offsets, ids, total};
}

}  // namespace merge_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("sort_pairs", &nsmg::merge_bind::sort_pairs);
  m.impl("publish_count", &nsmg::merge_bind::publish);
  m.impl("merge_level", &nsmg::merge_bind::merge);
  m.impl("intersect_keys", &nsmg::merge_bind::intersect_keys);
  m.impl("band_lists", &nsmg::merge_bind::lists_of_bands);
}
