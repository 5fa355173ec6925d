// First half of `intersect`: how many tiles each row overlaps, and the rows by depth.
//
// Rows are counted in their own order, so their data is read in whole lines; only then are they sorted, 8 bytes each,
// by the bits of their depth. The sort is stable: equal depths keep the order of rows. Rows that overlap no tile get
// the largest key and stand last, so later kernels skip them.
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <thrust/iterator/permutation_iterator.h>

#include "cuda/intersect/intersect_device.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kWideColumns = 12;  // from here on a row's columns are shared out over the warp
constexpr int kUpload = 64;       // patches a launch: well within the 4 KB of kernel parameters

struct PatchBatch {
  PatchTiles patches[kUpload];
};

__global__ void upload_kernel(const __grid_constant__ PatchBatch batch, int count, PatchTiles* table, int64_t* total) {
  if (int(threadIdx.x) < count) table[threadIdx.x] = batch.patches[threadIdx.x];
  if (total != nullptr && threadIdx.x == 0) *total = 0;
}

// kTile: the size of a tile where it is known at compile time (no integer divisions), else 0.
template <int kTile>
__global__ void __launch_bounds__(kThreads)
    count_kernel(IntersectRows rows, PatchTable table, uint32_t* keys, int32_t* ids, uint32_t* counts,
                 unsigned long long* total) {
  const int tile_size = kTile > 0 ? kTile : table.tile_size;
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int row = int(index), lane = threadIdx.x % 32;
  const bool inside = index < rows.count;
  uint32_t count = 0;
  bool wide = false;
  if (inside && row_alive(rows, row)) {
    const RowSplat splat = load_row(rows, row);
    for_patches(table, splat, tile_size, [&](const PatchTiles& patch, TileRange columns) {
      if (columns.last - columns.first >= kWideColumns) {
        wide = true;
        return;
      }
      for (int column = columns.first; column < columns.last; ++column) {
        const TileRange lines = tiles_of_column(splat.ellipse, splat.radius_y, patch, column, tile_size);
        count += lines.last - lines.first;
      }
    });
  }
  for (unsigned left = __ballot_sync(0xffffffffu, wide); left != 0; left &= left - 1) {
    const int owner = __ffs(left) - 1;
    const RowSplat splat = load_row(rows, row - lane + owner);
    uint32_t part = 0;
    for_patches(table, splat, tile_size, [&](const PatchTiles& patch, TileRange columns) {
      if (columns.last - columns.first < kWideColumns) return;
      for (int column = columns.first + lane; column < columns.last; column += 32) {
        const TileRange lines = tiles_of_column(splat.ellipse, splat.radius_y, patch, column, tile_size);
        part += lines.last - lines.first;
      }
    });
    part = warp_sum(part);
    if (lane == owner) count += part;
  }
  if (inside) {
    keys[row] = count > 0 ? ordered_bits(__ldg(rows.depths + row)) : 0xffffffffu;
    ids[row] = row;
    counts[row] = count;
  }
  __shared__ unsigned long long sums[kWarps];
  const unsigned long long of_warp = warp_sum<unsigned long long>(count);
  if (lane == 0) sums[threadIdx.x / 32] = of_warp;
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned long long sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp];
    if (sum > 0) atomicAdd(total, sum);
  }
}

// Stays at 2^32 - 1 instead of passing it; associative, as the scan needs.
struct SaturatingSum {
  __host__ __device__ uint32_t operator()(uint32_t a, uint32_t b) const {
    const uint32_t sum = a + b;
    return sum < a ? 0xffffffffu : sum;
  }
};

using Counts = thrust::permutation_iterator<const uint32_t*, const int32_t*>;

cudaError_t sort_rows(void* temporary, size_t& bytes, cub::DoubleBuffer<uint32_t>& keys,
                      cub::DoubleBuffer<int32_t>& ids, int count, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, ids, count, 0, 32, stream);
}

cudaError_t scan_counts(void* temporary, size_t& bytes, const uint32_t* counts, const int32_t* ids, uint32_t* starts,
                        int count, cudaStream_t stream) {
  return cub::DeviceScan::ExclusiveScan(temporary, bytes, Counts(counts, ids), starts, SaturatingSum{}, uint32_t(0),
                                        count, stream);
}

constexpr size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

constexpr int kArrays = 5;  // keys and ids twice, counts

cudaError_t temporary_bytes(int rows, size_t* bytes) {
  cub::DoubleBuffer<uint32_t> keys;
  cub::DoubleBuffer<int32_t> ids;
  size_t for_sort = 0, for_scan = 0;
  cudaError_t status = sort_rows(nullptr, for_sort, keys, ids, rows, nullptr);
  if (status != cudaSuccess) return status;
  status = scan_counts(nullptr, for_scan, nullptr, nullptr, nullptr, rows, nullptr);
  *bytes = for_sort > for_scan ? for_sort : for_scan;
  return status;
}

}  // namespace

cudaError_t intersect_upload(const PatchTiles* host, int count, PatchTiles* device, int64_t* total,
                             cudaStream_t stream) {
  for (int first = 0; first == 0 || first < count; first += kUpload) {
    PatchBatch batch = {};
    const int number = count - first < kUpload ? count - first : kUpload;
    for (int k = 0; k < number; ++k) batch.patches[k] = host[first + k];
    upload_kernel<<<1, kUpload, 0, stream>>>(batch, number, device + first, first == 0 ? total : nullptr);
  }
  return cudaGetLastError();
}

cudaError_t intersect_order_bytes(int rows, size_t* bytes) {
  size_t temporary = 0;
  const cudaError_t status = temporary_bytes(rows, &temporary);
  *bytes = kArrays * aligned(4 * size_t(rows)) + aligned(temporary);
  return status;
}

cudaError_t intersect_order(const IntersectRows& rows, const PatchTable& table, void* workspace, int64_t* total,
                            RowOrder* order, cudaStream_t stream) {
  const int count = rows.count;
  const size_t stride = aligned(4 * size_t(count));
  char* base = static_cast<char*>(workspace);
  const auto array = [&](int k) { return base + k * stride; };
  uint32_t* counts = reinterpret_cast<uint32_t*>(array(4));
  cub::DoubleBuffer<uint32_t> keys(reinterpret_cast<uint32_t*>(array(0)), reinterpret_cast<uint32_t*>(array(1)));
  cub::DoubleBuffer<int32_t> ids(reinterpret_cast<int32_t*>(array(2)), reinterpret_cast<int32_t*>(array(3)));
  size_t bytes = 0;
  cudaError_t status = temporary_bytes(count, &bytes);
  if (status != cudaSuccess) return status;

  const int blocks = int((int64_t(count) + kThreads - 1) / kThreads);
  auto* sum = reinterpret_cast<unsigned long long*>(total);
  if (table.tile_size == 16)
    count_kernel<16><<<blocks, kThreads, 0, stream>>>(rows, table, keys.Current(), ids.Current(), counts, sum);
  else
    count_kernel<0><<<blocks, kThreads, 0, stream>>>(rows, table, keys.Current(), ids.Current(), counts, sum);
  if ((status = cudaGetLastError()) != cudaSuccess) return status;
  if ((status = sort_rows(array(kArrays), bytes, keys, ids, count, stream)) != cudaSuccess) return status;
  uint32_t* starts = keys.Alternate();  // the keys have done their work
  order->rows = ids.Current();
  order->starts = starts;
  return scan_counts(array(kArrays), bytes, counts, ids.Current(), starts, count, stream);
}

}  // namespace nsmg
