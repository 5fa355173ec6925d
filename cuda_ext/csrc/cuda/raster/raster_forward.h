// Forward compositing of 16x16 tiles, for any kind of splat: a template over its traits. A block takes one tile, long
// lists first. Packed splats come into shared memory 128 at a time, the next ones while these are blended; each warp
// keeps those that may overlap its 8x8 sub-tile. Every 256 splats the pixels' state is left for the backward pass.
//
// One list that is far longer than others would keep all waiting. So lists above a length are split into segments, a
// block each. The first pass finds what each segment alone lets through, and draws all other tiles. The products of
// what is let through are what the segments begin with in the second pass. The last block of a tile to end adds up.
// Sums are those of an unsplit list but for rounding.
//
// Traits say: kQuads (float4 of a packed splat), kSums (of a pixel), kForwardBlocks (of a multiprocessor), Outputs
// (RasterOutputs, or a struct that begins so), overlaps() (whether a splat may count in a sub-tile), draw() (a splat
// into a thread's two pixels), write_sums(); where lists are split also read_sum() and WithoutSums (the traits with
// kSums 0).
#pragma once

#include "cuda/raster/rasterize_device.h"

namespace nsmg {
namespace {

constexpr int kBatch = 128;
static_assert(kSegment % (2 * kBatch) == 0, "the next segment may fill the first buffer while this one's last is read");
constexpr float kBeganClosed = -2.0f;  // the transmittance of a pixel that was closed before the segment

template <int kPixelSums>
struct Pixel {
  float transmittance;  // negative: closed, or no pixel at all
  int last = -1;
  float sums[kPixelSums > 0 ? kPixelSums : 1] = {};
};

template <typename Traits>
using PixelOf = Pixel<Traits::kSums>;

// The pieces of consecutive lanes lie side by side, kQuads to a splat, so that a splat's sectors are asked for once.
template <int kQuads>
struct Stager {
  static constexpr int kChunks = kBatch * kQuads / kTileThreads;  // of 16 bytes, that a thread copies
  const int32_t* __restrict__ row_ids;  // of the list, or of a segment
  const float4* __restrict__ table;
  int rows, count;
  int piece_rows[kChunks];

  __device__ __forceinline__ void find_rows(int batch) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int splat = batch * kBatch + (int(threadIdx.x) + j * kTileThreads) / kQuads;
      piece_rows[j] = splat < count ? table_row(row_ids, splat, rows) : -1;
    }
  }

  __device__ __forceinline__ void copy(float4* staged) const {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int piece = int(threadIdx.x) + j * kTileThreads;
      if (piece_rows[j] >= 0) copy_async_16(staged + piece, table + kQuads * int64_t(piece_rows[j]) + piece % kQuads);
    }
  }
};

template <typename Traits>
__device__ __forceinline__ void write_pixel(const PixelOf<Traits>& pixel, const typename Traits::Outputs& outputs,
                                            int64_t place, int channels) {
  const float covered = 1.0f - fabsf(pixel.transmittance);
  outputs.alpha[place] = outputs.mark_stops && pixel.transmittance < 0.0f ? -covered : covered;
  outputs.last[place] = pixel.last;
  Traits::write_sums(pixel.sums, outputs, place, channels);
}

template <int kPixelSums>
__device__ __forceinline__ void write_checkpoint(const Pixel<kPixelSums>& pixel, float* checkpoint) {
  checkpoint[0] = pixel.transmittance;
#pragma unroll
  for (int d = 0; d < kPixelSums; ++d) checkpoint[(d + 1) * kChunk] = pixel.sums[d];
}

// The two pixels of a thread, one four lines below the other.
struct Spot {
  SubTile part;
  int column, line, thread;  // thread: the upper pixel's place among the 256 of a checkpoint, the lower one's is 32 on

  __device__ __forceinline__ explicit Spot(const TileInfo& info)
      : part(sub_tile(info, threadIdx.x / 32)),
        column(threadIdx.x % 32 % kSubTile),
        line(threadIdx.x % 32 / kSubTile),
        thread(threadIdx.x / 32 * 64 + threadIdx.x % 32) {}
  __device__ __forceinline__ bool has_upper() const { return column < part.width && line < part.height; }
  __device__ __forceinline__ bool has_lower() const { return column < part.width && line + 4 < part.height; }
  __device__ __forceinline__ int64_t upper(const TileInfo& info) const {
    return info.pixel + int64_t(part.y + line) * info.pitch + part.x + column;
  }
  __device__ __forceinline__ int64_t lower(const TileInfo& info) const { return upper(info) + 4 * int64_t(info.pitch); }
};

