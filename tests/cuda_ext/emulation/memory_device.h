// Stands for cuda_ext/csrc/cuda/common/memory_device.h.
#pragma once

#include <cuda_runtime.h>

namespace nsmg {

inline void copy_async_16(float4* shared, const float4* global) { emulation::begin_copy(shared, global); }
inline void wait_for_copies() { emulation::end_copies(); }
inline void add_float(float* address, float value, bool) { *address += value; }
inline void add_quad(float* address, const float4& v, bool) {
  address[0] += v.x, address[1] += v.y, address[2] += v.z, address[3] += v.w;
}

}  // namespace nsmg
