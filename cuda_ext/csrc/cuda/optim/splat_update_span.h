// Adam over a stretch of one parameter tensor by one warp, with the gradients in shared memory.
#pragma once

#include <type_traits>

#include "cuda/optim/adam_device.h"
#include "cuda/optim/splat_moments.h"

namespace nsmg {

// How many float4s of each array a lane has in flight.
template <int Count>
using Batch = std::integral_constant<int, Count>;

template <typename Moment>
struct Span {
  float* value;  // of the warp's first point, at a multiple of 16 bytes, as its moments
  Moment *moment1, *moment2;
  int floats;  // of the warp's points, `width` a point
  int width;
  uint32_t salt;  // of the dither
};

// Of a launch's tensor, from the warp's `first` point on. `salt` is the step's.
template <typename Moment, typename Launch>
__device__ __forceinline__ Span<Moment> span_of(const Launch& launch, int first, int size, int tensor, int width,
                                                uint32_t salt) {
  const int64_t at = int64_t{first} * width;
  return {launch.values[tensor] + at,
          static_cast<Moment*>(launch.moments1[tensor]) + at,
          static_cast<Moment*>(launch.moments2[tensor]) + at,
          size * width,
          width,
          tensor_salt(salt, tensor)};
}

// The elements of floats 4 q to 4 q + 3 whose points are in `points`, as four bits.
__device__ __forceinline__ uint32_t chosen(uint32_t points, int q, int width) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) bits |= ((points >> (static_cast<uint32_t>(4 * q + j) / width)) & 1) << j;
  return bits;
}

// Steps the span. `gradient` [floats], and `first` for the first moment, lie in shared memory, or are null for zero.
// `Count` float4s of each array are in flight.
template <int Count, typename Moment>
__device__ __forceinline__ void step_span(const Span<Moment>& span, const float* first, const float* gradient,
                                          const float* scalars, int lane) {
  const AdamScalars<float> s = load_adam_scalars(scalars);
  auto* value = reinterpret_cast<float4*>(span.value);
  const auto* first4 = reinterpret_cast<const float4*>(first);
  const auto* gradient4 = reinterpret_cast<const float4*>(gradient);
  const int quads = span.floats / 4;
  for (int base = lane; base < quads; base += 32 * Count) {
    float4 p[Count], m[Count], v[Count];
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      const int q = base + 32 * k;
      if (q < quads) {
        p[k] = value[q];
        m[k] = stream_moments(span.moment1, q);
        v[k] = stream_moments(span.moment2, q);
      }
    }
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      const int q = base + 32 * k;
      if (q < quads) {
        const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float4 f = gradient != nullptr ? first4[q] : zero, g = gradient != nullptr ? gradient4[q] : zero;
        adam_quad(s, f, g, p[k], m[k], v[k]);
        value[q] = p[k];
        stream_moments(span.moment1, span.moment2, q, m[k], v[k], span.salt);
      }
    }
  }
  // The last group of points may end within a quad.
  const int i = 4 * quads + lane;
  if (i < span.floats) {
    float p = span.value[i], m = load_moment(span.moment1 + i), v = load_moment(span.moment2 + i);
    adam_element(s, gradient != nullptr ? first[i] : 0.0f, gradient != nullptr ? gradient[i] : 0.0f, p, m, v);
    span.value[i] = p;
    store_moments(span.moment1 + i, span.moment2 + i, m, v, span.salt);
  }
}

}  // namespace nsmg
