// Compositing for any tile size and any number of channels: one thread a pixel, lists read straight from memory, four
// channels a pass. Slower than the 16x16 kernels; the same rule by the same functions.
#include "cuda/raster/rasterize_device.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kPass = 4;

struct Place {
  bool exists;
  float x, y;
  int64_t pixel;
};

// The thread's pixel: block b of a tile has its pixels [256 b, 256 b + 256), row-major.
__device__ __forceinline__ Place place_of(const TileInfo& info, int tile_size, int block) {
  const int index = block * kThreads + threadIdx.x;
  const int column = index % tile_size, line = index / tile_size;
  return {column < info.width && line < info.height, float(info.x0 + column) + 0.5f, float(info.y0 + line) + 0.5f,
          info.pixel + int64_t(line) * info.pitch + column};
}

__device__ __forceinline__ ScaledSplat splat_of(const float4* __restrict__ table, int row) {
  return unpack(table[3 * int64_t(row)], table[3 * int64_t(row) + 1]);
}

__device__ __forceinline__ float sigma_at(const ScaledSplat& s, const Place& place) {
  const float dx = s.mean_x - place.x, dy = s.mean_y - place.y;
  return sigma2_of_column(s.b * dx, s.a * dx * dx, s.c, dy);
}

__global__ void __launch_bounds__(kThreads)
forward(const int32_t* __restrict__ row_ids, const float* __restrict__ features, int rows, int channels, int tile_size,
        int blocks, RasterState state, RasterOutputs outputs) {
  const TileInfo info = state.tiles[blockIdx.x / blocks];
  const Place place = place_of(info, tile_size, blockIdx.x % blocks);
  if (!place.exists) return;  // no thread waits for another here
  const int end = rows > 0 ? info.end : info.first;
  for (int channel = 0; channel < channels; channel += kPass) {
    float transmittance = 1.0f, sums[kPass] = {};
    int last = -1;
    for (int i = info.first; i < end && transmittance > 0.0f; ++i) {
      const int row = table_row(row_ids, i, rows);
      const ScaledSplat s = splat_of(state.table, row);
      const float sigma = sigma_at(s, place);
      if (float_bits(sigma) >= s.limit) continue;
      const float weight = blend_weight(exp2_fast(s.log2_opacity - sigma), transmittance);
      if (weight > 0.0f) last = i;
#pragma unroll
      for (int d = 0; d < kPass; ++d)
        if (channel + d < channels)
          sums[d] = fmaf(weight, features[int64_t(row) * channels + channel + d], sums[d]);
    }
#pragma unroll
    for (int d = 0; d < kPass; ++d)
      if (channel + d < channels) outputs.out[place.pixel * channels + channel + d] = sums[d];
    const float covered = 1.0f - fabsf(transmittance);
    outputs.alpha[place.pixel] = outputs.mark_stops && transmittance < 0.0f ? -covered : covered;
    outputs.last[place.pixel] = last;
  }
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) value += __shfl_xor_sync(kWholeWarp, value, bit);
  return value;
}

