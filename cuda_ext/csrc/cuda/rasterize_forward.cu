// Forward compositing of 16x16 tiles, up to 4 channels. A block takes one tile, long lists first. Packed splats come
// into shared memory 128 at a time, the next ones while these are blended; each warp keeps those that may reach its
// 8x8 sub-tile. Every 256 splats the pixels' state is left for the backward pass.
#include "rasterize_device.h"

namespace nsmg {
namespace {

constexpr int kBatch = 128;
constexpr int kPieces = kBatch * 3 / kTileThreads;  // 16-byte pieces that a thread brings

template <int kChannels>
struct Pixel {
  float transmittance;  // negative: closed, or no pixel at all
  int last = -1;
  float sums[kChannels] = {};
};

// The pieces of consecutive lanes lie side by side, three to a splat, so that a splat's two sectors are asked for once.
struct Stager {
  const int32_t* __restrict__ row_ids;  // of the tile
  const float4* __restrict__ table;
  int rows, count;
  int piece_rows[kPieces];

  __device__ __forceinline__ void find_rows(int batch) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int splat = batch * kBatch + (int(threadIdx.x) + j * kTileThreads) / 3;
      piece_rows[j] = splat < count ? table_row(row_ids, splat, rows) : -1;
    }
  }

  __device__ __forceinline__ void copy(float4* staged) const {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int piece = int(threadIdx.x) + j * kTileThreads;
      if (piece_rows[j] >= 0) copy_async_16(staged + piece, table + 3 * int64_t(piece_rows[j]) + piece % 3);
    }
  }
};

template <int kChannels>
__device__ __forceinline__ void blend(Pixel<kChannels>& pixel, bool counts, float exponent, const float (&features)[4],
                                      int position) {
  const float weight = blend_weight(counts ? exp2_fast(exponent) : 0.0f, pixel.transmittance);
#pragma unroll
  for (int d = 0; d < kChannels; ++d) pixel.sums[d] = fmaf(weight, features[d], pixel.sums[d]);
  if (weight > 0.0f) pixel.last = position;
}

template <int kChannels>
__device__ __forceinline__ void write_pixel(const Pixel<kChannels>& pixel, const RasterOutputs& outputs, int64_t place,
                                            int channels) {
  const float covered = 1.0f - fabsf(pixel.transmittance);
  outputs.alpha[place] = outputs.mark_stops && pixel.transmittance < 0.0f ? -covered : covered;
  outputs.last[place] = pixel.last;
  if (kChannels == 4) {
    *reinterpret_cast<float4*>(outputs.out + 4 * place) =
        make_float4(pixel.sums[0], pixel.sums[1], pixel.sums[2], pixel.sums[kChannels - 1]);
  } else {
#pragma unroll
    for (int d = 0; d < kChannels; ++d)
      if (d < channels) outputs.out[place * channels + d] = pixel.sums[d];
  }
}

template <int kChannels>
__global__ void __launch_bounds__(kTileThreads, 10)
forward(const int32_t* __restrict__ row_ids, int rows, int channels, RasterState state,
        const int32_t* __restrict__ tile_order, RasterOutputs outputs) {
  __shared__ float4 staged[2][kBatch * 3];
  __shared__ int warp_last[kTileWarps];
  const int tile = tile_order[blockIdx.x];
  const TileInfo info = state.tiles[tile];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SubTile part = sub_tile(info, warp);
  const int column = lane % kSubTile, line = lane / kSubTile;
  const float x = float(info.x0 + part.x + column) + 0.5f;
  const float upper_y = float(info.y0 + part.y + line) + 0.5f, lower_y = upper_y + 4.0f;
  Pixel<kChannels> upper, lower;
  upper.transmittance = column < part.width && line < part.height ? 1.0f : -1.0f;
  lower.transmittance = column < part.width && line + 4 < part.height ? 1.0f : -1.0f;
  float* checkpoints = state.checkpoints + int64_t(info.first / kChunk) * (kChunk * (1 + kChannels));

  const int count = rows > 0 ? info.end - info.first : 0;
  Stager stager{row_ids + info.first, state.table, rows, count, {}};
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
    if (batch > 0 && batch % (kChunk / kBatch) == 0) {
      float* checkpoint = checkpoints + int64_t(batch / (kChunk / kBatch) - 1) * (kChunk * (1 + kChannels)) +
                          warp * 64 + lane;
      checkpoint[0] = upper.transmittance;
      checkpoint[32] = lower.transmittance;
#pragma unroll
      for (int d = 0; d < kChannels; ++d) {
        checkpoint[(d + 1) * kChunk] = upper.sums[d];
        checkpoint[(d + 1) * kChunk + 32] = lower.sums[d];
      }
    }
    const int here = min(kBatch, count - batch * kBatch);
    for (int start = 0; start < here && !done; start += 32) {
      const float4* splats = staged[batch % 2] + 3 * start;
      unsigned left = reaching(splats + 3 * lane, start + lane < here, part);
      while (left != 0) {
        const int k = __ffs(left) - 1;
        left &= left - 1;
        const ScaledSplat s = unpack(splats[3 * k], splats[3 * k + 1]);
        const float dx = s.mean_x - x, upper_dy = s.mean_y - upper_y, lower_dy = s.mean_y - lower_y;
        const float b_dx = s.b * dx, a_dx_dx = s.a * dx * dx;
        const float upper_sigma = sigma2_of_column(b_dx, a_dx_dx, s.c, upper_dy);
        const float lower_sigma = sigma2_of_column(b_dx, a_dx_dx, s.c, lower_dy);
        const bool upper_counts = float_bits(upper_sigma) < s.limit, lower_counts = float_bits(lower_sigma) < s.limit;
        if (upper_counts || lower_counts) {
          const float4 f = splats[3 * k + 2];
          const float features[4] = {f.x, f.y, f.z, splats[3 * k + 1].w};
          const int position = info.first + batch * kBatch + start + k;
          blend(upper, upper_counts, s.log2_opacity - upper_sigma, features, position);
          blend(lower, lower_counts, s.log2_opacity - lower_sigma, features, position);
        }
      }
      done = __all_sync(kWholeWarp, upper.transmittance < 0.0f && lower.transmittance < 0.0f);
    }
  }
  wait_for_copies();

  const int64_t place = info.pixel + int64_t(part.y + line) * info.pitch + part.x + column;
  if (column < part.width && line < part.height) write_pixel(upper, outputs, place, channels);
  if (column < part.width && line + 4 < part.height)
    write_pixel(lower, outputs, place + 4 * int64_t(info.pitch), channels);
  const int last = __reduce_max_sync(kWholeWarp, max(upper.last, lower.last));
  if (lane == 0) warp_last[warp] = last;
  __syncthreads();
  if (threadIdx.x == 0) {
    const int deepest = max(max(warp_last[0], warp_last[1]), max(warp_last[2], warp_last[3]));
    state.reached[tile] = deepest < 0 ? info.first : deepest + 1;
  }
}

}  // namespace

cudaError_t launch_forward(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                           const int32_t* plan, const RasterOutputs& outputs, cudaStream_t stream) {
  if (shape.tiles == 0) return cudaSuccess;
  const auto kernel = shape.packed_channels() == 4 ? forward<4> : forward<3>;
  kernel<<<unsigned(shape.tiles), kTileThreads, 0, stream>>>(in.row_ids, int(shape.rows), shape.channels, state,
                                                             plan, outputs);
  return cudaGetLastError();
}

}  // namespace nsmg
