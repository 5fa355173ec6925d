// `intersect_keys`: the pairs of tile and row as keys that sort by tile, then depth, wherever they come from.
#include "cuda/intersect/intersect_list.h"
#include "cuda/sort/merge.h"

namespace nsmg {
namespace {

template <int kTile>
__global__ void __launch_bounds__(kListThreads)
    keys_kernel(IntersectRows rows, PatchTable table, RowOrder order, const int64_t* total, int capacity,
                uint32_t owner, int64_t* keys, int32_t* values) {
  __shared__ uint32_t staged_tiles[kChunk];
  __shared__ int32_t staged_rows[kChunk];
  __shared__ int bounds[2];
  const auto [begin, stop, places] =
      list_chunk<uint32_t, kTile>(rows, table, order, total, capacity, staged_tiles, staged_rows, bounds);
  for (uint32_t k = threadIdx.x; k < places; k += kListThreads) {
    int64_t key = 0x7fffffffffffffff;
    int32_t value = -1;
    if (begin + k < stop) {
      const int row = staged_rows[k];
      key = int64_t(staged_tiles[k]) << 32 | ordered_bits(__ldg(rows.depths + row));
      value = int32_t(owner << kOwnerShift | uint32_t(row));
    }
    keys[size_t(begin) + k] = key;
    values[size_t(begin) + k] = value;
  }
}

}  // namespace

cudaError_t tile_keys(const IntersectRows& rows, const PatchTable& table, const RowOrder& order, const int64_t* total,
                      int capacity, int owner, int64_t* keys, int32_t* values, cudaStream_t stream) {
  const int blocks = int((int64_t(capacity) + kChunk - 1) / kChunk);
  const auto kernel = table.tile_size == 16 ? keys_kernel<16> : keys_kernel<0>;
  kernel<<<blocks, kListThreads, 0, stream>>>(rows, table, order, total, capacity, uint32_t(owner), keys, values);
  return cudaGetLastError();
}

}  // namespace nsmg