template <typename Traits>
using Stage = float4[2][kBatch * Traits::kQuads];

// Blends splats [begin, begin + count) of row_ids, a list or a segment of one, into the thread's pixels. Before each
// chunk of them but the first it leaves the pixels' state in `checkpoints`; without sums it leaves none.
template <typename Traits>
__device__ __forceinline__ void walk(const int32_t* __restrict__ row_ids, int begin, int count,
                                     const float4* __restrict__ table, int rows, const TileInfo& info,
                                     const Spot& spot, float* checkpoints, Stage<Traits>& staged, PixelOf<Traits>& upper,
                                     PixelOf<Traits>& lower) {
  const int lane = threadIdx.x % 32;
  const float x = float(info.x0 + spot.part.x + spot.column) + 0.5f;
  const float upper_y = float(info.y0 + spot.part.y + spot.line) + 0.5f, lower_y = upper_y + 4.0f;
  Stager<Traits::kQuads> stager{row_ids + begin, table, rows, count, {}};
  stager.find_rows(0);
  stager.copy(staged[0]);
  stager.find_rows(1);
  bool done = __all_sync(kWholeWarp, upper.transmittance < 0.0f && lower.transmittance < 0.0f);
  for (int batch = 0; batch * kBatch < count; ++batch) {
    wait_for_copies();
    if (__syncthreads_and(done)) break;  // also: all copies are in, and the other buffer is free
    stager.copy(staged[(batch + 1) % 2]);
    stager.find_rows(batch + 2);
    if (done) continue;
    if (Traits::kSums > 0 && batch > 0 && batch % (kChunk / kBatch) == 0) {
      float* checkpoint =
          checkpoints + int64_t(batch / (kChunk / kBatch) - 1) * (kChunk * (1 + Traits::kSums)) + spot.thread;
      write_checkpoint(upper, checkpoint);
      write_checkpoint(lower, checkpoint + 32);
    }
    const int here = min(kBatch, count - batch * kBatch);
    for (int start = 0; start < here && !done; start += 32) {
      const float4* splats = staged[batch % 2] + Traits::kQuads * start;
      unsigned left = reaching<Traits>(splats + Traits::kQuads * lane, start + lane < here, spot.part);
      while (left != 0) {
        const int k = __ffs(left) - 1;
        left &= left - 1;
        Traits::draw(splats + Traits::kQuads * k, x, upper_y, lower_y, begin + batch * kBatch + start + k, upper, lower);
      }
      done = __all_sync(kWholeWarp, upper.transmittance < 0.0f && lower.transmittance < 0.0f);
    }
  }
  wait_for_copies();
}

// Writes both pixels, and the position of the deepest splat of the tile that touched any.
template <typename Traits>
__device__ __forceinline__ void write_tile(const PixelOf<Traits>& upper, const PixelOf<Traits>& lower,
                                           const Spot& spot, const TileInfo& info, int tile, const RasterState& state,
                                           const typename Traits::Outputs& outputs, int channels,
                                           int (&warp_last)[kTileWarps]) {
  if (spot.has_upper()) write_pixel<Traits>(upper, outputs, spot.upper(info), channels);
  if (spot.has_lower()) write_pixel<Traits>(lower, outputs, spot.lower(info), channels);
  const int last = __reduce_max_sync(kWholeWarp, max(upper.last, lower.last));
  if (threadIdx.x % 32 == 0) warp_last[threadIdx.x / 32] = last;
  __syncthreads();
  if (threadIdx.x == 0) {
    const int deepest = max(max(warp_last[0], warp_last[1]), max(warp_last[2], warp_last[3]));
    state.reached[tile] = deepest < 0 ? info.first : deepest + 1;
  }
}

// ---- lists that are split ----

__device__ __forceinline__ int segments_of(const TileInfo& info) {
  return (info.end - info.first + kSegment - 1) / kSegment;
}

__device__ __forceinline__ int begin_of(const TileInfo& info, const Segment& segment) {
  return info.first + segment.index * kSegment;
}

