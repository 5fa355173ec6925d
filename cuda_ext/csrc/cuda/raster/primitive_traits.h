// What raster_forward.h and raster_backward.h need, from what is written down once for a primitive (host and device, any
// float type): its columns, the numbers of a pixel (its colour and kExtra more) and of a splat's sums (kGradients), and
//
//   Splat, pack(row)                        a packed row
//   overlaps(splat, box)                    whether it may count at a pixel of a box
//   Sight, look(splat, x, y)                a splat from a pixel, and whether it may count there
//   find_alpha(splat, sight)                finds alpha
//   blend(splat, sight, T, sums)            forward
//   Walk, begin(...), pass(splat, ...)      backward: sums over pixels
//   gradients(splat, sums, row)             a row's gradients of them
#pragma once

#include "cuda/common/primitive.h"
#include "cuda/raster/rasterize_device.h"

namespace nsmg {
namespace {

template <typename Primitive>
__device__ __forceinline__ typename Primitive::template Splat<float> unpack_splat(const float4* packed) {
  typename Primitive::template Splat<float> splat;
  float4 quads[kPackedQuads<Primitive>];
#pragma unroll
  for (int q = 0; q < kPackedQuads<Primitive>; ++q) quads[q] = packed[q];
  memcpy(&splat, quads, sizeof(splat));
  return splat;
}

template <typename Primitive>
struct PrimitiveTraits {
  static constexpr int kQuads = kPackedQuads<Primitive>, kSums = Primitive::kSums;
  static constexpr int kForwardBlocks = Primitive::kForwardBlocks, kBackwardBlocks = Primitive::kBackwardBlocks;
  static constexpr int kGradients = Primitive::kGradients, kRecordQuads = kSumQuads<Primitive>;
  static constexpr int kRecordStride = 4 * kRecordQuads, kBuffers = 1;
  using Outputs = PrimitiveOutputs;
  using Gradients = PrimitivePixelGradients;
  using Splat = typename Primitive::template Splat<float>;
  using Sight = typename Primitive::template Sight<float>;

  static __device__ __forceinline__ bool overlaps(const float4* packed, const SubTile& s) {
    return Primitive::overlaps(unpack_splat<Primitive>(packed), s.x_lo, s.x_hi, s.y_lo, s.y_hi);
  }

  // A splat from both pixels of a thread.
  struct Seen {
    Splat splat;
    Sight above, below;
    __device__ __forceinline__ bool upper() const { return above.may; }
    __device__ __forceinline__ bool lower() const { return below.may; }
  };

  static __device__ __forceinline__ Seen see(const float4* packed, float x, float upper_y, float lower_y) {
    const Splat splat = unpack_splat<Primitive>(packed);
    return {splat, Primitive::look(splat, x, upper_y), Primitive::look(splat, x, lower_y)};
  }

  template <typename Pixel>
  static __device__ __forceinline__ void draw(const float4* packed, float x, float upper_y, float lower_y,
                                              int position, Pixel& upper, Pixel& lower) {
    Seen seen = see(packed, x, upper_y, lower_y);
    if (!(seen.upper() || seen.lower())) return;
    Primitive::find_alpha(seen.splat, seen.above);
    Primitive::find_alpha(seen.splat, seen.below);
    if (Primitive::blend(seen.splat, seen.above, upper.transmittance, upper.sums)) upper.last = position;
    if (Primitive::blend(seen.splat, seen.below, lower.transmittance, lower.sums)) lower.last = position;
  }

  static __device__ __forceinline__ void write_sums(const float (&sums)[kSums], const Outputs& outputs, int64_t place,
                                                    int) {
#pragma unroll
    for (int d = 0; d < 3; ++d) outputs.out[3 * place + d] = sums[d];
#pragma unroll
    for (int d = 3; d < kSums; ++d) outputs.extra[Primitive::kExtra * place + d - 3] = sums[d];
  }

  // A pixel at the start of a chunk.
  struct Start {
    typename Primitive::template Walk<float> walk = {};
    int last = -1;  // counted from the chunk's first splat; negative: nothing to do here
  };

  static __device__ __forceinline__ Start start(const RasterState& state, const TileInfo& info, const Chunk& chunk,
                                                int, const Gradients& pixels, int64_t place, int thread) {
    Start start;
    start.last = pixels.last[place] - chunk.begin;
    if (start.last < 0) return start;  // neither has such a pixel a checkpoint
    float transmittance = 1.0f, before[kSums] = {}, total[kSums], v[kSums];
    if (chunk.index > 0) {
      const float* checkpoint = checkpoint_before<kSums>(state, info, chunk.index) + thread;
      transmittance = fabsf(checkpoint[0]);
#pragma unroll
      for (int d = 0; d < kSums; ++d) before[d] = checkpoint[(d + 1) * kChunk];
    }
#pragma unroll
    for (int d = 0; d < kSums; ++d) {
      const int64_t at = d < 3 ? 3 * place + d : Primitive::kExtra * place + d - 3;
      total[d] = d < 3 ? pixels.out[at] : pixels.extra[at];
      v[d] = d < 3 ? pixels.v_out[at] : pixels.v_extra[at];
    }
    start.walk = Primitive::begin(total, v, pixels.alpha[place], pixels.v_alpha[place], transmittance, before);
    return start;
  }

  static __device__ __forceinline__ void pass(const float4*, Seen& seen, bool upper_counts, bool lower_counts,
                                              int position, Start& upper, Start& lower, float (&sums)[kGradients]) {
#pragma unroll
    for (int c = 0; c < kGradients; ++c) sums[c] = 0.0f;
    seen.above.may = upper_counts;
    seen.below.may = lower_counts;
    Primitive::find_alpha(seen.splat, seen.above);
    Primitive::find_alpha(seen.splat, seen.below);
    Primitive::pass(seen.splat, seen.above, position == upper.last, upper.walk, sums);
    Primitive::pass(seen.splat, seen.below, position == lower.last, lower.walk, sums);
  }

  static __device__ __forceinline__ int place_of_sum(int sum) { return sum; }
  static __device__ __forceinline__ float4 record_quad(int, const float4& sums, const float4*) { return sums; }
};

}  // namespace
}  // namespace nsmg
