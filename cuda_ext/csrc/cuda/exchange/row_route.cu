// Which rows go to which rank, and at which line of what is sent there.
//
// Two passes over the rows with a scan over blocks between them. The first tests each row against the patches of its
// view, 20 bytes a row, and leaves a mask of ranks, a bit each, where the places to rank 0 will stand; the second turns
// masks into places, 4 bytes a row and rank. In each, a warp takes its rows 32 at a time, and lane r counts those that
// go to rank r: no atomics, so the places are the same on every run.
#include "cuda/exchange/row_exchange.h"
#include "cuda/exchange/row_patches.h"

namespace nsmg {
namespace {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSteps = kRouteRows / kThreads;  // rows of a lane
constexpr int kScanThreads = 1024;

// A bit for each rank with a patch that the row overlaps.
__device__ __forceinline__ uint32_t ranks_reached(const RouteRows& rows, const RankPatch* patches, int patch_count,
                                                  int64_t row) {
  uint32_t mask = 0;
  patches_reached(rows, patches, patch_count, row, [&](const RankPatch& patch) {
    if (rows.in_cells == nullptr || rows.in_cells[int64_t(patch.cell) * rows.count + row]) mask |= 1u << patch.rank;
  });
  return mask;
}

// Adds to lane r how many of the warp's masks have bit r.
__device__ __forceinline__ void count_bits(uint32_t mask, int ranks, int lane, int& mine) {
  for (int rank = 0; rank < ranks; ++rank) {
    const int number = __popc(__ballot_sync(kAll, (mask >> rank & 1u) != 0));
    if (lane == rank) mine += number;
  }
}

// masks [count] of the lines' rows, and block_counts [ranks, blocks].
__global__ void __launch_bounds__(kThreads)
    touch_kernel(RouteRows rows, const RankPatch* patches, int patch_count, int ranks, int blocks, uint32_t* masks,
                 int32_t* block_counts) {
  __shared__ int sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = int64_t(blockIdx.x) * kRouteRows + warp * (32 * kSteps);
  const int64_t real = real_rows(rows);
  int mine = 0;
  for (int step = 0; step < kSteps; ++step) {
    const int64_t row = first + 32 * step + lane;
    uint32_t mask = 0;
    if (row < real) {
      mask = ranks_reached(rows, patches, patch_count, row);
      masks[row] = mask;
    }
    count_bits(mask, ranks, lane, mine);
  }
  sums[warp][lane] = mine;
  __syncthreads();
  if (warp == 0 && lane < ranks) {
    int sum = 0;
    for (int k = 0; k < kWarps; ++k) sum += sums[k][lane];
    block_counts[int64_t(lane) * blocks + blockIdx.x] = sum;
  }
}

__device__ __forceinline__ int warp_through(int value, int lane) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(kAll, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

// A block a rank: its counts become what stands before them, and their sum goes to counts[rank].
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(int32_t* block_counts, int blocks, int64_t* counts) {
  __shared__ int sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t* values = block_counts + int64_t(blockIdx.x) * blocks;
  int carry = 0;
  for (int base = 0; base < blocks; base += kScanThreads) {
    const int k = base + int(threadIdx.x);
    const int value = k < blocks ? values[k] : 0;
    const int through = warp_through(value, lane);
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    if (warp == 0) {
      const int sum = warp_through(sums[lane], lane);
      sums[lane] = sum;
    }
    __syncthreads();
    if (k < blocks) values[k] = carry + (warp > 0 ? sums[warp - 1] : 0) + through - value;
    carry += sums[31];
    __syncthreads();
  }
  if (threadIdx.x == 0) counts[blockIdx.x] = carry;
}

// The masks stand in `place` itself, where the places to rank 0 go: a thread reads its own before it writes there.
__global__ void __launch_bounds__(kThreads)
    place_kernel(RouteRows rows, int ranks, int blocks, const int32_t* block_starts, int32_t* place) {
  __shared__ int sums[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = int64_t(blockIdx.x) * kRouteRows + warp * (32 * kSteps);
  const int64_t real = real_rows(rows);
  uint32_t masks[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t row = first + 32 * step + lane;
    masks[step] = row < real ? uint32_t(place[row]) : 0u;
  }
  int mine = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) count_bits(masks[step], ranks, lane, mine);
  sums[warp][lane] = mine;
  __syncthreads();
  int start = 0;  // lane r: the place of the warp's next row to rank r
  if (lane < ranks) {
    start = block_starts[int64_t(lane) * blocks + blockIdx.x];
    for (int k = 0; k < warp; ++k) start += sums[k][lane];
  }
  const unsigned below = (1u << lane) - 1;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t row = first + 32 * step + lane;
    for (int rank = 0; rank < ranks; ++rank) {
      const bool goes = (masks[step] >> rank & 1u) != 0;
      const unsigned going = __ballot_sync(kAll, goes);
      const int from = __shfl_sync(kAll, start, rank);
      if (row < rows.count) place[int64_t(rank) * rows.count + row] = goes ? from + __popc(going & below) : -1;
      if (lane == rank) start += __popc(going);
    }
  }
}

}  // namespace

cudaError_t route_launch(const RouteRows& rows, const RankPatch* host_patches, int patch_count, RankPatch* patches,
                         int ranks, int32_t* block_counts, int32_t* place, int64_t* counts, cudaStream_t stream) {
  const int blocks = route_blocks(rows.count);
  upload_patches(host_patches, patch_count, patches, stream);
  if (blocks > 0) {
    auto* masks = reinterpret_cast<uint32_t*>(place);
    touch_kernel<<<blocks, kThreads, 0, stream>>>(rows, patches, patch_count, ranks, blocks, masks, block_counts);
  }
  scan_kernel<<<ranks, kScanThreads, 0, stream>>>(block_counts, blocks, counts);
  if (blocks > 0) place_kernel<<<blocks, kThreads, 0, stream>>>(rows, ranks, blocks, block_counts, place);
  return cudaGetLastError();
}

}  // namespace nsmg
