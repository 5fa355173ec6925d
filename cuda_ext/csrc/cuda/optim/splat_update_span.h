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

// Steps every point of a span.
struct EveryPoint {
  __device__ __forceinline__ bool has(int) const { return true; }
  __device__ __forceinline__ uint32_t elements(int, int) const { return 15; }
  __device__ __forceinline__ void step(const AdamScalars<float>& s, int, int, float first, float gradient, float& p,
                                       float& m, float& v) const {
    adam_element(s, first, gradient, p, m, v);
  }
};

// Steps the span: those of `points` (`EveryPoint`, or `DrawnPoints` of splat_update_lazy.cu). `gradient` [floats], and
// `first` for the first moment, lie in shared memory, or are null for zero. `Count` float4s of each array are loaded
// ahead.
template <int Count, typename Moment, typename Points>
__device__ __forceinline__ void step_span(const Span<Moment>& span, const Points& points, const float* first,
                                          const float* gradient, const float* scalars, int lane) {
  const AdamScalars<float> s = load_adam_scalars(scalars);
  auto* value = reinterpret_cast<float4*>(span.value);
  const auto* first4 = reinterpret_cast<const float4*>(first);
  const auto* gradient4 = reinterpret_cast<const float4*>(gradient);
  const int quads = span.floats / 4;
  for (int base = lane; base < quads; base += 32 * Count) {
    float4 p[Count], m[Count], v[Count];
    uint32_t bits[Count];
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      const int q = base + 32 * k;
      if (q < quads && (bits[k] = points.elements(q, span.width)) != 0) {
        p[k] = value[q];
        m[k] = stream_moments(span.moment1, q);
        v[k] = stream_moments(span.moment2, q);
      }
    }
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      const int q = base + 32 * k;
      if (q < quads && bits[k] != 0) {
        const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float4 f = gradient != nullptr ? first4[q] : zero, g = gradient != nullptr ? gradient4[q] : zero;
        const auto one = [&](int j, float of_first, float of_second, float& one_p, float& one_m, float& one_v) {
          if ((bits[k] >> j) & 1) points.step(s, 4 * q + j, span.width, of_first, of_second, one_p, one_m, one_v);
        };
        one(0, f.x, g.x, p[k].x, m[k].x, v[k].x);
        one(1, f.y, g.y, p[k].y, m[k].y, v[k].y);
        one(2, f.z, g.z, p[k].z, m[k].z, v[k].z);
        one(3, f.w, g.w, p[k].w, m[k].w, v[k].w);
        value[q] = p[k];
        stream_moments(span.moment1, span.moment2, q, m[k], v[k], span.salt);
      }
    }
  }
  // The last group of points may end within a quad.
  const int i = 4 * quads + lane;
  if (i < span.floats && points.has(i / span.width)) {
    float p = span.value[i], m = load_moment(span.moment1 + i), v = load_moment(span.moment2 + i);
    const float f = gradient != nullptr ? first[i] : 0.0f, g = gradient != nullptr ? gradient[i] : 0.0f;
    points.step(s, i, span.width, f, g, p, m, v);
    span.value[i] = p;
    store_moments(span.moment1 + i, span.moment2 + i, m, v, span.salt);
  }
}

}  // namespace nsmg
