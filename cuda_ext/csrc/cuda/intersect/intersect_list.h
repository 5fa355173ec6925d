// Listing pairs of tile and row: what `intersect` and `intersect_keys` share.
//
// Work is shared out by the pairs and not by the rows: each block lists a run of kChunk of them, whatever rows they
// come from, so a splat over the whole image keeps many blocks busy and none for long. The block finds its rows by
// searching their starts.
#pragma once

#include "cuda/intersect/intersect_device.h"

namespace nsmg {

constexpr int kListThreads = 256, kChunk = 2048;
constexpr uint32_t kWideTiles = 64;  // a row with more pairs is listed by a whole warp

__device__ __forceinline__ uint32_t listed(const int64_t* total, int capacity) {
  const int64_t number = *total;
  return uint32_t(number < capacity ? number : capacity);
}

// How many of the ascending values are at most x; a whole warp asks.
__device__ __forceinline__ int count_up_to(const uint32_t* values, int count, uint32_t x) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = count;  // the answer lies in [low, high]
  while (low < high) {
    const int span = high - low, stride = (span + 31) / 32;
    const int64_t step = int64_t(lane + 1) * stride;
    const int probe = low + int(step < span ? step : span) - 1;
    const int passed = __popc(__ballot_sync(0xffffffffu, __ldg(values + probe) <= x));
    if (passed == 32) return high;
    high = __shfl_sync(0xffffffffu, probe, passed);
    low += passed * stride;
  }
  return low;
}

// The part of all pairs, [begin, stop), that a block gathers in shared memory before it writes them in one piece.
template <typename Key>
struct Window {
  uint32_t begin, stop;
  Key* tiles;
  int32_t* rows;

  // `number` pairs from place `first` on: of consecutive lines of tiles in one column.
  __device__ __forceinline__ void put(uint32_t first, int number, int tile, int pitch, int row) const {
    const uint32_t from = first < begin ? begin : first;
    const uint32_t end = first + uint32_t(number), to = end < stop ? end : stop;
    for (uint32_t place = from; place < to; ++place) {
      tiles[place - begin] = Key(tile + int(place - first) * pitch);
      rows[place - begin] = row;
    }
  }
};

// What a block lists: pairs [begin, stop) of all, into the first of the `room` places that are its own.
struct Chunk {
  uint32_t begin, stop, places;
};

// Gathers the block's pairs in shared memory; `bounds` is scratch for two numbers. For blocks of kListThreads threads,
// all of which call it; ready to read when it returns. kTile: the size of a tile where it is known at compile time (no
// integer divisions), else 0.
template <typename Key, int kTile>
__device__ __forceinline__ Chunk list_chunk(const IntersectRows& rows, const PatchTable& table, const RowOrder& order,
                                            const int64_t* total, int capacity, Key* staged_tiles,
                                            int32_t* staged_rows, int* bounds) {
  const int tile_size = kTile > 0 ? kTile : table.tile_size;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t begin = blockIdx.x * uint32_t(kChunk), places = min(uint32_t(capacity) - begin, uint32_t(kChunk));
  const uint32_t pairs = listed(total, capacity), stop = min(begin + places, pairs);
  if (begin < stop) {
    const Window<Key> window{begin, stop, staged_tiles, staged_rows};
    if (warp < 2) {
      const int found = count_up_to(order.starts, rows.count, warp == 0 ? begin : stop - 1);
      if (lane == 0) bounds[warp] = warp == 0 ? found - 1 : found;
    }
    __syncthreads();
    const int last = bounds[1];
    for (int base = bounds[0] + 32 * warp; base < last; base += kListThreads) {
      const int place = base + lane;
      bool wide = false;
      int row = 0;
      uint32_t start = 0;
      if (place < last) {
        row = __ldg(order.rows + place);
        start = __ldg(order.starts + place);
        const uint32_t end = place + 1 < rows.count ? __ldg(order.starts + place + 1) : 0xffffffffu;
        wide = end - start > kWideTiles;
        if (!wide) {
          const RowSplat splat = load_row(rows, row);
          uint32_t next = start;
          for_patches(table, splat, tile_size, [&](const PatchTiles& patch, TileRange columns) {
            for (int column = columns.first; column < columns.last; ++column) {
              const TileRange lines = tiles_of_column(splat.ellipse, splat.radius_y, patch, column, tile_size);
              const int number = lines.last - lines.first;
              window.put(next, number, patch.first_tile + lines.first * patch.tiles_x + column, patch.tiles_x, row);
              next += number;
            }
          });
        }
      }
      for (unsigned left = __ballot_sync(0xffffffffu, wide); left != 0; left &= left - 1) {
        const int owner = __ffs(left) - 1;
        const int its_row = __shfl_sync(0xffffffffu, row, owner);
        uint32_t next = __shfl_sync(0xffffffffu, start, owner);
        const RowSplat splat = load_row(rows, its_row);
        for_patches(table, splat, tile_size, [&](const PatchTiles& patch, TileRange columns) {
          for (int first = columns.first; first < columns.last && next < stop; first += 32) {
            const int column = first + lane;
            TileRange lines{0, 0};
            if (column < columns.last)
              lines = tiles_of_column(splat.ellipse, splat.radius_y, patch, column, tile_size);
            const int number = lines.last - lines.first;
            int through = number;  // of this lane's column and those before it
            for (int distance = 1; distance < 32; distance *= 2) {
              const int before = __shfl_up_sync(0xffffffffu, through, distance);
              if (lane >= distance) through += before;
            }
            window.put(next + uint32_t(through - number), number,
                      patch.first_tile + lines.first * patch.tiles_x + column, patch.tiles_x, its_row);
            next += uint32_t(__shfl_sync(0xffffffffu, through, 31));
          }
        });
      }
    }
    __syncthreads();
  }
  return {begin, stop, places};
}

}  // namespace nsmg
