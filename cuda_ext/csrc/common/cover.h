// The tiles of a patch that a splat may overlap: of every column of tiles within the splat's box, the range of rows
// over which its ellipse passes. Tiles are counted from the patch's own corner.
#pragma once

#include "ellipse.h"

namespace nsmg {

struct TileRange {
  int first, last;  // [first, last)
};

// Tiles along one axis whose pixel centres come within [lo, hi] of a patch that starts at `origin`.
template <typename T>
NSMG_HD TileRange covered_tiles(T lo, T hi, int origin, int pixels, int tile_size) {
  int first, last;
  covered_steps(Span<T>{lo, hi}, T(origin), pixels, first, last);
  return first < last ? TileRange{first / tile_size, (last - 1) / tile_size + 1} : TileRange{0, 0};
}

// The columns of tiles within the box; `reach_x` is half the box in pixels. A patch has x0, y0, x1, y1 in pixels.
template <typename T, typename Patch>
NSMG_HD TileRange tile_columns(const Ellipse<T>& e, T radius_x, const Patch& patch, int tile_size) {
  return covered_tiles(e.mean_x - radius_x, e.mean_x + radius_x, patch.x0, patch.x1 - patch.x0, tile_size);
}

// The tiles of one column, as a range of rows of tiles.
template <typename T, typename Patch>
NSMG_HD TileRange tiles_of_column(const Ellipse<T>& e, T radius_y, const Patch& patch, int column, int tile_size) {
  const int x0 = patch.x0 + column * tile_size, x1 = smaller(x0 + tile_size, patch.x1);
  const Span<T> span = e.y_span(T(x0) + T(0.5), T(x1) - T(0.5));
  return covered_tiles(larger(span.lo, e.mean_y - radius_y), smaller(span.hi, e.mean_y + radius_y), patch.y0,
                       patch.y1 - patch.y0, tile_size);
}

}  // namespace nsmg
