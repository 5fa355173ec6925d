// The lists of splats that overlap each tile, on CUDA: of one GPU, and by a sort over all GPUs of a machine. Addresses
// come as integers: they are memory of this GPU or of its peers.

#include "cpu/common/patches.h"
#include "cuda/bind/call.h"
#include "cuda/intersect/intersect.h"
#include "cuda/intersect/list_windows.h"
#include "cuda/sort/merge.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <array>
#include <limits>

namespace nsmg {
namespace intersect_bind {

constexpr int64_t kMostPairs = std::numeric_limits<int32_t>::max();
constexpr char kRows[] =
    "means2d[M,2]@8 conics[M,3] row_opacities[M] depths[M] radii[M,2]@8 view_ids[M] M";
constexpr char kWindowLists[] = "tile_offsets[T+1] row_ids[I] depths[M] windows[T,2] T M I";

// Rows, and scratch memory for sorting them.
struct Rows {
  IntersectRows rows;

  explicit Rows(Call& call) : rows(call.read<IntersectRows>(kRows)) {}

  // Sends the patches to the device and orders the rows; `total` becomes the number of intersections.
  PatchTable order(Call& call, const std::vector<PatchTiles>& patches, int tile_size, int64_t* total,
                   RowOrder* order) const {
    auto* there = call.scratch_for(patches);
    const PatchTable table{there, int(patches.size()), tile_size};
    call.run(intersect_upload, patches.data(), table.count, there, total);
    size_t num_bytes = 0;
    call.check(intersect_order_bytes(rows.count, &num_bytes));
    call.run(intersect_order, rows, table, call.scratch_bytes(int64_t(num_bytes)), total, order);
    return table;
  }
};

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
at::Tensor list_pairs(Call& call, const IntersectRows& rows, const PatchTable& table, const RowOrder& order,
                      const int64_t* total, int capacity, int tiles, int32_t* tile_offsets) {
  const at::TensorOptions ints = call.options(at::kInt);
  const at::Tensor ids[2] = {at::empty({capacity}, ints), at::empty({capacity}, ints)};
  TileLists<Key> lists;
  for (int k = 0; k < 2; ++k) {
    lists.tiles[k] = call.scratch<Key>(capacity);
    lists.rows[k] = ids[k].mutable_data_ptr<int32_t>();
  }
  size_t num_bytes = 0;
  call.check(intersect_emit_bytes<Key>(capacity, tiles, &num_bytes));
  int current = 0;
  call.run(intersect_emit<Key>, rows, table, order, total, capacity, tiles, lists, &current,
           call.scratch_bytes(int64_t(num_bytes)), num_bytes);
  call.run(intersect_offsets<Key>, lists.tiles[current], total, capacity, tiles, tile_offsets);
  return ids[current];
}

// The offsets, the rows and their number. capacity < 0: exactly as many as there are, which waits for the device.
std::array<at::Tensor, 3> listed(Call& call, int64_t capacity) {
  const int64_t tile_size = call.integer("tile_size");
  const PatchList list(call.integers("patches"), tile_size);
  const int tiles = cuda_count(list.tiles, "tiles");
  const Rows rows(call);
  const at::TensorOptions ints = call.options(at::kInt), longs = call.options(at::kLong);
  const std::vector<PatchTiles> host = tiled_patches(list);
  if (rows.rows.count == 0 || host.empty())
    return {at::zeros({int64_t(tiles) + 1}, ints), at::full({std::max<int64_t>(capacity, 0)}, -1, ints),
            at::zeros({1}, longs)};
  const at::Tensor number = at::empty({1}, longs);
  int64_t* total = number.mutable_data_ptr<int64_t>();
  RowOrder order;
  const PatchTable table = rows.order(call, host, int(tile_size), total, &order);
  if (capacity < 0) {
    capacity = number.item<int64_t>();
    TORCH_CHECK(capacity <= kMostPairs,
                "intersect: over 2^31 - 1 intersections of splats and tiles; render fewer patches at once");
  }
  const at::Tensor tile_offsets = at::empty({int64_t(tiles) + 1}, ints);
  if (capacity == 0) return {tile_offsets.zero_(), at::empty({0}, ints), number};
  // 16 bits hold the ids of the tiles and one above them.
  const auto list_them = tiles <= std::numeric_limits<uint16_t>::max() ? list_pairs<uint16_t> : list_pairs<uint32_t>;
  const at::Tensor row_ids = list_them(call, rows.rows, table, order, total, int(capacity), tiles,
                                       tile_offsets.mutable_data_ptr<int32_t>());
  return {tile_offsets, row_ids, number};
}

void intersect(Call& call) {
  const auto [tile_offsets, row_ids, number] = listed(call, -1);
  call.result(tile_offsets);
  call.result(row_ids);
}

void intersect_capacity(Call& call) {
  const int64_t capacity = call.integer("capacity");
  TORCH_CHECK_VALUE(capacity >= 0 && capacity <= kMostPairs,
                    "intersect_capacity: capacity must lie in 0..2^31 - 1, got ", capacity);
  for (const at::Tensor& found : listed(call, capacity)) call.result(found);
}

void clip_lists(Call& call) {
  call.set('T', call.tensor("windows").size(0));
  const auto lists = call.read<WindowLists>(kWindowLists);
  const int64_t tiles = lists.tiles;
  int32_t* found = call.out<int32_t>({tiles + 1});
  int32_t* clipped = call.out<int32_t>({lists.capacity});
  int32_t* firsts = call.scratch<int32_t>(2 * (tiles + 1));
  size_t bytes = 0;
  call.check(clip_bytes(lists.tiles, &bytes));
  call.run(clip_launch, lists, firsts, firsts + tiles + 1, call.scratch_bytes(int64_t(bytes)), bytes, found, clipped);
}

// ---- the sort over GPUs ----

PairAddresses pair_addresses(Call& call, int* ranks) {
  const at::IntArrayRef keys_at = call.integers("keys_at"), values_at = call.integers("values_at");
  *ranks = int(keys_at.size());
  TORCH_INTERNAL_ASSERT(*ranks <= kMostRanks && values_at.size() == keys_at.size());
  PairAddresses addresses = {};
  for (int rank = 0; rank < *ranks; ++rank) {
    addresses.keys[rank] = reinterpret_cast<const int64_t*>(keys_at[rank]);
    addresses.values[rank] = reinterpret_cast<const int32_t*>(values_at[rank]);
  }
  return addresses;
}

void sort_pairs(Call& call) {
  auto* keys = call.read<int64_t*>("keys[P]");
  const auto* values = call.read<const int32_t*>("values[P]");
  const auto* count = call.read<const int64_t*>("count[1]");
  auto* out_keys = call.read<int64_t*>("out_keys[P]");
  auto* out_values = call.read<int32_t*>("out_values[P]");
  const int capacity = call.read<int>("P"), begin = call.read<int>("begin_bit"), end = call.read<int>("end_bit");
  if (capacity == 0) return;
  size_t num_bytes = 0;
  call.check(pair_sort_bytes(capacity, begin, end, &num_bytes));
  call.run(pair_sort, keys, values, count, capacity, begin, end, out_keys, out_values,
           call.scratch_bytes(int64_t(num_bytes)), num_bytes);
}

void publish_count(Call& call) {
  const int64_t* count = call.read<const int64_t*>("count[1]");
  const at::IntArrayRef addresses = call.integers("addresses");
  const int ranks = int(addresses.size());
  TORCH_INTERNAL_ASSERT(ranks <= kMostRanks);
  CountAddresses places = {};
  for (int rank = 0; rank < ranks; ++rank) places.places[rank] = reinterpret_cast<int64_t*>(addresses[rank]);
  call.run(nsmg::publish_count, count, call.integer("limit"), places, ranks);
}

void merge_level(Call& call) {
  int ranks = 0;
  const PairAddresses addresses = pair_addresses(call, &ranks);
  const int64_t* counts = call.in<int64_t>("counts", {ranks});
  const auto place = call.read<MergePlace>("first middle end rank");
  auto* out_keys = call.read<int64_t*>("out_keys[P]");
  auto* out_values = call.read<int32_t*>("out_values[P]");
  const int capacity = call.read<int>("P");
  int64_t* starts = call.scratch<int64_t>(merge_tiles(capacity) + 1);
  call.run(nsmg::merge_level, addresses, place, counts, capacity, starts, out_keys, out_values, call.out<int64_t>({1}));
}

// The tiles of whole views, view after view.
std::vector<PatchTiles> view_tiles(at::IntArrayRef sizes, int64_t tile_size) {
  std::vector<int64_t> patches;
  for (size_t view = 0; 2 * view < sizes.size(); ++view)
    for (const int64_t number : {int64_t(view), int64_t(0), int64_t(0), sizes[2 * view], sizes[2 * view + 1]})
      patches.push_back(number);
  const PatchList list(patches, tile_size);
  cuda_count(list.tiles, "tiles");
  return tiled_patches(list);
}

void intersect_keys(Call& call) {
  const int64_t owner = call.integer("owner"), capacity = call.integer("capacity");
  const int64_t tile_size = call.integer("tile_size");
  const std::vector<PatchTiles> host = view_tiles(call.integers("sizes"), tile_size);
  const Rows rows(call);
  if (rows.rows.count == 0 || host.empty()) {
    call.result(at::full({capacity}, std::numeric_limits<int64_t>::max(), call.options(at::kLong)));
    call.result(at::full({capacity}, -1, call.options(at::kInt)));
    call.result(at::zeros({1}, call.options(at::kLong)));
    return;
  }
  int64_t* keys = call.out<int64_t>({capacity});
  int32_t* values = call.out<int32_t>({capacity});
  int64_t* total = call.out<int64_t>({1});
  RowOrder order;
  const PatchTable table = rows.order(call, host, int(tile_size), total, &order);
  if (capacity > 0)
    call.run(tile_keys, rows.rows, table, order, total, int(capacity), int(owner), keys, values);
}

// The stretches of tiles that have any; `tiles` becomes their number.
std::vector<TileStretch> tile_stretches(at::IntArrayRef bands, int64_t* tiles) {
  std::vector<TileStretch> host;
  for (size_t k = 0; k < bands.size(); k += 2) {
    const int64_t number = bands[k + 1] - bands[k];
    if (number > 0) host.push_back({int32_t(bands[k]), int32_t(number), int32_t(*tiles)});
    *tiles += number;
    cuda_count(*tiles, "tiles");
  }
  return host;
}

void band_lists(Call& call) {
  int ranks = 0;
  const PairAddresses addresses = pair_addresses(call, &ranks);
  const int64_t* counts = call.in<int64_t>("counts", {ranks});
  const at::Tensor where = call.checked("where", {-1, -1}, at::kInt);
  const int64_t segment = call.integer("segment"), capacity = call.integer("capacity");
  int64_t tiles = 0;
  const std::vector<TileStretch> host = tile_stretches(call.integers("bands"), &tiles);
  if (host.empty()) {
    call.result(at::zeros({1}, call.options(at::kInt)));
    call.result(at::full({capacity}, -1, call.options(at::kInt)));
    call.result(at::zeros({1}, call.options(at::kLong)));
    return;
  }
  const int64_t number = int64_t(host.size());
  auto* there = call.scratch_for(host);
  int64_t* places = call.scratch<int64_t>(tiles + number);
  int64_t* bases = call.scratch<int64_t>(number + 1);
  int32_t* offsets = call.out<int32_t>({tiles + 1});
  int32_t* ids = call.out<int32_t>({capacity});
  int64_t* total = call.out<int64_t>({1});
  call.run(band_upload, host.data(), int(number), there);
  const BandTable table{there, int(number), int(tiles)};
  const ReceivedRows received{where.const_data_ptr<int32_t>(), int(where.size(0)), where.size(1), int(segment)};
  call.run(nsmg::band_lists, addresses, ranks, counts, table, received, int(capacity), places, bases, offsets, ids,
           total);
}

}  // namespace intersect_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  using namespace nsmg::intersect_bind;
  using nsmg::bound;
  m.impl("intersect", bound<intersect>());
  m.impl("intersect_capacity", bound<intersect_capacity>());
  m.impl("clip_lists", bound<clip_lists>());
  m.impl("sort_pairs", bound<sort_pairs>());
  m.impl("publish_count", bound<publish_count>());
  m.impl("merge_level", bound<merge_level>());
  m.impl("intersect_keys", bound<intersect_keys>());
  m.impl("band_lists", bound<band_lists>());
}
