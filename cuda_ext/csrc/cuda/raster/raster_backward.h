// Backward compositing of 16x16 tiles, for any kind of splat: a template over its traits. Two pixels a thread: a block
// takes one chunk of 256 splats of a tile and walks it front to back from the checkpoint, so no list is walked by one
// block alone, however long it is. A warp sums each splat's gradients over its 64 pixels, the block over its warps every
// 32 splats; then they go to memory at once.
//
// Traits say: kQuads (float4 of a packed splat), kGradients (sums of a splat), kRecordQuads (float4 of its record),
// kRecordStride (floats from one record to the next), kBuffers (of sums; 2 save a barrier), kBackwardBlocks (of a
// multiprocessor), Gradients (RasterGradients, or a struct that begins so), overlaps(), Start and start() (a pixel before
// the chunk), see() (a splat from both pixels), pass() (its sums over both), place_of_sum() and record_quad().
#pragma once

#include "cuda/raster/rasterize_device.h"

namespace nsmg {
namespace {

constexpr int kGroup = 32;

template <int kQuads>
struct Sums {
  float4 quads[kTileWarps][kGroup][kQuads];
  unsigned hits[kTileWarps];  // which splats the warp has sums of
};

// Adds the block's sums of 32 splats to their records; each warp does 8 splats, a lane a quarter of a record.
template <typename Traits>
__device__ __forceinline__ void flush(const Sums<Traits::kRecordQuads>& sums, const float4* splats, const int* rows,
                                      const RecordTarget& target, int warp, int lane) {
  constexpr int kQuads = Traits::kRecordQuads, kItems = kGroup / kTileWarps * kQuads;
  const auto add = [&](int item) {
    const int k = warp * (kGroup / kTileWarps) + item / kQuads, quad = item % kQuads;
    if (item >= kItems) return;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    bool any = false;
#pragma unroll
    for (int w = 0; w < kTileWarps; ++w) {
      if ((sums.hits[w] >> k & 1u) == 0) continue;
      any = true;
      const float4 own = sums.quads[w][k][quad];
      total.x += own.x, total.y += own.y, total.z += own.z, total.w += own.w;
    }
    if (!any) return;
    float* record = record_of<Traits::kRecordStride>(target, rows[k]);
    if (record == nullptr) return;
    add_quad(record + 4 * quad, Traits::record_quad(quad, total, splats + Traits::kQuads * k), target.system_scope);
  };
  add(lane);
  if constexpr (kItems > 32) add(lane + 32);
  static_assert(kItems <= 64, "two rounds");
}

template <typename Traits>
__global__ void __launch_bounds__(kTileThreads, Traits::kBackwardBlocks)
backward(const int32_t* __restrict__ row_ids, int rows, int channels, RasterState state,
         typename Traits::Gradients pixels, RecordTarget target) {
  constexpr int kSumQuads = kTileWarps * kGroup * Traits::kRecordQuads;
  __shared__ float4 staged[kChunk * Traits::kQuads];
  __shared__ int staged_rows[kChunk];
  __shared__ Sums<Traits::kRecordQuads> sums[Traits::kBuffers];
  TileInfo info;
  const Chunk chunk = chunk_of(state, blockIdx.x, info);
  if (chunk.count <= 0) return;  // the whole block
  stage_chunk<Traits::kQuads>(row_ids, chunk, state.table, rows, staged, staged_rows);
  // Sums that are never asked for stay zero.
  for (int i = threadIdx.x; i < Traits::kBuffers * kSumQuads; i += kTileThreads) {
    const int buffer = i / kSumQuads;
    (&sums[buffer].quads[0][0][0])[i % kSumQuads] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SubTile part = sub_tile(info, warp);
  const int column = lane % kSubTile, line = lane / kSubTile;
  const float x = float(info.x0 + part.x + column) + 0.5f;
  const float upper_y = float(info.y0 + part.y + line) + 0.5f, lower_y = upper_y + 4.0f;
  const int64_t place = info.pixel + int64_t(part.y + line) * info.pitch + part.x + column;
  typename Traits::Start upper, lower;
  if (column < part.width && line < part.height)
    upper = Traits::start(state, info, chunk, channels, pixels, place, warp * 64 + lane);
  if (column < part.width && line + 4 < part.height)
    lower = Traits::start(state, info, chunk, channels, pixels, place + 4 * int64_t(info.pitch),
                          warp * 64 + 32 + lane);
  const int warp_count = min(chunk.count, __reduce_max_sync(kWholeWarp, max(upper.last, lower.last)) + 1);
  const int lane_sum = Traits::place_of_sum(value_of_lane<Traits::kGradients>(lane));
  wait_for_copies();
  __syncthreads();

  for (int start = 0; start < chunk.count; start += kGroup) {
    Sums<Traits::kRecordQuads>& group = sums[start / kGroup % Traits::kBuffers];
    const float4* splats = staged + Traits::kQuads * start;
    unsigned hits = 0, left = 0;
    if (start < warp_count) left = reaching<Traits>(splats + Traits::kQuads * lane, start + lane < warp_count, part);
    while (left != 0) {
      const int k = __ffs(left) - 1;
      left &= left - 1;
      const float4* splat = splats + Traits::kQuads * k;
      auto seen = Traits::see(splat, x, upper_y, lower_y);
      const bool upper_counts = seen.upper() && start + k <= upper.last;
      const bool lower_counts = seen.lower() && start + k <= lower.last;
      if (!__any_sync(kWholeWarp, upper_counts || lower_counts)) continue;
      float own[Traits::kGradients];
      Traits::pass(splat, seen, upper_counts, lower_counts, start + k, upper, lower, own);
      const float sum = spread_sums(own, lane);
      if (lane_sum >= 0) reinterpret_cast<float*>(group.quads[warp][k])[lane_sum] = sum;
      hits |= 1u << k;
    }
    if (lane == 0) group.hits[warp] = hits;
    __syncthreads();  // two buffers: the thread that fills this one again has passed the next barrier, after this flush
    flush<Traits>(group, splats, staged_rows + start, target, warp, lane);
    if constexpr (Traits::kBuffers == 1) __syncthreads();
  }
}

}  // namespace
}  // namespace nsmg
