// What the rasterization kernels share: staging of packed splats, the place of a thread's two pixels, reductions over a
// warp, and the place of gradient records. A 16x16 tile has 128 threads; warp w has the 8x8 sub-tile (w % 2, w / 2) of
// it, lane l the pixels (l % 8, l / 8) and (l % 8, l / 8 + 4) of that.
#pragma once

#include <cuda_runtime.h>

#include "common/compositing.h"
#include "cuda/common/memory_device.h"
#include "cuda/raster/rasterize.h"

namespace nsmg {

constexpr unsigned kWholeWarp = 0xffffffffu;
constexpr int kTileThreads = 128;
constexpr int kTileWarps = kTileThreads / 32;
constexpr int kSubTile = 8;
constexpr int kRecordQuads = 3;  // the quarters of a gradient record in use: 12 of 16 floats

// A row of the table; whatever row_ids holds, the address stays inside.
__device__ __forceinline__ int table_row(const int32_t* __restrict__ row_ids, int place, int rows) {
  return int(min(unsigned(row_ids[place]), unsigned(rows - 1)));
}

struct SubTile {
  int x, y, width, height;      // of the warp's pixels within the tile; width or height <= 0: none
  float x_lo, x_hi, y_lo, y_hi; // their outermost pixel centres
};

__device__ __forceinline__ SubTile sub_tile(const TileInfo& tile, int warp) {
  SubTile s;
  s.x = warp % 2 * kSubTile;
  s.y = warp / 2 * kSubTile;
  s.width = min(kSubTile, tile.width - s.x);
  s.height = min(kSubTile, tile.height - s.y);
  s.x_lo = float(tile.x0 + s.x) + 0.5f;
  s.y_lo = float(tile.y0 + s.y) + 0.5f;
  s.x_hi = s.x_lo + float(s.width - 1);
  s.y_hi = s.y_lo + float(s.height - 1);
  return s;
}

__device__ __forceinline__ ScaledSplat unpack(const float4& first, const float4& second) {
  return {first.x, first.y, first.z, first.w, second.x, second.y, __float_as_uint(second.z)};
}

struct GaussianOverlap {
  static __device__ __forceinline__ bool overlaps(const float4* splat, const SubTile& s) {
    return overlaps_box(unpack(splat[0], splat[1]), s.x_lo, s.x_hi, s.y_lo, s.y_hi);
  }
};

// Mask of the 32 staged splats, one a lane, that may overlap the sub-tile.
template <typename Traits = GaussianOverlap>
__device__ __forceinline__ unsigned reaching(const float4* staged, bool exists, const SubTile& s) {
  return __ballot_sync(kWholeWarp, exists && Traits::overlaps(staged, s));
}

// What a block of the backward pass works on: splats [begin, begin + count) of row_ids, the chunk-th 256 of a tile.
struct Chunk {
  int tile, index, begin, count;  // count <= 0: nothing to do
};

__device__ __forceinline__ Chunk chunk_of(const RasterState& state, int slot, TileInfo& info) {
  const int tile = state.slot_tile[slot];
  if (tile < 0) return {-1, 0, 0, 0};
  info = state.tiles[tile];
  const int index = slot - (info.first / kChunk + tile), begin = info.first + index * kChunk;
  return {tile, index, begin, min(begin + kChunk, state.reached[tile]) - begin};
}

// Copies the chunk's packed splats, kQuads pieces each, and their rows into shared memory; wait_for_copies() and a
// barrier must follow.
template <int kQuads = 3>
__device__ __forceinline__ void stage_chunk(const int32_t* __restrict__ row_ids, const Chunk& chunk,
                                            const float4* __restrict__ table, int rows, float4* staged,
                                            int* staged_rows) {
  constexpr int kChunks = kChunk * kQuads / kTileThreads;
  int piece_rows[kChunks];
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    const int splat = (int(threadIdx.x) + j * kTileThreads) / kQuads;
    piece_rows[j] = splat < chunk.count ? table_row(row_ids, chunk.begin + splat, rows) : -1;
  }
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
    const int piece = int(threadIdx.x) + j * kTileThreads;
    if (piece_rows[j] < 0) continue;
    copy_async_16(staged + piece, table + kQuads * int64_t(piece_rows[j]) + piece % kQuads);
    if (piece % kQuads == 0) staged_rows[piece / kQuads] = piece_rows[j];
  }
}

// What the pixels' state was before a chunk of the tile, which is not the first.
template <int kPixelSums>
__device__ __forceinline__ float* checkpoint_before(const RasterState& state, const TileInfo& info, int chunk) {
  return state.checkpoints + (int64_t(info.first / kChunk) + chunk - 1) * (kChunk * (1 + kPixelSums));
}

__device__ __forceinline__ bool is_split(const RasterState& state, const TileInfo& info) {
  return info.end - info.first > *state.split_above;
}

// A pixel at the start of a chunk.
template <int kChannels>
struct PixelStart {
  float transmittance = 0.0f;
  float remainder = 0.0f;      // sum of weight times value over the splats from here on
  float v_alpha = 0.0f;
  float v_out[kChannels] = {};
  int last = -1;               // counted from the chunk's first splat; negative: nothing to do here
};

