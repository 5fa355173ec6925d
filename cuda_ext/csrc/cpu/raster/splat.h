// A splat's numbers for compositing, packed so that one fetch loads them all, and the alpha that forward and
// backward share.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/alpha.h"
#include "common/ellipse.h"
#include "cpu/common/patches.h"
#include "cpu/common/simd.h"

namespace nsmg {

// As many channels as fit into one splat's 64 bytes; of more, only the first ones are kept here.
constexpr int kPackedChannels = 4;

template <typename T>
struct alignas(16 * sizeof(T)) TableSplat {
  T half_a, half_c, opacity;
  T features[kPackedChannels];
  Ellipse<T> ellipse;
};

// Ellipses handled so many at a time, a component an array, in loops that become vector code.
constexpr int kBatch = 32;

template <typename T>
struct EllipseBatch {
  T mean_x[kBatch], mean_y[kBatch], b[kBatch], inv_c[kBatch], c_q[kBatch], det[kBatch], peak_x[kBatch],
      extent_x[kBatch], slack[kBatch];
  void set(int i, const Ellipse<T>& e) {
    mean_x[i] = e.mean_x, mean_y[i] = e.mean_y, b[i] = e.b, inv_c[i] = e.inv_c, c_q[i] = e.c_q, det[i] = e.det;
    peak_x[i] = e.peak_x, extent_x[i] = e.extent_x, slack[i] = e.slack;
  }
  Ellipse<T> get(int i) const {
    return {mean_x[i], mean_y[i], b[i], inv_c[i], c_q[i], det[i], peak_x[i], extent_x[i], slack[i]};
  }
};

// The inputs of `rasterize`, checked.
template <typename T>
struct SplatTable {
  std::unique_ptr<TableSplat<T>[]> splats;
  const T* features;
  const int32_t* tile_offsets;
  const int32_t* row_ids;
  int64_t rows, channels, intersections;

  SplatTable(const at::Tensor& means2d, const at::Tensor& conics, const at::Tensor& row_opacities,
             const at::Tensor& features_, const at::Tensor& tile_offsets_, const at::Tensor& row_ids_,
             const PatchList& list)
      : rows(means2d.size(0)), channels(features_.size(1)), intersections(row_ids_.size(0)) {
    TORCH_CHECK(means2d.sizes() == at::IntArrayRef({rows, 2}) && conics.sizes() == at::IntArrayRef({rows, 3}) &&
                    row_opacities.sizes() == at::IntArrayRef({rows}) && features_.size(0) == rows && channels >= 1,
                "rasterize: need means2d [M,2], conics [M,3], row_opacities [M], features [M,D], got ",
                means2d.sizes(), ", ", conics.sizes(), ", ", row_opacities.sizes(), ", ", features_.sizes());
    TORCH_CHECK(tile_offsets_.dim() == 1 && tile_offsets_.size(0) == list.tiles + 1, "rasterize: the patches have ",
                list.tiles, " tiles, so tile_offsets must hold one number more, got ", tile_offsets_.sizes(),
                "; were patches or tile_size others in intersect?");
    features = features_.const_data_ptr<T>();
    tile_offsets = tile_offsets_.const_data_ptr<int32_t>();
    row_ids = row_ids_.const_data_ptr<int32_t>();
    const int64_t used = tile_offsets[list.tiles];  // row_ids may hold padding behind these
    bool runs = tile_offsets[0] >= 0 && used <= intersections, known = true;
    for (int64_t t = 0; t < list.tiles; ++t) runs &= tile_offsets[t] <= tile_offsets[t + 1];
    for (int64_t i = tile_offsets[0]; runs && i < used; ++i) known &= (row_ids[i] >= 0) & (row_ids[i] < rows);
    TORCH_CHECK(runs && known, "rasterize: tile_offsets must ascend, from 0 or more to at most the ",
                intersections, " intersections of row_ids, and these must name one of the ", rows, " rows, as intersect returns them");
    splats.reset(new TableSplat<T>[rows]);
    const int64_t batches = (rows + kBatch - 1) / kBatch;
    at::parallel_for(0, batches, 64, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k)
        fill(k * kBatch, means2d.const_data_ptr<T>(), conics.const_data_ptr<T>(), row_opacities.const_data_ptr<T>());
    });
  }

 private:
  void fill(int64_t first, const T* mean, const T* conic, const T* opacity) {
    const int count = int(std::min<int64_t>(kBatch, rows - first));
    T mean_x[kBatch], mean_y[kBatch], a[kBatch], b[kBatch], c[kBatch], o[kBatch];
    for (int i = 0; i < kBatch; ++i) {
      const int64_t r = first + std::min(i, count - 1);
      mean_x[i] = mean[2 * r], mean_y[i] = mean[2 * r + 1], o[i] = opacity[r];
      a[i] = conic[3 * r], b[i] = conic[3 * r + 1], c[i] = conic[3 * r + 2];
    }
    EllipseBatch<T> batch;
    for (int i = 0; i < kBatch; ++i) batch.set(i, make_ellipse(mean_x[i], mean_y[i], a[i], b[i], c[i], o[i]));
    const int64_t packed = std::min<int64_t>(channels, kPackedChannels);
    for (int i = 0; i < count; ++i) {
      TableSplat<T>& splat = splats[first + i];
      splat = {a[i] * T(0.5), c[i] * T(0.5), o[i], {}, batch.get(i)};
      std::copy_n(features + (first + i) * channels, packed, splat.features);
    }
  }
};

