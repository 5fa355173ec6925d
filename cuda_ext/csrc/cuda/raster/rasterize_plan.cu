// Before the compositing: packs rows into records that one gather loads, describes the tiles, orders them by length,
// and says which block of the backward pass works on which chunk, and of the forward pass on which segment.
#include <cuda_runtime.h>

#include <climits>

#include "common/compositing.h"
#include "cuda/raster/rasterize.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;

// A packed record is 48 bytes at a stride of 48: two 32-byte sectors wherever it starts, and eight of them in shared
// memory touch every bank once.
__global__ void __launch_bounds__(kThreads)
pack(RasterInputs in, int64_t rows, int channels, float4* __restrict__ table, int32_t* __restrict__ counts) {
  if (blockIdx.x == 0 && threadIdx.x <= 2 * kLengthClasses) counts[threadIdx.x] = 0;  // and that of segments
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  const float2 mean = reinterpret_cast<const float2*>(in.means2d)[row];
  const float* conic = in.conics + 3 * row;
  const ScaledSplat s = scale_splat(mean.x, mean.y, conic[0], conic[1], conic[2], in.opacities[row]);
  const float* feature = in.features + row * channels;
  float f[4];
#pragma unroll
  for (int d = 0; d < 4; ++d) f[d] = d < channels ? feature[d] : 0.0f;
  table[3 * row] = make_float4(s.mean_x, s.mean_y, s.a, s.b);
  table[3 * row + 1] = make_float4(s.c, s.log2_opacity, bits_float(s.limit), f[3]);
  table[3 * row + 2] = make_float4(f[0], f[1], f[2], 0.0f);
}

struct Run {
  int first, end;
};

// A tile's part of row_ids; within it whatever tile_offsets says, so that no kernel leaves its buffers.
__device__ Run tile_run(const int32_t* __restrict__ tile_offsets, int tile, int intersections) {
  const int first = min(max(tile_offsets[tile], 0), intersections);
  return {first, min(max(tile_offsets[tile + 1], first), intersections)};
}

// 0 for the longest lists; tiles of one class keep their neighbours, and so the cache what these share.
__device__ int length_class(int count) { return max(0, kLengthClasses - 1 - (32 - __clz(count / kChunk))); }

__global__ void __launch_bounds__(kThreads)
describe(const __grid_constant__ PatchGroup group, const int32_t* __restrict__ tile_offsets, int intersections,
         int tile_size, TileInfo* __restrict__ tiles, int32_t* __restrict__ class_counts) {
  __shared__ int counts[kLengthClasses];
  if (threadIdx.x < kLengthClasses) counts[threadIdx.x] = 0;
  __syncthreads();
  const int place = blockIdx.x * kThreads + threadIdx.x;
  if (place < group.tiles) {
    const int tile = group.first_tile + place;
    int low = 0, high = group.count - 1;  // the last patch that starts at or before the tile
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (group.entries[middle].first_tile <= tile) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const PatchEntry& patch = group.entries[low];
    const int local = tile - patch.first_tile, pitch = patch.x1 - patch.x0;
    const int column = local % patch.tiles_x * tile_size, line = local / patch.tiles_x * tile_size;
    const Run run = tile_run(tile_offsets, tile, intersections);
    TileInfo info;
    info.x0 = patch.x0 + column;
    info.y0 = patch.y0 + line;
    info.width = min(tile_size, pitch - column);
    info.height = min(tile_size, patch.y1 - patch.y0 - line);
    info.pixel = patch.first_pixel + line * pitch + column;
    info.pitch = pitch;
    info.first = run.first;
    info.end = run.end;
    tiles[tile] = info;
    atomicAdd(&counts[length_class(run.end - run.first)], 1);
  }
  __syncthreads();
  if (threadIdx.x < kLengthClasses && counts[threadIdx.x] > 0)
    atomicAdd(&class_counts[threadIdx.x], counts[threadIdx.x]);
}