// `thread` is the pixel's place among the 256 of a checkpoint: 64 warp + 32 (0: upper, 1: lower pixel) + lane.
template <int kChannels>
__device__ __forceinline__ PixelStart<kChannels> pixel_start(const RasterState& state, const TileInfo& info,
                                                             const Chunk& chunk, int channels,
                                                             const RasterGradients& pixels, int64_t place, int thread) {
  PixelStart<kChannels> start;
  start.last = pixels.last[place] - chunk.begin;
  if (start.last < 0) return start;  // neither has such a pixel a checkpoint
  float sums[kChannels] = {};
  start.transmittance = 1.0f;
  if (chunk.index > 0) {
    const float* checkpoint = checkpoint_before<kChannels>(state, info, chunk.index) + thread;
    start.transmittance = fabsf(checkpoint[0]);
#pragma unroll
    for (int d = 0; d < kChannels; ++d) sums[d] = checkpoint[(d + 1) * kChunk];
  }
  const int within = chunk.index % kSegmentChunks;
  if (within > 0 && chunk.index > within && is_split(state, info)) {  // the others are counted from the list's start
    const float* checkpoint = checkpoint_before<kChannels>(state, info, chunk.index - within) + thread;
#pragma unroll
    for (int d = 0; d < kChannels; ++d) sums[d] += checkpoint[(d + 1) * kChunk];
  }
  start.v_alpha = pixels.v_alpha[place];
  start.remainder = start.v_alpha * (start.transmittance - (1.0f - fabsf(pixels.alpha[place])));
#pragma unroll
  for (int d = 0; d < kChannels; ++d) {
    if (kChannels == 3 && d >= channels) continue;
    start.v_out[d] = pixels.v_out[place * channels + d];
    start.remainder = fmaf(start.v_out[d], pixels.out[place * channels + d] - sums[d], start.remainder);
  }
  return start;
}

// Sums each of N <= 32 values over the warp, with about N + 3 shuffles: at every step a lane keeps one half of its
// values and hands the other to its partner. Lane l returns the sum of value `value_of_lane<N>(l)`.
template <int N, int kBit = 16>
__device__ __forceinline__ float spread_sums(const float (&values)[N], int lane) {
  if constexpr (kBit == 0) {
    static_assert(N == 1, "at most 32 values");
    return values[0];
  } else if constexpr (N == 1) {
    const float sum[1] = {values[0] + __shfl_xor_sync(kWholeWarp, values[0], kBit)};
    return spread_sums<1, kBit / 2>(sum, lane);
  } else {
    constexpr int kHalf = (N + 1) / 2;
    const bool upper = lane & kBit;
    float sums[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float low = values[i], high = i + kHalf < N ? values[i + kHalf < N ? i + kHalf : 0] : 0.0f;
      const float received = __shfl_xor_sync(kWholeWarp, upper ? low : high, kBit);
      sums[i] = (upper ? high : low) + received;
    }
    return spread_sums<kHalf, kBit / 2>(sums, lane);
  }
}

// -1 where the lane holds no sum, or another one holds the same.
template <int N>
__device__ __forceinline__ int value_of_lane(int lane) {
  int index = 0, held = N, present = N;  // held: values a lane still has; present: those of them that are not filling
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    const bool upper = lane & bit;
    if (held == 1) {
      if (upper) present = 0;
      continue;
    }
    const int half = (held + 1) / 2;
    index += upper ? half : 0;
    present = upper ? present - half : min(present, half);
    held = half;
  }
  return present > 0 ? index : -1;
}

// The sums of a splat in the order in which they are kept: moments of v_sigma by (dx, dy) = mean - pixel, features'
// gradients, absolute sums in units of 1 / ln 2. One quad after the other makes the quads of a gradient record.
enum SumIndex {
  kSumX, kSumY, kSumXX, kSumXY, kSumYY, kSum1, kSumFeature,
  kSumAbs = kSumFeature + kFastChannels,
  kSums = kSumAbs + 2
};

__device__ __forceinline__ float4 record_quad(int quad, const float4& sums, const ScaledSplat& s) {
  if (quad == 0) {
    const float a = 2.0f * kLn2 * s.a, b = kLn2 * s.b, c = 2.0f * kLn2 * s.c;
    return make_float4(a * sums.x + b * sums.y, b * sums.x + c * sums.y, 0.5f * sums.z, sums.w);
  }
  if (quad == 1) return make_float4(0.5f * sums.x, -sums.y * exp2_fast(-s.log2_opacity), sums.z, sums.w);
  return make_float4(sums.x, sums.y, kLn2 * sums.z, kLn2 * sums.w);
}

// The record of a row, or null where it has none.
template <int kFloats = kRecordFloats>
__device__ __forceinline__ float* record_of(const RecordTarget& target, int row) {
  if (target.sinks == nullptr) return target.local + kFloats * static_cast<int64_t>(row);
  const int owner = target.owners[row];
  if (owner < 0) return nullptr;
  return reinterpret_cast<float*>(target.sinks[owner]) + kFloats * static_cast<int64_t>(target.slots[row]);
}

}  // namespace nsmg
