// Ways to memory that CUDA C++ has no word for: copies into shared memory asynchronous to the program, and additions that no thread
// waits for, to memory of this GPU or of another.
#pragma once

#include <cuda_runtime.h>

namespace nsmg {

__device__ __forceinline__ void copy_async_16(float4* shared, const float4* global) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void add_float(float* address, float value, bool system_scope) {
  const size_t global = __cvta_generic_to_global(address);
  if (system_scope) {
    asm volatile("red.relaxed.sys.global.add.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
  } else {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(global), "f"(value) : "memory");
  }
}

__device__ __forceinline__ void add_quad(float* address, const float4& v, bool system_scope) {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1201
  const size_t global = __cvta_generic_to_global(address);
  if (system_scope) {
    asm volatile("red.relaxed.sys.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
  } else {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
  }
#else
  add_float(address, v.x, system_scope);
  add_float(address + 1, v.y, system_scope);
  add_float(address + 2, v.z, system_scope);
  add_float(address + 3, v.w, system_scope);
#endif
}

}  // namespace nsmg
