// Adam on the device: loading a line of scalars, and stepping four elements at a time.
#pragma once

#include <cuda_runtime.h>

#include "common/adam.h"

namespace nsmg {

__device__ __forceinline__ AdamScalars<float> load_adam_scalars(const float* line) {
  const float4 a = __ldg(reinterpret_cast<const float4*>(line));
  const float4 b = __ldg(reinterpret_cast<const float4*>(line) + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// `first`: see adam_element.
__device__ __forceinline__ void adam_quad(const AdamScalars<float>& s, const float4& first, const float4& g, float4& p,
                                          float4& m, float4& v) {
  adam_element(s, first.x, g.x, p.x, m.x, v.x);
  adam_element(s, first.y, g.y, p.y, m.y, v.y);
  adam_element(s, first.z, g.z, p.z, m.z, v.z);
  adam_element(s, first.w, g.w, p.w, m.w, v.w);
}

}  // namespace nsmg
