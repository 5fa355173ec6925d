// Adam's moments in memory, as float32 or as bfloat16 (common/compact.h), one and four at a time. Kernels are templates
// over the type; all moments of a launch have the same.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/compact.h"
#include "cuda/optim/adam_device.h"
#include "cuda/common/splat_views.h"

namespace nsmg {

template <typename Moment>
inline constexpr bool kCompact = std::is_same_v<Moment, Bfloat16>;

// Calls f(Moment{}) for the type of a launch's moments.
template <typename F>
cudaError_t with_moments(bool compact, const F& f) {
  return compact ? f(Bfloat16{}) : f(float{});
}

__device__ __forceinline__ float4 widened(uint2 quad) {
  return make_float4(float_of(quad.x << 16), float_of(quad.x & 0xffff0000u), float_of(quad.y << 16),
                     float_of(quad.y & 0xffff0000u));
}

// ---- one at a time ----

__device__ __forceinline__ float load_moment(const float* at) { return *at; }
__device__ __forceinline__ float load_moment(const Bfloat16* at) { return widened(*at); }

// Of memory that this launch does not write.
__device__ __forceinline__ float read_moment(const float* at) { return __ldg(at); }
__device__ __forceinline__ float read_moment(const Bfloat16* at) {
  return widened(Bfloat16{__ldg(reinterpret_cast<const unsigned short*>(at))});
}

__device__ __forceinline__ void store_moments(float* at1, float* at2, float moment1, float moment2, uint32_t) {
  *at1 = moment1;
  *at2 = moment2;
}
__device__ __forceinline__ void store_moments(Bfloat16* at1, Bfloat16* at2, float moment1, float moment2,
                                              uint32_t salt) {
  const CompactMoments compact = compacted(salt, moment1, moment2);
  *at1 = compact.moment1;
  *at2 = compact.moment2;
}

// ---- four at a time: elements 4 q to 4 q + 3, at a multiple of 16 bytes, or 8 ----

template <typename Index>
__device__ __forceinline__ float4 load_moments(const float* from, Index q) {
  return reinterpret_cast<const float4*>(from)[q];
}
template <typename Index>
__device__ __forceinline__ float4 load_moments(const Bfloat16* from, Index q) {
  return widened(reinterpret_cast<const uint2*>(from)[q]);
}

// For the last time in a while.
template <typename Index>
__device__ __forceinline__ float4 stream_moments(const float* from, Index q) {
  return __ldcs(reinterpret_cast<const float4*>(from) + q);
}
template <typename Index>
__device__ __forceinline__ float4 stream_moments(const Bfloat16* from, Index q) {
  return widened(__ldcs(reinterpret_cast<const uint2*>(from) + q));
}

template <typename Index>
__device__ __forceinline__ void stream_moments(float* to1, float* to2, Index q, const float4& moment1,
                                               const float4& moment2, uint32_t) {
  __stcs(reinterpret_cast<float4*>(to1) + q, moment1);
  __stcs(reinterpret_cast<float4*>(to2) + q, moment2);
}
template <typename Index>
__device__ __forceinline__ void stream_moments(Bfloat16* to1, Bfloat16* to2, Index q, const float4& moment1,
                                               const float4& moment2, uint32_t salt) {
  const auto two = [](uint32_t low, uint32_t high) { return (low >> 16) | (high & 0xffff0000u); };
  const uint32_t x = dither_bits(salt, moment1.x, moment2.x), y = dither_bits(salt, moment1.y, moment2.y);
  const uint32_t z = dither_bits(salt, moment1.z, moment2.z), w = dither_bits(salt, moment1.w, moment2.w);
  __stcs(reinterpret_cast<uint2*>(to1) + q,
         make_uint2(two(dithered(moment1.x, x & 0xffffu), dithered(moment1.y, y & 0xffffu)),
                    two(dithered(moment1.z, z & 0xffffu), dithered(moment1.w, w & 0xffffu))));
  __stcs(reinterpret_cast<uint2*>(to2) + q, make_uint2(two(dithered(moment2.x, x >> 16), dithered(moment2.y, y >> 16)),
                                                       two(dithered(moment2.z, z >> 16), dithered(moment2.w, w >> 16))));
}

// ---- what the dither of a launch depends on ----

// Of a step with `scalars` [kUpdateTensors, 8] and these views; 0 where nothing is rounded.
template <typename Moment>
__device__ __forceinline__ uint32_t step_salt(const float* scalars, const Views& views) {
  if constexpr (kCompact<Moment>) {
    const float* means = scalars + 8 * kMeans;
    const uint32_t salt = dither_salt(__ldg(means), __ldg(means + 4), __ldg(means + 5));
    const float* view = views.viewmats;
    return views.count > 0 ? dither_salt(__ldg(view), __ldg(view + 3), __ldg(view + 7), salt) : salt;
  } else {
    return 0;
  }
}

// Of a flush with this table.
template <typename Moment>
__device__ __forceinline__ uint32_t flush_salt(const float* table) {
  if constexpr (kCompact<Moment>) {
    const float4 line = __ldg(reinterpret_cast<const float4*>(table) + 2 * kMeans);
    return dither_salt(line.x, line.z, line.w);
  } else {
    return 0;
  }
}

}  // namespace nsmg
