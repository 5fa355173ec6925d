// CPU twin of `intersect`: the rows that overlap each tile, by depth.
//
// The rows of a view are sorted by depth once (a stable radix sort, so equal depths keep the order of the rows) and then
// distributed to the tiles in that order: every tile's list comes out sorted, and no intersection is ever compared with
// another. Threads distribute consecutive pieces of that order to places counted beforehand, so their number leaves the
// result alone.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/ellipse.h"
#include "cpu/common/patches.h"

namespace nsmg::intersect_cpu {
namespace {

// The bits of a float as an unsigned number of the same order.
template <typename T>
inline auto ordered_bits(T value) {
  using Bits = std::conditional_t<std::is_same_v<T, float>, uint32_t, uint64_t>;
  Bits bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const Bits sign = Bits(1) << (8 * sizeof(Bits) - 1);
  return Bits(bits & sign ? ~bits : bits | sign);
}

// Row ids sorted by key; stable. Digits that all keys share cost one scan.
template <typename Key>
void radix_sort(std::vector<Key>& keys, std::vector<int32_t>& rows) {
  constexpr int kBits = 11, kBuckets = 1 << kBits;
  std::vector<Key> other_keys(keys.size());
  std::vector<int32_t> other_rows(rows.size());
  for (int shift = 0; shift < int(8 * sizeof(Key)); shift += kBits) {
    std::vector<int64_t> start(kBuckets + 1, 0);
    for (const Key key : keys) ++start[((key >> shift) & (kBuckets - 1)) + 1];
    if (std::any_of(start.begin(), start.end(), [&](int64_t n) { return n == int64_t(keys.size()); })) continue;
    for (int bucket = 0; bucket < kBuckets; ++bucket) start[bucket + 1] += start[bucket];
    for (size_t i = 0; i < keys.size(); ++i) {
      const int64_t place = start[(keys[i] >> shift) & (kBuckets - 1)]++;
      other_keys[place] = keys[i];
      other_rows[place] = rows[i];
    }
    keys.swap(other_keys);
    rows.swap(other_rows);
  }
}

template <typename T>
struct Rows {
  const T *mean, *conic, *opacity, *depth;
  const int32_t *radius, *view;
  int64_t count;

  // The view's rows that overlap its image, nearest first.
  std::vector<int32_t> by_depth(int view_id) const {
    std::vector<int32_t> rows;
    std::vector<decltype(ordered_bits(T()))> keys;
    // Rows that came from several ranks are not in the order of their views.
    for (int64_t r = 0; r < count; ++r)
      if (view[r] == view_id && radius[2 * r] > 0 && radius[2 * r + 1] > 0) {
        rows.push_back(int32_t(r));
        keys.push_back(ordered_bits(depth[r]));
      }
    radix_sort(keys, rows);
    return rows;
  }
};

// Calls emit(tile) for every tile of the patch that the row's ellipse, within its box, may overlap.
template <typename T, typename Emit>
inline void visit_tiles(const Rows<T>& rows, const Ellipse<T>& e, int64_t row, const Patch& patch, int tile_size,
                        const Emit& emit) {
  const T radius_x = T(rows.radius[2 * row]), radius_y = T(rows.radius[2 * row + 1]);
  const TileRange columns = tile_columns(e, radius_x, patch, tile_size);
  for (int column = columns.first; column < columns.last; ++column) {
    const TileRange lines = tiles_of_column(e, radius_y, patch, column, tile_size);
    for (int line = lines.first; line < lines.last; ++line) emit(line * patch.tiles_x + column);
  }
}

// One patch: its tiles' lists, one after the other, in depth order.
template <typename T>
void fill_patch(const Rows<T>& rows, const std::vector<int32_t>& order, const Patch& patch, int tile_size,
                int32_t* tile_counts, std::vector<int32_t>& row_ids) {
  const int64_t tiles = int64_t(patch.tiles_x) * patch.tiles_y;
  const int64_t chunks = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), int64_t(order.size()) / 1024));
  std::vector<std::vector<std::pair<int32_t, int32_t>>> hits(chunks);  // (tile, row)
  std::vector<std::vector<int32_t>> counts(chunks, std::vector<int32_t>(tiles, 0));
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t first = order.size() * piece / chunks, last = order.size() * (piece + 1) / chunks;
      hits[piece].reserve(2 * (last - first));
      for (int64_t k = first; k < last; ++k) {
        const int32_t row = order[k];
        const Ellipse<T> e = make_ellipse(rows.mean[2 * row], rows.mean[2 * row + 1], rows.conic[3 * row],
                                          rows.conic[3 * row + 1], rows.conic[3 * row + 2], rows.opacity[row]);
        visit_tiles(rows, e, row, patch, tile_size, [&](int32_t tile) {
          hits[piece].emplace_back(tile, row);
          ++counts[piece][tile];
        });
      }
    }
  });
  int64_t place = row_ids.size();
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t before = place;
    for (int64_t piece = 0; piece < chunks; ++piece) {
      const int32_t n = counts[piece][tile];
      counts[piece][tile] = int32_t(place);  // from here on: where the piece's next hit of this tile goes
      place += n;
      TORCH_CHECK(place <= std::numeric_limits<int32_t>::max(),
                  "intersect: over 2^31 - 1 intersections of splats and tiles; render fewer patches at once");
    }
    tile_counts[tile] = int32_t(place - before);
  }
  row_ids.resize(place);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece)
      for (const auto& [tile, row] : hits[piece]) row_ids[counts[piece][tile]++] = row;
  });
}