// The pixels of a tile as rows of whole vectors: lane l of block k is the pixel x0 + k * width + l. Lanes beyond the
// tile's right edge are computed and never counted.
template <typename T>
struct TileGrid {
  static constexpr int kWidth = Lanes<T>::kWidth;
  int blocks;             // vectors a row
  std::vector<Vec<T>> x;  // pixel centres of each block
  explicit TileGrid(int tile_size) : blocks((tile_size + kWidth - 1) / kWidth), x(blocks) {}
  void place(const Tile& tile) {
    for (int k = 0; k < blocks; ++k)
      for (int lane = 0; lane < kWidth; ++lane) x[k][lane] = T(tile.x0 + k * kWidth + lane) + T(0.5);
  }
};

// The rows and blocks of a tile that each splat of a batch may overlap, found ahead of the compositing: its loops then
// know their bounds early, and the processor need not guess them.
template <typename T>
struct TileOverlaps {
  int32_t row_first[kBatch], row_last[kBatch], block_first[kBatch], block_last[kBatch];

  // Of the splats ids[0..count).
  void find(const SplatTable<T>& table, const int32_t* ids, int count, const Tile& tile) {
    EllipseBatch<T> batch;
    for (int i = 0; i < kBatch; ++i) batch.set(i, table.splats[ids[std::min(i, count - 1)]].ellipse);
    const T x_lo = T(tile.x0) + T(0.5), x_hi = T(tile.x1) - T(0.5), x_origin = T(tile.x0), y_origin = T(tile.y0);
    const int width = tile.x1 - tile.x0, height = tile.y1 - tile.y0;
    for (int i = 0; i < kBatch; ++i) {
      const Ellipse<T> e = batch.get(i);
      covered_steps(e.y_span(x_lo, x_hi), y_origin, height, row_first[i], row_last[i]);
      int first, last;
      const T half_width = e.extent_x + e.slack;
      covered_steps(Span<T>{e.mean_x - half_width, e.mean_x + half_width}, x_origin, width, first, last);
      block_first[i] = first / Lanes<T>::kWidth;
      block_last[i] = last > first ? (last - 1) / Lanes<T>::kWidth + 1 : block_first[i];
    }
  }
};

// opacity * exp(-sigma) at pixels dx, dy from the mean; zero where the rule skips the splat (sigma < 0, or below 1/255).
// Not capped yet.
template <typename T>
inline Vec<T> raw_alpha(const TableSplat<T>& s, Vec<T> dx, T dy) {
  const Vec<T> sigma = (s.half_a * dx + s.ellipse.b * dy) * dx + s.half_c * dy * dy;
  const Vec<T> raw = s.opacity * exp_minus(sigma);
  return raw >= kAlphaMin<T> ? raw : Vec<T>{};
}

}  // namespace nsmg