__device__ __forceinline__ int count_of(const TileInfo& info, const Segment& segment) {
  return min(kSegment, info.end - begin_of(info, segment));
}

// What a pixel begins a segment with.
__device__ __forceinline__ float transmittance_before(const float* alone, int index) {
  float product = 1.0f;
  for (int k = 0; k < index; ++k) {
    const float own = alone[k * kChunk];
    product *= own;
    if (own < 0.0f || product <= kTransmittanceMin<float>) return kBeganClosed;
  }
  return product;
}

// What a segment leaves of a pixel: the checkpoint that follows it or, behind the last one, the outputs.
template <typename Traits>
__device__ __forceinline__ void close_segment(const PixelOf<Traits>& pixel, float* checkpoint,
                                              const typename Traits::Outputs& outputs, int64_t place, int channels) {
  if (pixel.last >= 0) atomicMax(outputs.last + place, pixel.last);
  if (checkpoint != nullptr) {
    write_checkpoint(pixel, checkpoint);
  } else {
    outputs.alpha[place] = pixel.transmittance;
    Traits::write_sums(pixel.sums, outputs, place, channels);
  }
}

// A pixel, all of whose segments have ended. Sums at their ends become those from the list's start.
template <typename Traits>
__device__ __forceinline__ PixelOf<Traits> add_up(float* checkpoint, int segments,
                                                  const typename Traits::Outputs& outputs, int64_t place,
                                                  int channels) {
  PixelOf<Traits> pixel;
  pixel.transmittance = 1.0f;
  // Other blocks wrote this: it is not looked for in this multiprocessor's own cache.
  for (int k = 0; k + 1 < segments; ++k, checkpoint += kSegmentChunks * kChunk * (1 + Traits::kSums)) {
    const float after = __ldcg(checkpoint);
    if (after != kBeganClosed) pixel.transmittance = after;
#pragma unroll
    for (int d = 0; d < Traits::kSums; ++d) {
      pixel.sums[d] += __ldcg(checkpoint + (d + 1) * kChunk);
      checkpoint[(d + 1) * kChunk] = pixel.sums[d];
    }
  }
  const float after = __ldcg(outputs.alpha + place);
  pixel.transmittance = after != kBeganClosed ? after : -fabsf(pixel.transmittance);
#pragma unroll
  for (int d = 0; d < Traits::kSums; ++d)
    if (d < channels) pixel.sums[d] += Traits::read_sum(outputs, place, channels, d);
  pixel.last = __ldcg(outputs.last + place);
  return pixel;
}

// Leaves what has become of a segment. Whether all of the tile's have ended; then the pixels are the whole list's.
template <typename Traits>
__device__ __forceinline__ bool end_segment(PixelOf<Traits>& upper, PixelOf<Traits>& lower, const Segment& segment,
                                            const Spot& spot, const TileInfo& info, const RasterState& state,
                                            const RasterPlan& plan, const typename Traits::Outputs& outputs,
                                            int channels, int& ended) {
  const int segments = segments_of(info);
  float *above = nullptr, *below = nullptr;
  if (segment.index + 1 < segments) {
    above = checkpoint_before<Traits::kSums>(state, info, (segment.index + 1) * kSegmentChunks) + spot.thread;
    below = above + 32;
  }
  if (spot.has_upper()) close_segment<Traits>(upper, above, outputs, spot.upper(info), channels);
  if (spot.has_lower()) close_segment<Traits>(lower, below, outputs, spot.lower(info), channels);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ended = atomicAdd(plan.ended + segment.tile, 1) + 1;
  __syncthreads();
  if (ended != segments) return false;  // it is written again behind the next segment's barriers
  __threadfence();
  float* first = checkpoint_before<Traits::kSums>(state, info, kSegmentChunks) + spot.thread;
  if (spot.has_upper()) upper = add_up<Traits>(first, segments, outputs, spot.upper(info), channels);
  if (spot.has_lower()) lower = add_up<Traits>(first + 32, segments, outputs, spot.lower(info), channels);
  return true;
}

// ---- the kernels ----

