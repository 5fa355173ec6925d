// 3D Gaussians for the compositing of 16x16 tiles: see raster_forward.h and raster_backward.h. The two pixels of a thread
// lie in one column and share a part of the exponent.
#pragma once

#include "cuda/raster/rasterize_device.h"

namespace nsmg {
namespace {

template <int kChannels, bool kAbs = false>
struct GaussianTraits : GaussianOverlap {
  static constexpr int kQuads = 3, kSums = kChannels, kBackwardBlocks = 8, kBuffers = 2;
  static constexpr int kForwardBlocks = nsmg::kForwardBlocks;
  static constexpr int kGradients = kSumFeature + kChannels + (kAbs ? 2 : 0);
  static constexpr int kRecordQuads = nsmg::kRecordQuads, kRecordStride = kRecordFloats;
  using WithoutSums = GaussianTraits<0>;
  using Outputs = RasterOutputs;
  using Gradients = RasterGradients;
  using Start = PixelStart<kChannels>;

  // A splat from both pixels.
  struct Seen {
    ScaledSplat s;
    float dx, upper_dy, lower_dy, upper_sigma, lower_sigma;
    __device__ __forceinline__ bool upper() const { return float_bits(upper_sigma) < s.limit; }
    __device__ __forceinline__ bool lower() const { return float_bits(lower_sigma) < s.limit; }
  };

  static __device__ __forceinline__ Seen see(const float4* splat, float x, float upper_y, float lower_y) {
    Seen seen;
    const ScaledSplat& s = seen.s = unpack(splat[0], splat[1]);
    seen.dx = s.mean_x - x, seen.upper_dy = s.mean_y - upper_y, seen.lower_dy = s.mean_y - lower_y;
    const float b_dx = s.b * seen.dx, a_dx_dx = s.a * seen.dx * seen.dx;
    seen.upper_sigma = sigma2_of_column(b_dx, a_dx_dx, s.c, seen.upper_dy);
    seen.lower_sigma = sigma2_of_column(b_dx, a_dx_dx, s.c, seen.lower_dy);
    return seen;
  }

  template <typename Pixel>
  static __device__ __forceinline__ void blend(Pixel& pixel, bool counts, float exponent, const float (&features)[4],
                                               int position) {
    const float weight = blend_weight(counts ? exp2_fast(exponent) : 0.0f, pixel.transmittance);
#pragma unroll
    for (int d = 0; d < kChannels; ++d) pixel.sums[d] = fmaf(weight, features[d], pixel.sums[d]);
    if (weight > 0.0f) pixel.last = position;
  }

  template <typename Pixel>
  static __device__ __forceinline__ void draw(const float4* splat, float x, float upper_y, float lower_y, int position,
                                              Pixel& upper, Pixel& lower) {
    const Seen seen = see(splat, x, upper_y, lower_y);
    const bool upper_counts = seen.upper(), lower_counts = seen.lower();
    if (upper_counts || lower_counts) {
      const float4 f = splat[2];
      const float features[4] = {f.x, f.y, f.z, splat[1].w};
      blend(upper, upper_counts, seen.s.log2_opacity - seen.upper_sigma, features, position);
      blend(lower, lower_counts, seen.s.log2_opacity - seen.lower_sigma, features, position);
    }
  }

  static __device__ __forceinline__ void write_sums(const float* sums, const RasterOutputs& outputs, int64_t place,
                                                    int channels) {
    if (kChannels == 4) {
      *reinterpret_cast<float4*>(outputs.out + 4 * place) =
          make_float4(sums[0], sums[1], sums[2], sums[kChannels - 1]);
    } else {
#pragma unroll
      for (int d = 0; d < kChannels; ++d)
        if (d < channels) outputs.out[place * channels + d] = sums[d];
    }
  }

  static __device__ __forceinline__ float read_sum(const RasterOutputs& outputs, int64_t place, int channels, int d) {
    return __ldcg(outputs.out + place * channels + d);
  }

  static __device__ __forceinline__ Start start(const RasterState& state, const TileInfo& info, const Chunk& chunk,
                                                int channels, const RasterGradients& pixels, int64_t place,
                                                int thread) {
    return pixel_start<kChannels>(state, info, chunk, channels, pixels, place, thread);
  }

  static __device__ __forceinline__ BackwardStep step(Start& pixel, bool counts, float exponent,
                                                      const float (&features)[4]) {
    float value = pixel.v_alpha;
#pragma unroll
    for (int d = 0; d < kChannels; ++d) value = fmaf(pixel.v_out[d], features[d], value);
    return step_backward(counts ? exp2_fast(exponent) : 0.0f, value, pixel.transmittance, pixel.remainder);
  }

  // The sums of both pixels, in the order of SumIndex but without those that are not asked for.
  static __device__ __forceinline__ void pass(const float4* splat, const Seen& seen, bool upper_counts,
                                              bool lower_counts, int, Start& upper_pixel, Start& lower_pixel,
                                              float (&values)[kGradients]) {
    const ScaledSplat& s = seen.s;
    const float dx = seen.dx, upper_dy = seen.upper_dy, lower_dy = seen.lower_dy;
    const float4 f = splat[2];
    const float features[4] = {f.x, f.y, f.z, splat[1].w};
    const BackwardStep upper = step(upper_pixel, upper_counts, s.log2_opacity - seen.upper_sigma, features);
    const BackwardStep lower = step(lower_pixel, lower_counts, s.log2_opacity - seen.lower_sigma, features);
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
      values[kGradients - 2] = fabsf(upper.v_sigma * fmaf(s.b, upper_dy, a_dx)) +
                               fabsf(lower.v_sigma * fmaf(s.b, lower_dy, a_dx));
      values[kGradients - 1] = fabsf(upper.v_sigma * fmaf(c2, upper_dy, b_dx)) +
                               fabsf(lower.v_sigma * fmaf(c2, lower_dy, b_dx));
    }
  }

  static __device__ __forceinline__ int place_of_sum(int sum) {
    return kAbs && sum >= kGradients - 2 ? sum + kSumAbs - (kGradients - 2) : sum;
  }

  static __device__ __forceinline__ float4 record_quad(int quad, const float4& sums, const float4* splat) {
    return nsmg::record_quad(quad, sums, unpack(splat[0], splat[1]));
  }
};

}  // namespace
}  // namespace nsmg
