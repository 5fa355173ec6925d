// float16 as the kernels use it.
#pragma once

#include <cuda_runtime.h>

using __half = _Float16;
inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return float(x); }
inline unsigned short __half_as_ushort(__half x) { return emulation::from_bits<unsigned short>(emulation::bits(x)); }
inline __half __ushort_as_half(unsigned short x) { return emulation::from_bits<__half>(emulation::bits(x)); }
