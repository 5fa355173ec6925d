// Cells of space in views. Everything runs on the given stream and waits for nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

inline constexpr int kCellTile = 16;

// What cells and patches are, in one table of words on the device: planes (two words each), then the integers.
struct CellTables {
  int splits, cells, depth, views, drawn, patches;  // how many
  // In words, without the planes' 2 * splits: axes, paths, order, upward, drawn (6 each), patches (7 each: the first is
  // the tile that it begins with).
  int integers() const { return splits + cells * depth + views * (cells + splits) + 6 * drawn + 7 * patches; }
};

// `host`, 2 * splits + integers() words, may go at once; `table` is as long. windows [tiles, 2].
cudaError_t cell_windows_launch(const CellTables& sizes, const uint32_t* host, uint32_t* table, const float* viewmats,
                                const float* Ks, int tiles, double* windows, cudaStream_t stream);

struct CellRows {
  const int32_t* view_ids;
  const float* means2d;
  const int32_t* radii;
  const float* depths;
  int count;
};

// host_boxes [cells, 6], `boxes` as long; in_cells [cells, count].
cudaError_t cells_reached_launch(const CellRows& rows, const float* viewmats, const float* Ks, int views,
                                 const double* host_boxes, int cells, double* boxes, bool* in_cells,
                                 cudaStream_t stream);

}  // namespace nsmg