// Returns how many splats a list has at most that is not split.
__device__ int split_threshold(const RasterPlan& plan, int intersections) {
  if (plan.blocks_at_once == 0) return plan.split_above;
  const int64_t shares = int64_t(kSplitShares) * intersections / plan.blocks_at_once;
  return int(min(max(int64_t(plan.split_above), shares), int64_t(INT_MAX)));
}

__global__ void __launch_bounds__(kThreads)
order(const int32_t* __restrict__ tile_offsets, int intersections, int tiles, int slots,
      int32_t* __restrict__ slot_tile, RasterPlan plan, int32_t* __restrict__ chosen_split_above) {
  const int32_t* class_counts = plan.classes;
  int32_t* class_used = plan.classes + kLengthClasses;
  __shared__ int counts[kLengthClasses], starts[kLengthClasses];
  if (threadIdx.x < kLengthClasses) counts[threadIdx.x] = 0;
  const int listed = min(tile_offsets[tiles], intersections) - min(tile_offsets[0], intersections);
  const int split_above = split_threshold(plan, listed);
  if (blockIdx.x == 0 && threadIdx.x == 0) *chosen_split_above = split_above;
  __syncthreads();
  const int index = blockIdx.x * kThreads + threadIdx.x;
  int own_class = 0, rank = 0;
  if (index < tiles) {
    const Run run = tile_run(tile_offsets, index, intersections);
    own_class = length_class(run.end - run.first);
    rank = atomicAdd(&counts[own_class], 1);
    const int count = run.end - run.first;
    if (count > split_above) {
      const int own = (count + kSegment - 1) / kSegment, first = atomicAdd(plan.segment_count, own);
      for (int k = 0; k < min(own, plan.most - first); ++k) plan.segments[first + k] = {index, k};
      plan.ended[index] = 0;
    }
  }
  __syncthreads();
  if (threadIdx.x < kLengthClasses && counts[threadIdx.x] > 0) {
    int before = 0;
    for (int k = 0; k < int(threadIdx.x); ++k) before += class_counts[k];
    starts[threadIdx.x] = before + atomicAdd(&class_used[threadIdx.x], counts[threadIdx.x]);
  }
  __syncthreads();
  if (index < tiles) plan.order[starts[own_class] + rank] = index;
  if (index < slots) {
    int low = 0, high = tiles - 1;  // the last tile whose first slot is at or before this one
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (tile_run(tile_offsets, middle, intersections).first / kChunk + middle <= index) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const Run run = tile_run(tile_offsets, low, intersections);
    const int chunk = index - (run.first / kChunk + low);
    // The lists of tiles before these are not drawn here: their slots have no tile.
    slot_tile[index] = chunk >= 0 && chunk * kChunk < run.end - run.first ? low : -1;
  }
}

unsigned blocks(int64_t items) { return unsigned((items + kThreads - 1) / kThreads); }

}  // namespace

cudaError_t launch_pack(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                        const RasterPlan& plan, cudaStream_t stream) {
  pack<<<shape.rows > 0 ? blocks(shape.rows) : 1, kThreads, 0, stream>>>(in, shape.rows, shape.channels, state.table,
                                                                         plan.classes);
  return cudaGetLastError();
}

cudaError_t launch_describe(const PatchGroup& group, const RasterInputs& in, const RasterShape& shape,
                            const RasterState& state, const RasterPlan& plan, cudaStream_t stream) {
  if (group.tiles == 0) return cudaSuccess;
  describe<<<blocks(group.tiles), kThreads, 0, stream>>>(group, in.tile_offsets, int(shape.intersections),
                                                         shape.tile_size, state.tiles, plan.classes);
  return cudaGetLastError();
}

cudaError_t launch_order(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                         const RasterPlan& plan, cudaStream_t stream) {
  if (shape.tiles == 0) return cudaSuccess;
  order<<<blocks(shape.chunk_slots()), kThreads, 0, stream>>>(in.tile_offsets, int(shape.intersections),
                                                              int(shape.tiles), int(shape.chunk_slots()),
                                                              state.slot_tile, plan, state.split_above);
  return cudaGetLastError();
}

}  // namespace nsmg