template <typename T>
std::tuple<at::Tensor, at::Tensor> intersect_as(const Rows<T>& rows, const PatchList& list,
                                                const at::TensorOptions& options) {
  at::Tensor tile_offsets = at::empty({list.tiles + 1}, options.dtype(at::kInt));
  int32_t* offsets = tile_offsets.mutable_data_ptr<int32_t>();
  offsets[0] = 0;
  std::vector<int32_t> row_ids, order;
  int ordered_view = -1;
  for (const Patch& patch : list.patches) {
    if (patch.tiles_x == 0) continue;
    if (patch.view != ordered_view) order = rows.by_depth(ordered_view = patch.view);
    fill_patch(rows, order, patch, list.tile_size, offsets + 1 + patch.first_tile, row_ids);
  }
  for (int64_t tile = 0; tile < list.tiles; ++tile) offsets[tile + 1] += offsets[tile];
  at::Tensor ids = at::empty({int64_t(row_ids.size())}, options.dtype(at::kInt));
  std::copy(row_ids.begin(), row_ids.end(), ids.mutable_data_ptr<int32_t>());
  return {tile_offsets, ids};
}

std::tuple<at::Tensor, at::Tensor> intersect(const at::Tensor& means2d_, const at::Tensor& conics_,
                                             const at::Tensor& row_opacities_, const at::Tensor& radii_,
                                             const at::Tensor& depths_, const at::Tensor& view_ids_,
                                             at::IntArrayRef patches, int64_t tile_size) {
  const PatchList list(patches, tile_size);
  const at::Tensor means2d = means2d_.contiguous(), conics = conics_.contiguous(),
                   row_opacities = row_opacities_.contiguous(), radii = radii_.contiguous(),
                   depths = depths_.contiguous(), view_ids = view_ids_.contiguous();
  const int64_t m = means2d.size(0);
  TORCH_CHECK(means2d.sizes() == at::IntArrayRef({m, 2}) && conics.sizes() == at::IntArrayRef({m, 3}) &&
                  radii.sizes() == at::IntArrayRef({m, 2}) && row_opacities.sizes() == at::IntArrayRef({m}) &&
                  depths.sizes() == at::IntArrayRef({m}) && view_ids.sizes() == at::IntArrayRef({m}),
              "intersect: need means2d [M,2], conics [M,3], row_opacities [M], radii [M,2], depths [M], view_ids [M]");
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const Rows<T> rows{means2d.const_data_ptr<T>(), conics.const_data_ptr<T>(), row_opacities.const_data_ptr<T>(),
                       depths.const_data_ptr<T>(), radii.const_data_ptr<int32_t>(),
                       view_ids.const_data_ptr<int32_t>(), m};
    return intersect_as(rows, list, means2d.options());
  };
  if (means2d.scalar_type() == at::kDouble) return run(double{});
  TORCH_CHECK(means2d.scalar_type() == at::kFloat, "intersect: float32 or float64, got ", means2d.scalar_type());
  return run(float{});
}

// The same with a capacity of `capacity` intersections. Lists with more are truncated.
std::tuple<at::Tensor, at::Tensor, at::Tensor> intersect_capacity(
    const at::Tensor& means2d, const at::Tensor& conics, const at::Tensor& row_opacities, const at::Tensor& radii,
    const at::Tensor& depths, const at::Tensor& view_ids, at::IntArrayRef patches, int64_t tile_size,
    int64_t capacity) {
  TORCH_CHECK_VALUE(capacity >= 0 && capacity <= std::numeric_limits<int32_t>::max(),
                    "intersect_capacity: capacity must lie in 0..2^31 - 1, got ", capacity);
  const auto [tile_offsets, listed] =
      intersect(means2d, conics, row_opacities, radii, depths, view_ids, patches, tile_size);
  at::Tensor row_ids = at::full({capacity}, -1, listed.options());
  const int64_t kept = std::min(capacity, listed.size(0));
  std::copy_n(listed.const_data_ptr<int32_t>(), kept, row_ids.mutable_data_ptr<int32_t>());
  return {tile_offsets.clamp_max(capacity), row_ids,
          at::full({1}, listed.size(0), listed.options().dtype(at::kLong))};
}

}  // namespace
}  // namespace nsmg::intersect_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("intersect", &nsmg::intersect_cpu::intersect);
  m.impl("intersect_capacity", &nsmg::intersect_cpu::intersect_capacity);
}