// v_features: null where the records hold the features' gradients.
__global__ void __launch_bounds__(kThreads)
backward(const int32_t* __restrict__ row_ids, const float* __restrict__ features, int rows, int channels, int tile_size,
         int blocks, RasterState state, RasterGradients pixels, RecordTarget target, float* __restrict__ v_features,
         bool absgrad) {
  const TileInfo info = state.tiles[blockIdx.x / blocks];
  const Place place = place_of(info, tile_size, blockIdx.x % blocks);
  const int lane = threadIdx.x % 32;
  int last = -1;
  float transmittance = 1.0f, remainder = 0.0f, v_alpha = 0.0f;
  const float* v_out = pixels.v_out + (place.exists ? place.pixel * channels : 0);
  if (place.exists) {
    last = pixels.last[place.pixel];
    v_alpha = pixels.v_alpha[place.pixel];
    remainder = v_alpha * fabsf(pixels.alpha[place.pixel]);
    for (int d = 0; d < channels; ++d) remainder = fmaf(v_out[d], pixels.out[place.pixel * channels + d], remainder);
  }
  const int end = min(info.end, __reduce_max_sync(kWholeWarp, last) + 1);  // one for the warp: all of it stays together
  const int lane_sum = value_of_lane<kSums>(lane);
  for (int i = info.first; i < end; ++i) {
    const int row = table_row(row_ids, i, rows);
    const ScaledSplat s = splat_of(state.table, row);
    const float sigma = sigma_at(s, place);
    const bool counts = i <= last && float_bits(sigma) < s.limit;
    if (!__any_sync(kWholeWarp, counts)) continue;
    const float* feature = features + int64_t(row) * channels;
    float value = v_alpha;
    if (counts)
      for (int d = 0; d < channels; ++d) value = fmaf(v_out[d], feature[d], value);
    const BackwardStep step =
        step_backward(counts ? exp2_fast(s.log2_opacity - sigma) : 0.0f, value, transmittance, remainder);
    float sums[kSums] = {};
    const float dx = s.mean_x - place.x, dy = s.mean_y - place.y;
    const float v_x = step.v_sigma * dx, v_y = step.v_sigma * dy;
    sums[kSumX] = v_x;
    sums[kSumY] = v_y;
    sums[kSumXX] = v_x * dx;
    sums[kSumXY] = v_y * dx;
    sums[kSumYY] = v_y * dy;
    sums[kSum1] = step.v_sigma;
    if (v_features == nullptr && counts) {
#pragma unroll
      for (int d = 0; d < kPass; ++d)
        if (d < channels) sums[kSumFeature + d] = step.weight * v_out[d];
    }
    if (absgrad) {
      sums[kSumAbs] = fabsf(fmaf(2.0f * s.a, v_x, s.b * v_y));
      sums[kSumAbs + 1] = fabsf(fmaf(2.0f * s.c, v_y, s.b * v_x));
    }
    const float sum = spread_sums(sums, lane);
    // Lanes 0 to 2 collect the quads of the record.
    __shared__ float4 collected[kThreads / 32][kRecordQuads];
    float4* own = collected[threadIdx.x / 32];
    if (lane_sum >= 0) reinterpret_cast<float*>(own)[lane_sum] = sum;
    __syncwarp();
    if (lane < kRecordQuads) {
      float* record = record_of(target, row);
      if (record != nullptr) add_quad(record + 4 * lane, record_quad(lane, own[lane], s), target.system_scope);
    }
    __syncwarp();
    if (v_features == nullptr) continue;
    for (int d = 0; d < channels; ++d) {
      const float v_feature = warp_sum(counts ? step.weight * v_out[d] : 0.0f);
      if (lane == 0) add_float(v_features + int64_t(row) * channels + d, v_feature, false);
    }
  }
}

int blocks_per_tile(const RasterShape& shape) { return (shape.tile_size * shape.tile_size + kThreads - 1) / kThreads; }

}  // namespace

cudaError_t launch_forward_generic(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                                   const RasterOutputs& outputs, cudaStream_t stream) {
  if (shape.tiles == 0) return cudaSuccess;
  const int blocks = blocks_per_tile(shape);
  forward<<<unsigned(shape.tiles * blocks), kThreads, 0, stream>>>(in.row_ids, in.features, int(shape.rows),
                                                                   shape.channels, shape.tile_size, blocks, state,
                                                                   outputs);
  return cudaGetLastError();
}

cudaError_t launch_backward_generic(const RasterInputs& in, const RasterShape& shape, const RasterState& state,
                                    const RasterGradients& pixels, const RecordTarget& target, float* v_features,
                                    bool absgrad, cudaStream_t stream) {
  if (shape.tiles == 0 || shape.rows == 0) return cudaSuccess;
  const int blocks = blocks_per_tile(shape);
  backward<<<unsigned(shape.tiles * blocks), kThreads, 0, stream>>>(in.row_ids, in.features, int(shape.rows),
                                                                    shape.channels, shape.tile_size, blocks, state,
                                                                    pixels, target, v_features, absgrad);
  return cudaGetLastError();
}

}  // namespace nsmg
