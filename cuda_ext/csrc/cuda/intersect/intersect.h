// Lists of the rows that overlap each tile, by depth, on the device. Everything runs on the given stream, waits for
// nothing and takes its sizes from the arguments alone, so that it can be captured in a CUDA graph.
//
// The order of calls: intersect_upload, intersect_order, intersect_emit, intersect_offsets.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace nsmg {

// A patch with pixels: its rectangle in its view, and its tiles among those of all patches.
struct PatchTiles {
  int32_t view, x0, y0, x1, y1;
  int32_t first_tile, tiles_x;
};

// Device arrays of `count` rows, as `intersect` gets them.
struct IntersectRows {
  const float *means2d, *conics, *opacities, *depths;
  const int32_t *radii, *view_ids;
  int count;
};

// Patches in device memory, ascending by view.
struct PatchTable {
  const PatchTiles* patches;
  int count;
  int tile_size;
};

// Fills the device table from host memory (passed by value, so the host copy may go at once) and clears `total`.
cudaError_t intersect_upload(const PatchTiles* host, int count, PatchTiles* device, int64_t* total,
                             cudaStream_t stream);

// The rows nearest first, those that overlap no tile last; and where the tiles of each begin among all intersections
// (exclusive sums that stop at 2^32 - 1).
struct RowOrder {
  const int32_t* rows;
  const uint32_t* starts;
};

// Bytes of workspace that intersect_order needs, aligned to 256.
cudaError_t intersect_order_bytes(int rows, size_t* bytes);

// `total`: the number of intersections, added to. The result lies in the workspace.
cudaError_t intersect_order(const IntersectRows& rows, const PatchTable& table, void* workspace, int64_t* total,
                            RowOrder* order, cudaStream_t stream);

// Two arrays each of tile ids and of row ids, `capacity` long, to sort between.
template <typename Key>
struct TileLists {
  Key* tiles[2];
  int32_t* rows[2];
};

// Bytes of temporary storage that intersect_emit needs to sort `capacity` keys below `tiles`.
template <typename Key>
cudaError_t intersect_emit_bytes(int capacity, int tiles, size_t* bytes);

// Lists (tile, row) by tile, then depth: *current says which of the two arrays has the result. Unused places come last,
// with a tile id above all and row -1. Of more than `capacity` intersections those of the nearest rows are listed.
template <typename Key>
cudaError_t intersect_emit(const IntersectRows& rows, const PatchTable& table, const RowOrder& order,
                           const int64_t* total, int capacity, int tiles, const TileLists<Key>& lists, int* current,
                           void* temporary, size_t bytes, cudaStream_t stream);

// offsets [tiles + 1]: where each tile's list begins in the sorted tile ids.
template <typename Key>
cudaError_t intersect_offsets(const Key* sorted, const int64_t* total, int capacity, int tiles, int32_t* offsets,
                              cudaStream_t stream);

}  // namespace nsmg
