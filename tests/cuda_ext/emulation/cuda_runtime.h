// As much of CUDA C++ as the kernels of the rasterization use, on a CPU: threads of a block are fibers that change at
// barriers and wherever a warp exchanges values, in random order. So the sources of the kernels run without a GPU.
//
// One block runs after the other, also in random order. What a GPU may do besides is not seen here: blocks that wait
// for each other, and writes that others see late.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static  // of the one block that runs
#define __launch_bounds__(...)
#define __grid_constant__

struct float2 {
  float x, y;
};
struct int2 {
  int x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using cudaError_t = int;
using cudaStream_t = void*;
constexpr int cudaSuccess = 0, cudaErrorInvalidValue = 1;
inline int cudaGetLastError() { return cudaSuccess; }
inline int cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}

using std::max;
using std::min;
inline int min(int a, int64_t b) { return int(min<int64_t>(a, b)); }

namespace emulation {

struct Index {
  unsigned x, y = 0;
};

unsigned thread();  // of the fiber that runs, in its block
Index block();
Index grid();
Index threads();  // of a block

// Every thread of the block comes here; whether all of them gave true.
bool barrier(bool vote);
// Every thread of the warp comes here; what they gave, by lane. Valid until the thread's next call.
const uint64_t* exchange(uint64_t value);

// A copy that has begun: it may be done at once, or as late as this thread waits for it.
void begin_copy(float4* to, const float4* from);
void end_copies();

// A grid of two dimensions, of which the second is not run.
struct Grid {
  unsigned x, y;
  Grid(unsigned across, unsigned down) : x(across), y(down) {}
  operator unsigned() const { return x; }
};

// Runs a kernel. Ends the process with a message if threads are left waiting.
void launch(unsigned grid, unsigned threads, const std::function<void()>& kernel);

template <typename T>
uint64_t bits(T value) {
  uint64_t kept = 0;
  std::memcpy(&kept, &value, sizeof(T));
  return kept;
}

template <typename T>
T from_bits(uint64_t kept) {
  T value;
  std::memcpy(&value, &kept, sizeof(T));
  return value;
}

}  // namespace emulation

using dim3 = emulation::Grid;

#define threadIdx (emulation::Index{emulation::thread()})
#define blockIdx (emulation::block())
#define gridDim (emulation::grid())
#define blockDim (emulation::threads())

inline void __syncthreads() { emulation::barrier(true); }
inline bool __syncthreads_and(bool vote) { return emulation::barrier(vote); }
inline void __syncwarp() { emulation::exchange(0); }
inline void __threadfence() {}

inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint64_t* votes = emulation::exchange(vote);
  unsigned found = 0;
  for (int lane = 0; lane < 32; ++lane) found |= unsigned(votes[lane]) << lane;
  return found;
}
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

inline int __reduce_max_sync(unsigned, int value) {
  const uint64_t* values = emulation::exchange(emulation::bits(value));
  for (int lane = 0; lane < 32; ++lane) value = max(value, emulation::from_bits<int>(values[lane]));
  return value;
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const uint64_t* values = emulation::exchange(value);
  for (int lane = 0; lane < 32; ++lane) value |= unsigned(values[lane]);
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::from_bits<T>(emulation::exchange(emulation::bits(value))[(emulation::thread() % 32) ^ mask]);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::from_bits<T>(emulation::exchange(emulation::bits(value))[lane]);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned by) {
  const unsigned lane = emulation::thread() % 32;
  return emulation::from_bits<T>(emulation::exchange(emulation::bits(value))[lane >= by ? lane - by : lane]);
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline unsigned __float_as_uint(float x) { return emulation::from_bits<unsigned>(emulation::bits(x)); }
inline int __float_as_int(float x) { return emulation::from_bits<int>(emulation::bits(x)); }
inline float __uint_as_float(unsigned x) { return emulation::from_bits<float>(emulation::bits(x)); }
inline float __int_as_float(int x) { return emulation::from_bits<float>(emulation::bits(x)); }

template <typename T>
T atomicAdd(T* place, T value) {
  const T before = *place;
  *place += value;
  return before;
}
template <typename T>
T atomicMax(T* place, T value) {
  const T before = *place;
  *place = max(before, value);
  return before;
}
template <typename T>
T __ldcg(const T* place) {
  return *place;
}
