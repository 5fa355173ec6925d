// Second half of `intersect`: the (tile, row) pairs in order of depth, sorted by tile alone.
//
// Work is shared out by the pairs and not by the rows: each block lists a run of kChunk of them, whatever rows they
// come from, so a splat over the whole image keeps many blocks busy and none for long. The block finds its rows by
// searching their starts. The sort is stable, so that inside a tile the order of depth remains; tile ids need 16 bits
// and two passes for up to 65,535 tiles.
#include <cub/device/device_radix_sort.cuh>

#include "cuda/intersect_device.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256, kChunk = 2048;
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

template <typename Key, int kTile>
__global__ void __launch_bounds__(kThreads)
    emit_kernel(IntersectRows rows, PatchTable table, RowOrder order, const int64_t* total, int capacity,
                Key unused, Key* tiles, int32_t* ids) {
  __shared__ Key staged_tiles[kChunk];
  __shared__ int32_t staged_rows[kChunk];
  __shared__ int bounds[2];
  const int tile_size = kTile > 0 ? kTile : table.tile_size;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t begin = blockIdx.x * uint32_t(kChunk), room = min(uint32_t(capacity) - begin, uint32_t(kChunk));
  const uint32_t pairs = listed(total, capacity), stop = min(begin + room, pairs);
  if (begin < stop) {
    const Window<Key> window{begin, stop, staged_tiles, staged_rows};
    if (warp < 2) {
      const int found = count_up_to(order.starts, rows.count, warp == 0 ? begin : stop - 1);
      if (lane == 0) bounds[warp] = warp == 0 ? found - 1 : found;
    }
    __syncthreads();
    const int last = bounds[1];
    for (int base = bounds[0] + 32 * warp; base < last; base += kThreads) {
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
              const TileRange lines = tiles_of_column(splat.ellipse, splat.reach_y, patch, column, tile_size);
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
              lines = tiles_of_column(splat.ellipse, splat.reach_y, patch, column, tile_size);
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
  for (uint32_t k = threadIdx.x; k < room; k += kThreads) {
    const bool used = begin + k < stop;
    tiles[size_t(begin) + k] = used ? staged_tiles[k] : unused;
    ids[size_t(begin) + k] = used ? staged_rows[k] : -1;
  }
}

// One thread a tile: the first place whose tile id is not before it.
template <typename Key>
__global__ void __launch_bounds__(kThreads)
    offsets_kernel(const Key* sorted, const int64_t* total, int capacity, int tiles, int32_t* offsets) {
  const int64_t tile = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (tile > tiles) return;
  uint32_t first = 0, last = listed(total, capacity);
  while (first < last) {
    const uint32_t middle = first + (last - first) / 2;
    if (int64_t(__ldg(sorted + middle)) < tile)
      first = middle + 1;
    else
      last = middle;
  }
  offsets[tile] = int32_t(first);
}

// Bits that hold every tile id and, all ones, a number above them.
int key_bits(int tiles) {
  int bits = 1;
  while (bits < 31 && (int64_t(1) << bits) <= tiles) ++bits;
  return bits;
}

template <typename Key>
cudaError_t sort_tiles(void* temporary, size_t& bytes, cub::DoubleBuffer<Key>& keys, cub::DoubleBuffer<int32_t>& rows,
                       int capacity, int tiles, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, rows, capacity, 0, key_bits(tiles), stream);
}

}  // namespace

template <typename Key>
cudaError_t intersect_emit_bytes(int capacity, int tiles, size_t* bytes) {
  cub::DoubleBuffer<Key> keys;
  cub::DoubleBuffer<int32_t> rows;
  return sort_tiles<Key>(nullptr, *bytes, keys, rows, capacity, tiles, nullptr);
}

template <typename Key>
cudaError_t intersect_emit(const IntersectRows& rows, const PatchTable& table, const RowOrder& order,
                           const int64_t* total, int capacity, int tiles, const TileLists<Key>& lists, int* current,
                           void* temporary, size_t bytes, cudaStream_t stream) {
  const int blocks = int((int64_t(capacity) + kChunk - 1) / kChunk);
  const Key unused = Key((int64_t(1) << key_bits(tiles)) - 1);
  const auto kernel = table.tile_size == 16 ? emit_kernel<Key, 16> : emit_kernel<Key, 0>;
  kernel<<<blocks, kThreads, 0, stream>>>(rows, table, order, total, capacity, unused, lists.tiles[0], lists.rows[0]);
  cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  cub::DoubleBuffer<Key> keys(lists.tiles[0], lists.tiles[1]);
  cub::DoubleBuffer<int32_t> ids(lists.rows[0], lists.rows[1]);
  status = sort_tiles<Key>(temporary, bytes, keys, ids, capacity, tiles, stream);
  if (status == cudaSuccess && keys.selector != ids.selector) status = cudaErrorUnknown;
  *current = ids.selector;
  return status;
}

template <typename Key>
cudaError_t intersect_offsets(const Key* sorted, const int64_t* total, int capacity, int tiles, int32_t* offsets,
                              cudaStream_t stream) {
  const int blocks = int((int64_t(tiles) + kThreads) / kThreads);  // tiles + 1 threads
  offsets_kernel<Key><<<blocks, kThreads, 0, stream>>>(sorted, total, capacity, tiles, offsets);
  return cudaGetLastError();
}

template cudaError_t intersect_emit_bytes<uint16_t>(int, int, size_t*);
template cudaError_t intersect_emit_bytes<uint32_t>(int, int, size_t*);
template cudaError_t intersect_emit<uint16_t>(const IntersectRows&, const PatchTable&, const RowOrder&, const int64_t*,
                                              int, int, const TileLists<uint16_t>&, int*, void*, size_t, cudaStream_t);
template cudaError_t intersect_emit<uint32_t>(const IntersectRows&, const PatchTable&, const RowOrder&, const int64_t*,
                                              int, int, const TileLists<uint32_t>&, int*, void*, size_t, cudaStream_t);
template cudaError_t intersect_offsets<uint16_t>(const uint16_t*, const int64_t*, int, int, int32_t*, cudaStream_t);
template cudaError_t intersect_offsets<uint32_t>(const uint32_t*, const int64_t*, int, int, int32_t*, cudaStream_t);

}  // namespace nsmg
