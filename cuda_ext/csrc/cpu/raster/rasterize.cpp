// CPU twin of `rasterize`: front-to-back compositing of a list of patches, tile by tile.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cpu/raster/splat.h"

namespace nsmg::rasterize_cpu {
namespace {

template <typename T, int kChannels>
class TileRenderer {
  static constexpr int kWidth = Lanes<T>::kWidth;
  using V = Vec<T>;
  using Ids = typename Lanes<T>::Ids;
  using Id = typename Lanes<T>::Id;

 public:
  TileRenderer(const SplatTable<T>& table, int tile_size, bool mark_stops)
      : table_(table), grid_(tile_size), dynamic_channels_(int(table.channels)), mark_stops_(mark_stops),
        transmittance_(size_t(tile_size) * grid_.blocks), last_(transmittance_.size()),
        sums_(transmittance_.size() * channels()) {}

  void render(const Tile& tile, int64_t first, int64_t end, T* out, T* alpha, int32_t* last) {
    open(tile);
    TileOverlaps<T> overlaps;
    int row_begin = 0, row_end = tile.y1 - tile.y0;  // rows that still have an open pixel
    for (int64_t start = first; start < end; start += kBatch) {
      while (row_begin < row_end && !row_open(row_begin)) ++row_begin;
      while (row_begin < row_end && !row_open(row_end - 1)) --row_end;
      if (row_begin == row_end) break;
      const int count = int(std::min<int64_t>(kBatch, end - start));
      overlaps.find(table_, table_.row_ids + start, count, tile);
      for (int i = 0; i < count; ++i)
        for (int k = overlaps.block_first[i]; k < overlaps.block_last[i]; ++k)
          blend(tile, table_.row_ids[start + i], Id(start + i), k, std::max(overlaps.row_first[i], row_begin),
                std::min(overlaps.row_last[i], row_end));
    }
    write(tile, out, alpha, last);
  }

 private:
  int channels() const { return kChannels > 0 ? kChannels : dynamic_channels_; }

  // A closed pixel is kept as a negative transmittance: whatever follows then fails the test of `blend` by itself.
  void open(const Tile& tile) {
    grid_.place(tile);
    const int rows = tile.y1 - tile.y0, columns = tile.x1 - tile.x0;
    for (int k = 0; k < grid_.blocks; ++k)
      for (int lane = 0; lane < kWidth; ++lane) transmittance_[k][lane] = k * kWidth + lane < columns ? T(1) : T(-1);
    for (int block = 0; block < rows * grid_.blocks; ++block) {
      if (block >= grid_.blocks) transmittance_[block] = transmittance_[block - grid_.blocks];
      last_[block] = Ids{} - Id(1);
      for (int d = 0; d < channels(); ++d) sums_[block * channels() + d] = V{};
    }
  }

  bool row_open(int row) const {
    for (int k = 0; k < grid_.blocks; ++k)
      for (int lane = 0; lane < kWidth; ++lane)
        if (transmittance_[row * grid_.blocks + k][lane] > T(0)) return true;
    return false;
  }

  // Blends one splat into rows [row, row_end) of block k.
  inline void blend(const Tile& tile, int64_t splat_row, Id position, int k, int row, int row_end) {
    const TableSplat<T> splat = table_.splats[splat_row];
    const T* feature = kChannels > 0 ? splat.features : table_.features + splat_row * channels();
    const V dx = splat.ellipse.mean_x - grid_.x[k];
    const int pitch = grid_.blocks;
    V* __restrict__ transmittance = transmittance_.data() + k;
    V* __restrict__ sums = sums_.data() + k * channels();
    Ids* __restrict__ last = last_.data() + k;
    for (; row < row_end; ++row) {
      const V raw = raw_alpha(splat, dx, splat.ellipse.mean_y - (T(tile.y0 + row) + T(0.5)));
      const V alpha = raw < kAlphaMax<T> ? raw : V{} + kAlphaMax<T>;
      const V before = transmittance[row * pitch];
      const V after = before - before * alpha;
      const V weight = after > kTransmittanceMin<T> ? before * alpha : V{};
      transmittance[row * pitch] = after > kTransmittanceMin<T> ? after : minus_absolute<T>(before);
      const Ids reached = weight > T(0) ? Ids{} + position : Ids{} - Id(1);
      last[row * pitch] = reached > last[row * pitch] ? reached : last[row * pitch];
      V* sum = sums + row * pitch * channels();
      for (int d = 0; d < channels(); ++d) sum[d] += weight * feature[d];
    }
  }

