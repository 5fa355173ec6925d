// A group's box, by the warp that has its points.
#pragma once

#include "cuda/project/splat_boxes.h"

namespace nsmg {

// Floats in an order that integers have, too. Of NaN there is none.
__device__ __forceinline__ int ordered(float value) {
  const int bits = __float_as_int(value);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ __forceinline__ float from_ordered(int bits) {
  return __int_as_float(bits ^ ((bits >> 31) & 0x7fffffff));
}

__device__ __forceinline__ float least_of_warp(float value) {
  return from_ordered(__reduce_min_sync(0xffffffffu, ordered(value)));
}
__device__ __forceinline__ float largest_of_warp(float value) {
  return from_ordered(__reduce_max_sync(0xffffffffu, ordered(value)));
}

// Number `lane` of the box around the points of those lanes that are `there`. The whole warp calls it. A point without
// a position is invisible and omitted; one without a size may overlap any pixel.
__device__ __forceinline__ float box_number(bool there, const float* means, const float* log_scales, int64_t id,
                                            int lane) {
  constexpr float kNone = INFINITY;
  Vec3<float> mean = {};
  float log_scale = -kNone;
  if (there) {
    mean = load3(means, id);
    const Vec3<float> scales = load3(log_scales, id);
    there = !(isnan(mean.x) | isnan(mean.y) | isnan(mean.z));
    const bool sized = !(isnan(scales.x) | isnan(scales.y) | isnan(scales.z));
    log_scale = sized ? larger(larger(scales.x, scales.y), scales.z) : kNone;
  }
  const float numbers[kBoxFloats - 1] = {
      least_of_warp(there ? mean.x : kNone),    least_of_warp(there ? mean.y : kNone),
      least_of_warp(there ? mean.z : kNone),    largest_of_warp(there ? mean.x : -kNone),
      largest_of_warp(there ? mean.y : -kNone), largest_of_warp(there ? mean.z : -kNone),
      largest_of_warp(there ? log_scale : -kNone)};
  float mine = 0.0f;
#pragma unroll
  for (int k = 0; k < kBoxFloats - 1; ++k) mine = lane == k ? numbers[k] : mine;
  return mine;
}

// Makes the group's box hold the points of those lanes that have `moved`, as this warp has just written them. No other
// warp writes there. A box only grows here: splat_boxes_launch recomputes it.
__device__ __forceinline__ void widen_box(float* boxes, int group, bool moved, const float* means,
                                          const float* log_scales, int64_t id, int lane) {
  __syncwarp();  // other lanes wrote what this one reads
  const float mine = box_number(moved, means, log_scales, id, lane);
  if (lane >= kBoxFloats - 1) return;
  float* const at = boxes + int64_t{kBoxFloats} * group + lane;
  const float before = *at;
  if (lane < 3 ? mine < before : mine > before) *at = mine;
}

}  // namespace nsmg
