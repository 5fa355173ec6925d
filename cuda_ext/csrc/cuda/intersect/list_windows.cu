// Lists are in order of depth, so a window leaves a run of each: a thread a tile finds its ends by two binary searches, a
// scan says where runs go, and a warp a tile copies its run.
#include <cuda_runtime.h>

#include <cub/device/device_scan.cuh>

#include "cuda/intersect/list_windows.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;

// The first place of a list at which rows are at this depth or behind it.
__device__ __forceinline__ int first_at(const WindowLists& lists, int first, int end, float depth) {
  while (first < end) {
    const int between = first + (end - first) / 2;
    if (lists.depths[lists.row_ids[between]] < depth)
      first = between + 1;
    else
      end = between;
  }
  return first;
}

__global__ void __launch_bounds__(kThreads) runs_kernel(WindowLists lists, int32_t* firsts, int32_t* counts) {
  const int tile = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (tile > lists.tiles) return;
  if (tile == lists.tiles) {
    counts[tile] = 0;
    return;
  }
  const int begin = min(lists.offsets[tile], lists.capacity), end = min(lists.offsets[tile + 1], lists.capacity);
  const float low = lists.windows[2 * tile], high = lists.windows[2 * tile + 1];
  const int first = first_at(lists, begin, end, low);
  const int last = low < high ? first_at(lists, first, end, high) : first;
  firsts[tile] = first;
  counts[tile] = last - first;
}

__global__ void __launch_bounds__(kThreads)
    copy_kernel(WindowLists lists, const int32_t* firsts, const int32_t* counts, const int32_t* offsets,
                int32_t* row_ids) {
  const int lane = int(threadIdx.x) % 32;
  const int tile = int(blockIdx.x) * (kThreads / 32) + int(threadIdx.x) / 32;
  if (tile >= lists.tiles) return;
  const int count = counts[tile];
  const int32_t* from = lists.row_ids + firsts[tile];
  int32_t* to = row_ids + offsets[tile];
  for (int k = lane; k < count; k += 32) to[k] = from[k];
}

}  // namespace

cudaError_t clip_bytes(int tiles, size_t* bytes) {
  return cub::DeviceScan::ExclusiveSum(nullptr, *bytes, static_cast<const int32_t*>(nullptr),
                                       static_cast<int32_t*>(nullptr), tiles + 1);
}

cudaError_t clip_launch(const WindowLists& lists, int32_t* firsts, int32_t* counts, void* temporary, size_t bytes,
                        int32_t* offsets, int32_t* row_ids, cudaStream_t stream) {
  cudaError_t status = cudaMemsetAsync(row_ids, 0xff, size_t(lists.capacity) * sizeof(int32_t), stream);
  if (status != cudaSuccess) return status;
  if (lists.rows == 0 || lists.tiles == 0 || lists.capacity == 0)
    return cudaMemsetAsync(offsets, 0, size_t(lists.tiles + 1) * sizeof(int32_t), stream);
  runs_kernel<<<lists.tiles / kThreads + 1, kThreads, 0, stream>>>(lists, firsts, counts);
  status = cub::DeviceScan::ExclusiveSum(temporary, bytes, counts, offsets, lists.tiles + 1, stream);
  if (status != cudaSuccess) return status;
  constexpr int kTiles = kThreads / 32;
  copy_kernel<<<(lists.tiles + kTiles - 1) / kTiles, kThreads, 0, stream>>>(lists, firsts, counts, offsets, row_ids);
  return cudaGetLastError();
}

}  // namespace nsmg
