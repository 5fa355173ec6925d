// Adam over a stretch of one parameter tensor by one warp, with the gradients in shared memory.
#pragma once

#include <type_traits>

#include "cuda/adam_device.h"

namespace nsmg {

// How many float4s of each array a lane has in flight.
template <int Count>
using Batch = std::integral_constant<int, Count>;

struct Span {
  float *value, *moment1, *moment2;  // of the warp's first point, at a multiple of 16 bytes
  int floats;                        // of the warp's points, `width` a point
  int width;
};

// The elements of floats 4 q to 4 q + 3 whose points are in `points`, as four bits.
__device__ __forceinline__ uint32_t chosen(uint32_t points, int q, int width) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) bits |= ((points >> (static_cast<uint32_t>(4 * q + j) / width)) & 1) << j;
  return bits;
}

__device__ __forceinline__ void pick(float4& now, const float4& before, uint32_t bits) {
  now.x = bits & 1 ? now.x : before.x;
  now.y = bits & 2 ? now.y : before.y;
  now.z = bits & 4 ? now.z : before.z;
  now.w = bits & 8 ? now.w : before.w;
}

// Steps the span. `gradient` [floats] lies in shared memory, or is null for zero. With `Selective` only the points whose
// bit is set in `points` are touched. `Count` float4s of each array are in flight.
template <bool Selective, int Count>
__device__ __forceinline__ void step_span(const Span& span, const float* gradient, const float* scalars,
                                          uint32_t points, int lane) {
  const AdamScalars<float> s = load_adam_scalars(scalars);
  auto* value = reinterpret_cast<float4*>(span.value);
  auto* moment1 = reinterpret_cast<float4*>(span.moment1);
  auto* moment2 = reinterpret_cast<float4*>(span.moment2);
  const auto* gradient4 = reinterpret_cast<const float4*>(gradient);
  const int quads = span.floats / 4;
  for (int base = lane; base < quads; base += 32 * Count) {
    float4 p[Count], m[Count], v[Count];
    uint32_t bits[Count];
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      const int q = base + 32 * k;
      bits[k] = q < quads ? (Selective ? chosen(points, q, span.width) : 15u) : 0u;
      if (bits[k] != 0) {
        p[k] = value[q];
        m[k] = __ldcs(moment1 + q);
        v[k] = __ldcs(moment2 + q);
      }
    }
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      const int q = base + 32 * k;
      if (bits[k] != 0) {
        const float4 old_p = p[k], old_m = m[k], old_v = v[k];
        const float4 g = gradient != nullptr ? gradient4[q] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        adam_quad(s, g, p[k], m[k], v[k]);
        if (Selective) {
          pick(p[k], old_p, bits[k]);
          pick(m[k], old_m, bits[k]);
          pick(v[k], old_v, bits[k]);
        }
        value[q] = p[k];
        __stcs(moment1 + q, m[k]);
        __stcs(moment2 + q, v[k]);
      }
    }
  }
  // The last group of points may end within a quad.
  const int i = 4 * quads + lane;
  if (i < span.floats && (!Selective || ((points >> (i / span.width)) & 1))) {
    float p = span.value[i], m = span.moment1[i], v = span.moment2[i];
    adam_element(s, gradient != nullptr ? gradient[i] : 0.0f, p, m, v);
    span.value[i] = p;
    span.moment1[i] = m;
    span.moment2[i] = v;
  }
}

}  // namespace nsmg
