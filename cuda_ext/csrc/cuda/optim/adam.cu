// One launch steps all tensors: a block takes a stretch of kStretch floats of one of them. 28 bytes an element.

#include "cuda/optim/adam.h"

#include "cuda/optim/adam_device.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kQuads = 2;  // a thread's float4s of each array: 8 loads of 16 bytes in flight
constexpr int64_t kStretch = int64_t{kThreads} * kQuads * 4;

struct AdamLaunch {
  AdamTensor tensors[kAdamTensors];
  uint32_t first_block[kAdamTensors + 1];
  int number;
};
static_assert(sizeof(AdamLaunch) <= 4000, "a kernel's parameters are at most 4 KB");

__device__ __forceinline__ void step_one(const AdamTensor& t, const AdamScalars<float>& s, int64_t i, bool clear) {
  float p = t.value[i], m = t.moment1[i], v = t.moment2[i];
  adam_element(s, t.gradient[i], t.gradient[i], p, m, v);
  t.value[i] = p;
  t.moment1[i] = m;
  t.moment2[i] = v;
  if (clear) t.gradient[i] = 0.0f;
}

__device__ __forceinline__ bool aligned(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }

__global__ void __launch_bounds__(kThreads) adam_step_kernel(const __grid_constant__ AdamLaunch launch, bool clear) {
  int which = 0;
  while (which + 1 < launch.number && blockIdx.x >= launch.first_block[which + 1]) ++which;
  const AdamTensor& t = launch.tensors[which];
  const AdamScalars<float> s = load_adam_scalars(t.scalars);
  const int64_t begin = int64_t{blockIdx.x - launch.first_block[which]} * kStretch;
  const int64_t end = t.count - begin < kStretch ? t.count : begin + kStretch;
  if (!(aligned(t.value) && aligned(t.gradient) && aligned(t.moment1) && aligned(t.moment2))) {
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) step_one(t, s, i, clear);
    return;
  }
  auto* value = reinterpret_cast<float4*>(t.value);
  auto* gradient = reinterpret_cast<float4*>(t.gradient);
  auto* moment1 = reinterpret_cast<float4*>(t.moment1);
  auto* moment2 = reinterpret_cast<float4*>(t.moment2);
  const int64_t last_quad = end / 4;  // exclusive; begin is a multiple of 4
  float4 p[kQuads], g[kQuads], m[kQuads], v[kQuads];
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const int64_t q = begin / 4 + k * kThreads + threadIdx.x;
    if (q < last_quad) {
      p[k] = value[q];
      g[k] = __ldcs(gradient + q);
      m[k] = __ldcs(moment1 + q);
      v[k] = __ldcs(moment2 + q);
    }
  }
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const int64_t q = begin / 4 + k * kThreads + threadIdx.x;
    if (q < last_quad) {
      adam_quad(s, g[k], g[k], p[k], m[k], v[k]);
      value[q] = p[k];
      __stcs(moment1 + q, m[k]);
      __stcs(moment2 + q, v[k]);
      if (clear) gradient[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  // Only a tensor's last stretch may end within a quad.
  const int64_t tail = last_quad * 4 + threadIdx.x;
  if (tail < end) step_one(t, s, tail, clear);
}

}  // namespace

cudaError_t adam_step_launch(const AdamTensor* tensors, int number, bool clear, cudaStream_t stream) {
  AdamLaunch launch = {};
  uint32_t blocks = 0;
  for (int i = 0; i < number; ++i) {
    launch.tensors[i] = tensors[i];
    launch.first_block[i] = blocks;
    blocks += static_cast<uint32_t>((tensors[i].count + kStretch - 1) / kStretch);
  }
  launch.first_block[number] = blocks;
  launch.number = number;
  if (blocks == 0) return cudaSuccess;
  adam_step_kernel<<<blocks, kThreads, 0, stream>>>(launch, clear);
  return cudaGetLastError();
}

}  // namespace nsmg