// Computes each segment's own transmittance, a block one segment after the other. Last segments need none.
template <typename Traits>
__device__ __forceinline__ void let_through(const int32_t* __restrict__ row_ids, int rows, const RasterState& state,
                                            const RasterPlan& plan, int segment_blocks,
                                            const typename Traits::Outputs& outputs, Stage<Traits>& staged) {
  const int count = min(*plan.segment_count, plan.most);
  for (int i = blockIdx.x; i < count; i += segment_blocks) {
    const Segment segment = plan.segments[i];
    const TileInfo info = state.tiles[segment.tile];
    const Spot spot(info);
    if (segment.index == 0) {
      if (spot.has_upper()) outputs.last[spot.upper(info)] = -1;
      if (spot.has_lower()) outputs.last[spot.lower(info)] = -1;
    }
    if (segment.index + 1 == segments_of(info)) continue;  // the whole block
    Pixel<0> upper, lower;
    upper.transmittance = spot.has_upper() ? 1.0f : -1.0f;
    lower.transmittance = spot.has_lower() ? 1.0f : -1.0f;
    walk<typename Traits::WithoutSums>(row_ids, begin_of(info, segment), count_of(info, segment), state.table, rows,
                                       info, spot, nullptr, staged, upper, lower);
    float* alone = plan.transmittances + int64_t(i) * kChunk + spot.thread;
    alone[0] = upper.transmittance;
    alone[32] = lower.transmittance;
  }
}

// Draws tiles whose lists are whole, a block each; the first `segment_blocks` blocks look at segments instead.
template <typename Traits, bool kSplits>
__global__ void __launch_bounds__(kTileThreads, Traits::kForwardBlocks)
forward(const int32_t* __restrict__ row_ids, int rows, int channels, RasterState state, RasterPlan plan,
        int segment_blocks, typename Traits::Outputs outputs) {
  __shared__ Stage<Traits> staged;
  __shared__ int warp_last[kTileWarps];
  if constexpr (kSplits) {
    if (int(blockIdx.x) < segment_blocks) {
      let_through<Traits>(row_ids, rows, state, plan, segment_blocks, outputs, staged);
      return;
    }
  }
  const int tile = plan.order[blockIdx.x - segment_blocks];
  const TileInfo info = state.tiles[tile];
  if (kSplits && is_split(state, info)) return;
  const Spot spot(info);
  PixelOf<Traits> upper, lower;
  upper.transmittance = spot.has_upper() ? 1.0f : -1.0f;
  lower.transmittance = spot.has_lower() ? 1.0f : -1.0f;
  walk<Traits>(row_ids, info.first, rows > 0 ? info.end - info.first : 0, state.table, rows, info, spot,
               checkpoint_before<Traits::kSums>(state, info, 1), staged, upper, lower);
  write_tile<Traits>(upper, lower, spot, info, tile, state, outputs, channels, warp_last);
}

// Draws the segments behind `forward`, a block one after the other.
template <typename Traits>
__global__ void __launch_bounds__(kTileThreads, 8)
forward_segments(const int32_t* __restrict__ row_ids, int rows, int channels, RasterState state, RasterPlan plan,
                 typename Traits::Outputs outputs) {
  __shared__ Stage<Traits> staged;
  __shared__ int warp_last[kTileWarps], ended;
  const int count = min(*plan.segment_count, plan.most);
  for (int i = blockIdx.x; i < count; i += gridDim.x) {
    const Segment segment = plan.segments[i];
    const TileInfo info = state.tiles[segment.tile];
    const Spot spot(info);
    PixelOf<Traits> upper, lower;
    const float* alone = plan.transmittances + int64_t(i - segment.index) * kChunk + spot.thread;
    upper.transmittance = spot.has_upper() ? transmittance_before(alone, segment.index) : -1.0f;
    lower.transmittance = spot.has_lower() ? transmittance_before(alone + 32, segment.index) : -1.0f;
    walk<Traits>(row_ids, begin_of(info, segment), count_of(info, segment), state.table, rows, info, spot,
                 checkpoint_before<Traits::kSums>(state, info, segment.index * kSegmentChunks + 1), staged, upper,
                 lower);
    if (end_segment<Traits>(upper, lower, segment, spot, info, state, plan, outputs, channels, ended))
      write_tile<Traits>(upper, lower, spot, info, segment.tile, state, outputs, channels, warp_last);
  }
}

}  // namespace
}  // namespace nsmg
