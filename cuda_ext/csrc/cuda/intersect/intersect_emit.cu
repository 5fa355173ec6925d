// Second half of `intersect`: the (tile, row) pairs in order of depth, sorted by tile alone.
//
// The sort is stable, so that inside a tile the order of depth remains; tile ids need 16 bits and two passes for up to
// 65,535 tiles.
#include <cub/device/device_radix_sort.cuh>

#include "cuda/intersect/intersect_list.h"

namespace nsmg {
namespace {

constexpr int kThreads = kListThreads;

template <typename Key, int kTile>
__global__ void __launch_bounds__(kThreads)
    emit_kernel(IntersectRows rows, PatchTable table, RowOrder order, const int64_t* total, int capacity,
                Key unused, Key* tiles, int32_t* ids) {
  __shared__ Key staged_tiles[kChunk];
  __shared__ int32_t staged_rows[kChunk];
  __shared__ int bounds[2];
  const auto [begin, stop, places] =
      list_chunk<Key, kTile>(rows, table, order, total, capacity, staged_tiles, staged_rows, bounds);
  for (uint32_t k = threadIdx.x; k < places; k += kThreads) {
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
