// What a point has missed, on the device.
#pragma once

#include "common/lazy_adam.h"
#include "cuda/optim/adam_device.h"
#include "cuda/optim/splat_lazy.h"
#include "cuda/optim/splat_moments.h"

namespace nsmg {

// The first numbers of a line of the table.
struct LazyFactor {
  float shift, eps, decay1, decay2;
};

__device__ __forceinline__ const float* lazy_line(const float* table, int last, int tensor) {
  return table + (last * kUpdateTensors + tensor) * kLazyFloats;
}

__device__ __forceinline__ LazyFactor load_lazy_factor(const float* table, int last, int tensor) {
  const float4 f = __ldg(reinterpret_cast<const float4*>(lazy_line(table, last, tensor)));
  return {f.x, f.y, f.z, f.w};
}

__device__ __forceinline__ float load_lazy_bound(const float* table, int last, int tensor) {
  return __ldg(lazy_line(table, last, tensor) + 4);
}

__device__ __forceinline__ void catch_up(const LazyFactor& f, float& value, float& moment1, float& moment2) {
  value = lazy_value(f.shift, f.eps, value, moment1, moment2);
  moment1 *= f.decay1;
  moment2 *= f.decay2;
}

// Element i as the missed steps leave it. Nothing is written, and nothing more read where none were missed.
template <typename Moment>
__device__ __forceinline__ float caught_up(const LazyFactor& f, const float* value, const Moment* moment1,
                                           const Moment* moment2, int64_t i) {
  return f.shift == 0.0f ? value[i]
                         : lazy_value(f.shift, f.eps, value[i], load_moment(moment1 + i), load_moment(moment2 + i));
}

template <typename Moment>
__device__ __forceinline__ Vec3<float> caught_up3(const LazyFactor& f, const float* value, const Moment* moment1,
                                                  const Moment* moment2, int64_t i) {
  return {caught_up(f, value, moment1, moment2, 3 * i), caught_up(f, value, moment1, moment2, 3 * i + 1),
          caught_up(f, value, moment1, moment2, 3 * i + 2)};
}

template <typename Moment>
__device__ __forceinline__ Quat<float> caught_up_quat(const LazyFactor& f, const float* value, const Moment* moment1,
                                                      const Moment* moment2, int64_t i) {
  const Quat<float> p = load_quat(value, i);
  if (f.shift == 0.0f) return p;
  const float4 m = load_moments(moment1, i), v = load_moments(moment2, i);
  return {lazy_value(f.shift, f.eps, p.w, m.x, v.x), lazy_value(f.shift, f.eps, p.x, m.y, v.y),
          lazy_value(f.shift, f.eps, p.y, m.z, v.z), lazy_value(f.shift, f.eps, p.z, m.w, v.w)};
}

// Whether a step with these scalars [kUpdateTensors, 8] moves nothing.
__device__ __forceinline__ bool all_stand_still(const float* scalars) {
  bool still = true;
  for (int i = 0; i < kUpdateTensors; ++i) still &= stands_still(load_adam_scalars(scalars + 8 * i));
  return still;
}

}  // namespace nsmg
