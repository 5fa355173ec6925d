// Backward compositing of 16x16 tiles, two pixels a thread: a block takes one chunk of 256 splats of a tile and walks
// it front to back from the checkpoint, so no list is walked by one block alone, however long it is. A warp sums each
// splat's gradients over its 64 pixels, the block over its warps every 32 splats; then they go to memory at once.
#include "cuda/raster/rasterize_device.h"

namespace nsmg {
namespace {

constexpr int kGroup = 32;

struct Sums {
  float4 quads[kTileWarps][kGroup][kRecordQuads];
  unsigned hits[kTileWarps];  // which splats the warp has sums of
};

// The sums of both pixels of a thread, in the order of SumIndex but without those that are not asked for.
template <int kChannels, bool kAbs>
struct ThreadSums {
  static constexpr int kCount = kSumFeature + kChannels + (kAbs ? 2 : 0);
  float values[kCount];

  __device__ __forceinline__ ThreadSums(const ScaledSplat& s, float dx, float upper_dy, float lower_dy,
                                        const BackwardStep& upper, const BackwardStep& lower,
                                        const PixelStart<kChannels>& upper_pixel,
                                        const PixelStart<kChannels>& lower_pixel) {
    const float sum = upper.v_sigma + lower.v_sigma;
    const float upper_sum = upper.v_sigma * upper_dy, lower_sum = lower.v_sigma * lower_dy;
    const float sum_x = sum * dx, sum_y = upper_sum + lower_sum;
    values[kSumX] = sum_x;
    values[kSumY] = sum_y;
    values[kSumXX] = sum_x * dx;
    values[kSumXY] = sum_y * dx;
    values[kSumYY] = fmaf(upper_sum, upper_dy, lower_sum * lower_dy);
    values[kSum1] = sum;
#pragma unroll
    for (int d = 0; d < kChannels; ++d)
      values[kSumFeature + d] = fmaf(upper.weight, upper_pixel.v_out[d], lower.weight * lower_pixel.v_out[d]);
    if constexpr (kAbs) {
      const float a_dx = 2.0f * s.a * dx, b_dx = s.b * dx, c2 = 2.0f * s.c;
      values[kCount - 2] = fabsf(upper.v_sigma * fmaf(s.b, upper_dy, a_dx)) +
                           fabsf(lower.v_sigma * fmaf(s.b, lower_dy, a_dx));
      values[kCount - 1] = fabsf(upper.v_sigma * fmaf(c2, upper_dy, b_dx)) +
                           fabsf(lower.v_sigma * fmaf(c2, lower_dy, b_dx));
    }
  }
};

template <int kChannels>
__device__ __forceinline__ BackwardStep step(PixelStart<kChannels>& pixel, bool counts, float exponent,
                                             const float (&features)[4]) {
  float value = pixel.v_alpha;
#pragma unroll
  for (int d = 0; d < kChannels; ++d) value = fmaf(pixel.v_out[d], features[d], value);
  return step_backward(counts ? exp2_fast(exponent) : 0.0f, value, pixel.transmittance, pixel.remainder);
}

// Adds the block's sums of 32 splats to their records; each warp does 8 splats, three lanes a splat.
__device__ __forceinline__ void flush(const Sums& sums, const float4* splats, const int* rows,
                                      const RecordTarget& target, int warp, int lane) {
  const int k = warp * (kGroup / kTileWarps) + lane / kRecordQuads, quad = lane % kRecordQuads;
  if (lane >= kGroup / kTileWarps * kRecordQuads) return;
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
  float* record = record_of(target, rows[k]);
  if (record == nullptr) return;
  add_quad(record + 4 * quad, record_quad(quad, total, unpack(splats[3 * k], splats[3 * k + 1])), target.system_scope);
}

template <int kChannels, bool kAbs>
__global__ void __launch_bounds__(kTileThreads, 8)
backward(const int32_t* __restrict__ row_ids, int rows, int channels, RasterState state, RasterGradients pixels,
         RecordTarget target) {
  constexpr int kCount = ThreadSums<kChannels, kAbs>::kCount;
  __shared__ float4 staged[kChunk * 3];
  __shared__ int staged_rows[kChunk];
  __shared__ Sums sums[2];
  TileInfo info;
  const Chunk chunk = chunk_of(state, blockIdx.x, info);
  if (chunk.count <= 0) return;  // the whole block
  stage_chunk(row_ids, chunk, state.table, rows, staged, staged_rows);
  // Sums that are never asked for stay zero.
  for (int i = threadIdx.x; i < 2 * kTileWarps * kGroup * kRecordQuads; i += kTileThreads) {
    const int buffer = i / (kTileWarps * kGroup * kRecordQuads);
    (&sums[buffer].quads[0][0][0])[i % (kTileWarps * kGroup * kRecordQuads)] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SubTile part = sub_tile(info, warp);
  const int column = lane % kSubTile, line = lane / kSubTile;
  const float x = float(info.x0 + part.x + column) + 0.5f;
  const float upper_y = float(info.y0 + part.y + line) + 0.5f, lower_y = upper_y + 4.0f;
  const int64_t place = info.pixel + int64_t(part.y + line) * info.pitch + part.x + column;
  PixelStart<kChannels> upper, lower;
  if (column < part.width && line < part.height)
    upper = pixel_start<kChannels>(state, info, chunk, channels, pixels, place, warp * 64 + lane);
  if (column < part.width && line + 4 < part.height)
    lower = pixel_start<kChannels>(state, info, chunk, channels, pixels, place + 4 * int64_t(info.pitch),
                                   warp * 64 + 32 + lane);
  const int warp_count = min(chunk.count, __reduce_max_sync(kWholeWarp, max(upper.last, lower.last)) + 1);
  int lane_sum = value_of_lane<kCount>(lane);
  if (kAbs && lane_sum >= kCount - 2) lane_sum += kSumAbs - (kCount - 2);
  wait_for_copies();
  __syncthreads();

  for (int start = 0; start < chunk.count; start += kGroup) {
    Sums& group = sums[start / kGroup % 2];
    const float4* splats = staged + 3 * start;
    unsigned hits = 0, left = 0;
    if (start < warp_count) left = reaching(splats + 3 * lane, start + lane < warp_count, part);
    while (left != 0) {
      const int k = __ffs(left) - 1;
      left &= left - 1;
      const ScaledSplat s = unpack(splats[3 * k], splats[3 * k + 1]);
      const float dx = s.mean_x - x, upper_dy = s.mean_y - upper_y, lower_dy = s.mean_y - lower_y;
      const float b_dx = s.b * dx, a_dx_dx = s.a * dx * dx;
      const float upper_sigma = sigma2_of_column(b_dx, a_dx_dx, s.c, upper_dy);
      const float lower_sigma = sigma2_of_column(b_dx, a_dx_dx, s.c, lower_dy);
      const bool upper_counts = float_bits(upper_sigma) < s.limit && start + k <= upper.last;
      const bool lower_counts = float_bits(lower_sigma) < s.limit && start + k <= lower.last;
      if (!__any_sync(kWholeWarp, upper_counts || lower_counts)) continue;
      const float4 f = splats[3 * k + 2];
      const float features[4] = {f.x, f.y, f.z, splats[3 * k + 1].w};
      const BackwardStep above = step(upper, upper_counts, s.log2_opacity - upper_sigma, features);
      const BackwardStep below = step(lower, lower_counts, s.log2_opacity - lower_sigma, features);
      const ThreadSums<kChannels, kAbs> own(s, dx, upper_dy, lower_dy, above, below, upper, lower);
      const float sum = spread_sums(own.values, lane);
      if (lane_sum >= 0) reinterpret_cast<float*>(group.quads[warp][k])[lane_sum] = sum;
      hits |= 1u << k;
    }
    if (lane == 0) group.hits[warp] = hits;
    __syncthreads();  // two buffers: whoever fills this one again has passed the next barrier, after this flush
    flush(group, splats, staged_rows + start, target, warp, lane);
  }
}

template <int kChannels>
auto kernel_of(bool absgrad) {
  return absgrad ? backward<kChannels, true> : backward<kChannels, false>;
}

}  // namespace

cudaError_t launch_backward(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                                  const RasterGradients& pixels, const RecordTarget& target, bool absgrad,
                                  cudaStream_t stream) {
  if (shape.tiles == 0 || shape.rows == 0) return cudaSuccess;  // without tiles nothing has written the slots
  const auto kernel = shape.packed_channels() == 4 ? kernel_of<4>(absgrad) : kernel_of<3>(absgrad);
  kernel<<<unsigned(shape.chunk_slots()), kTileThreads, 0, stream>>>(in.row_ids, int(shape.rows), shape.channels,
                                                                     state, pixels, target);
  return cudaGetLastError();
}

}  // namespace nsmg
