// What the compositing needs of a splat, packed so that one fetch brings all of it, and the alpha that forward and
// backward share.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "../common/alpha.h"
#include "../common/ellipse.h"
#include "patches.h"
#include "simd.h"

namespace ns_multigpu {

template <typename T>
struct alignas(16 * sizeof(T)) Splat {
  T half_a, b, half_c, opacity;
  Ellipse<T> ellipse;
};

// The inputs of `rasterize`, checked.
template <typename T>
struct SplatTable {
  std::vector<Splat<T>> splats;
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
    const T* mean = means2d.const_data_ptr<T>();
    const T* conic = conics.const_data_ptr<T>();
    const T* opacity = row_opacities.const_data_ptr<T>();
    features = features_.const_data_ptr<T>();
    tile_offsets = tile_offsets_.const_data_ptr<int32_t>();
    row_ids = row_ids_.const_data_ptr<int32_t>();
    TORCH_CHECK(tile_offsets[0] == 0 && tile_offsets[list.tiles] == intersections,
                "rasterize: tile_offsets must run from 0 to the ", intersections, " intersections of row_ids");
    splats.resize(rows);
    at::parallel_for(0, rows, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T a = conic[3 * r], b = conic[3 * r + 1], c = conic[3 * r + 2];
        splats[r] = {a * T(0.5), b, c * T(0.5), opacity[r],
                     make_ellipse(mean[2 * r], mean[2 * r + 1], a, b, c, opacity[r])};
      }
    });
  }
};

// The pixels of a tile as rows of whole vectors: lane l of block k is the pixel x0 + k * width + l. Lanes beyond the
// tile's right edge are computed and never counted.
template <typename T>
struct TileGrid {
  static constexpr int kWidth = Lanes<T>::kWidth;
  int blocks, pitch;       // vectors a row, pixels a row
  std::vector<Vec<T>> x;   // pixel centres of each block
  explicit TileGrid(int tile_size) : blocks((tile_size + kWidth - 1) / kWidth), pitch(blocks * kWidth), x(blocks) {}
  void place(const Tile& tile) {
    for (int k = 0; k < blocks; ++k)
      for (int lane = 0; lane < kWidth; ++lane) x[k][lane] = T(tile.x0 + k * kWidth + lane) + T(0.5);
  }
};

// The part of a tile that a splat may reach.
struct Reach {
  int row_first, row_last, block_first, block_last;
};

template <typename T>
inline Reach reach_in_tile(const Ellipse<T>& e, const Tile& tile) {
  Reach reach{};
  covered_steps(e.y_span(T(tile.x0) + T(0.5), T(tile.x1) - T(0.5)), T(tile.y0), tile.y1 - tile.y0, reach.row_first,
                reach.row_last);
  int first, last;
  const T width = e.extent_x + e.slack;
  covered_steps(Span<T>{e.mean_x - width, e.mean_x + width}, T(tile.x0), tile.x1 - tile.x0, first, last);
  reach.block_first = first / Lanes<T>::kWidth;
  reach.block_last = last > first ? (last - 1) / Lanes<T>::kWidth + 1 : reach.block_first;
  return reach;
}

// One row of one splat: sigma = half_a dx^2 + (b dy) dx + half_c dy^2.
template <typename T>
struct SplatRow {
  T half_a, b_dy, half_c_dy2, opacity;
  SplatRow(const Splat<T>& s, T dy)
      : half_a(s.half_a), b_dy(s.b * dy), half_c_dy2(s.half_c * dy * dy), opacity(s.opacity) {}

  // opacity * exp(-sigma), zero where the rule skips the splat (sigma < 0, or below 1/255). Not capped yet.
  inline Vec<T> alpha(Vec<T> dx) const {
    const Vec<T> sigma = (half_a * dx + b_dy) * dx + half_c_dy2;
    Vec<T> raw = opacity * exp_nonpositive(-sigma);
    raw = sigma >= T(0) ? raw : Vec<T>{};
    return raw >= kAlphaMin<T> ? raw : Vec<T>{};
  }
};

}  // namespace ns_multigpu
