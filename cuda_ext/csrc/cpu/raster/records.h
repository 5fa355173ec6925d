// Where the backward pass of the CPU twin leaves what each intersection adds to its row's gradients.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/raster/splat.h"

namespace nsmg {

// A record: six moments, the channels, then the two absolute sums where asked for; filled up to whole vectors.
constexpr int kMoments = 6;

template <typename T>
constexpr int record_vectors(int channels, bool absgrad) {
  return (kMoments + channels + (absgrad ? 2 : 0) + Lanes<T>::kWidth - 1) / Lanes<T>::kWidth;
}

// Where each intersection's record lies: those of a row side by side, in the order of the intersections. Those behind
// the last one that touched any pixel of their tile have none.
struct RecordPlan {
  std::vector<int32_t> reached;     // [T] end of the intersections of each tile that have a record
  std::vector<int64_t> row_begin;   // [M+1]
  std::vector<int32_t> slot;        // [I]

  template <typename T>
  RecordPlan(const SplatTable<T>& table, const std::vector<Tile>& tiles, const int32_t* last)
      : reached(tiles.size()), row_begin(table.rows + 1, 0), slot(table.intersections) {
    at::parallel_for(0, int64_t(tiles.size()), 16, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        int32_t deepest = -1;
        for (int row = 0; row < tiles[t].y1 - tiles[t].y0; ++row)
          for (int column = 0; column < tiles[t].x1 - tiles[t].x0; ++column)
            deepest = std::max(deepest, last[tiles[t].pixel + row * tiles[t].pitch + column]);
        reached[t] = std::clamp(deepest + 1, table.tile_offsets[t], table.tile_offsets[t + 1]);
      }
    });
    for (size_t t = 0; t < tiles.size(); ++t)
      for (int32_t i = table.tile_offsets[t]; i < reached[t]; ++i) ++row_begin[table.row_ids[i] + 1];
    for (int64_t row = 0; row < table.rows; ++row) row_begin[row + 1] += row_begin[row];
    std::vector<int32_t> next(row_begin.begin(), row_begin.end() - 1);
    for (size_t t = 0; t < tiles.size(); ++t)
      for (int32_t i = table.tile_offsets[t]; i < reached[t]; ++i) slot[i] = next[table.row_ids[i]]++;
  }
};

}  // namespace nsmg