  void write(const Tile& tile, T* out, T* alpha, int32_t* last) const {
    for (int row = 0; row < tile.y1 - tile.y0; ++row)
      for (int column = 0; column < tile.x1 - tile.x0; ++column) {
        const int64_t pixel = tile.pixel + row * tile.pitch + column;
        const int block = row * grid_.blocks + column / kWidth, lane = column % kWidth;
        for (int d = 0; d < channels(); ++d) out[pixel * channels() + d] = sums_[block * channels() + d][lane];
        const T covered = T(1) - std::abs(transmittance_[block][lane]);
        alpha[pixel] = mark_stops_ && transmittance_[block][lane] < T(0) ? -covered : covered;
        last[pixel] = static_cast<int32_t>(last_[block][lane]);
      }
  }

  const SplatTable<T>& table_;
  TileGrid<T> grid_;
  const int dynamic_channels_;
  const bool mark_stops_;
  std::vector<V> transmittance_;  // [row, block]
  std::vector<Ids> last_;         // [row, block]
  std::vector<V> sums_;           // [row, block, channel]
};

template <typename T, int kChannels>
void render_all(const SplatTable<T>& table, const PatchList& list, bool mark_stops, T* out, T* alpha, int32_t* last) {
  const std::vector<Tile> tiles = list.cut();
  for_each_task(list.tiles, [&] {
    return [&, renderer = TileRenderer<T, kChannels>(table, list.tile_size, mark_stops)](int64_t t) mutable {
      renderer.render(tiles[t], table.tile_offsets[t], table.tile_offsets[t + 1], out, alpha, last);
    };
  });
}

using Rendered = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // out, alpha, last, state

template <typename T>
Rendered rasterize_as(const SplatTable<T>& table, const PatchList& list, bool mark_stops,
                      const at::TensorOptions& options) {
  at::Tensor out = at::empty({list.pixels, table.channels}, options);
  at::Tensor alpha = at::empty({list.pixels}, options);
  at::Tensor last = at::empty({list.pixels}, options.dtype(at::kInt));
  at::Tensor state = at::empty({0}, options.dtype(at::kFloat));  // the backward pass here needs nothing more
  T* out_ptr = out.mutable_data_ptr<T>();
  T* alpha_ptr = alpha.mutable_data_ptr<T>();
  int32_t* last_ptr = last.mutable_data_ptr<int32_t>();
  if constexpr (std::is_same_v<T, float>) {
    if (table.channels == 3) {
      render_all<T, 3>(table, list, mark_stops, out_ptr, alpha_ptr, last_ptr);
      return {out, alpha, last, state};
    }
    if (table.channels == 4) {
      render_all<T, 4>(table, list, mark_stops, out_ptr, alpha_ptr, last_ptr);
      return {out, alpha, last, state};
    }
  }
  render_all<T, 0>(table, list, mark_stops, out_ptr, alpha_ptr, last_ptr);
  return {out, alpha, last, state};
}

Rendered rasterize(const at::Tensor& means2d_, const at::Tensor& conics_, const at::Tensor& row_opacities_,
                   const at::Tensor& features_, const at::Tensor& tile_offsets_, const at::Tensor& row_ids_,
                   at::IntArrayRef patches, int64_t tile_size,
                   const std::optional<at::Tensor>& /* absgrad_probe: for autograd alone */, bool mark_stops) {
  const PatchList list(patches, tile_size);
  const at::Tensor means2d = means2d_.contiguous(), conics = conics_.contiguous(),
                   row_opacities = row_opacities_.contiguous(), features = features_.contiguous(),
                   tile_offsets = tile_offsets_.contiguous(), row_ids = row_ids_.contiguous();
  if (means2d.scalar_type() == at::kDouble)
    return rasterize_as(SplatTable<double>(means2d, conics, row_opacities, features, tile_offsets, row_ids, list),
                        list, mark_stops, means2d.options());
  TORCH_CHECK(means2d.scalar_type() == at::kFloat, "rasterize: float32 or float64, got ", means2d.scalar_type());
  return rasterize_as(SplatTable<float>(means2d, conics, row_opacities, features, tile_offsets, row_ids, list), list,
                      mark_stops, means2d.options());
}

}  // namespace
}  // namespace nsmg::rasterize_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) { m.impl("rasterize", &nsmg::rasterize_cpu::rasterize); }
