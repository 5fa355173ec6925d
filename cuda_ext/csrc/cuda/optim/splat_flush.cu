// The table of deferred steps, and the end of a block: all points take their deferred steps.

#include "cuda/optim/splat_lazy_device.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kLines = (kLazySteps + 1) * kUpdateTensors;

constexpr int kQuads = 2;  // a thread's float4s of each array
constexpr int64_t kStretch = int64_t{kThreads} * kQuads * 4;

__device__ __forceinline__ void store_line(float* at, const LazyLine<float>& line) {
  reinterpret_cast<float4*>(at)[0] = make_float4(line.shift, line.eps, line.decay1, line.decay2);
  reinterpret_cast<float4*>(at)[1] = make_float4(line.bound, line.weighted, 0.0f, 0.0f);
}

// One block.
__global__ void __launch_bounds__(kThreads) extend_kernel(const LazyState lazy, const float* scalars) {
  const int steps = *lazy.steps;
  if (steps >= kLazySteps || all_stand_still(scalars)) return;
  for (int i = threadIdx.x; i < (steps + 1) * kUpdateTensors; i += kThreads) {
    float* at = lazy.table + i * kLazyFloats;
    const float4 a = reinterpret_cast<const float4*>(at)[0], b = reinterpret_cast<const float4*>(at)[1];
    const LazyLine<float> line = {a.x, a.y, a.z, a.w, b.x, b.y};
    store_line(at, lazy_extended(line, load_adam_scalars(scalars + 8 * (i % kUpdateTensors))));
  }
  __syncthreads();
  if (threadIdx.x == 0) *lazy.steps = steps + 1;
}

__global__ void __launch_bounds__(kThreads) restart_kernel(const LazyState lazy) {
  for (int i = threadIdx.x; i < kLines; i += kThreads) store_line(lazy.table + i * kLazyFloats, lazy_start<float>());
  if (threadIdx.x == 0) *lazy.steps = 0;
}

__host__ __device__ int width_of(int tensor, int rest_floats) {
  return tensor == kShRest ? rest_floats : tensor == kQuats ? 4 : tensor == kLogits ? 1 : 3;
}

struct FlushBlocks {
  uint32_t first[kUpdateTensors + 1];
};

// A block takes a stretch of kStretch elements of one tensor, as adam_step does.
template <typename Moment>
__global__ void __launch_bounds__(kThreads)
    flush_kernel(const __grid_constant__ FlushLaunch launch, const __grid_constant__ FlushBlocks blocks) {
  const int steps = *launch.lazy.steps;
  if (steps == 0) return;
  int tensor = 0;
  while (blockIdx.x >= blocks.first[tensor + 1]) ++tensor;
  float* value = launch.values[tensor];
  auto* moment1 = static_cast<Moment*>(launch.moments1[tensor]);
  auto* moment2 = static_cast<Moment*>(launch.moments2[tensor]);
  const uint8_t* last = launch.lazy.last;
  const float* table = launch.lazy.table;
  const int width = width_of(tensor, launch.rest_floats);
  const int64_t count = int64_t{launch.points} * width;
  const int64_t begin = int64_t{blockIdx.x - blocks.first[tensor]} * kStretch;
  const int64_t end = smaller(begin + kStretch, count);
  const int64_t last_quad = end / 4;  // exclusive; begin is a multiple of 4
  const int64_t first_point = begin / width;
  const uint32_t offset = static_cast<uint32_t>(begin - first_point * width);

  const uint32_t salt = tensor_salt(flush_salt<Moment>(table), tensor);
  float4 p[kQuads], m[kQuads], v[kQuads];
  int lasts[kQuads][4];
  bool behind[kQuads];
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    const uint32_t place = k * kThreads + threadIdx.x;
    behind[k] = false;
    if (begin / 4 + place < last_quad) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        lasts[k][j] = last[first_point + (offset + 4 * place + j) / static_cast<uint32_t>(width)];
        behind[k] |= lasts[k][j] < steps;
      }
    }
    if (behind[k]) {
      p[k] = reinterpret_cast<const float4*>(value)[begin / 4 + place];
      m[k] = stream_moments(moment1, begin / 4 + place);
      v[k] = stream_moments(moment2, begin / 4 + place);
    }
  }
#pragma unroll
  for (int k = 0; k < kQuads; ++k) {
    if (behind[k]) {
      const int64_t q = begin / 4 + k * kThreads + threadIdx.x;
      // The line of a point that has missed nothing changes nothing.
      catch_up(load_lazy_factor(table, lasts[k][0], tensor), p[k].x, m[k].x, v[k].x);
      catch_up(load_lazy_factor(table, lasts[k][1], tensor), p[k].y, m[k].y, v[k].y);
      catch_up(load_lazy_factor(table, lasts[k][2], tensor), p[k].z, m[k].z, v[k].z);
      catch_up(load_lazy_factor(table, lasts[k][3], tensor), p[k].w, m[k].w, v[k].w);
      reinterpret_cast<float4*>(value)[q] = p[k];
      stream_moments(moment1, moment2, q, m[k], v[k], salt);
    }
  }
  // Only a tensor's last stretch may end within a quad.
  const int64_t i = last_quad * 4 + threadIdx.x;
  if (i < end) {
    float m = load_moment(moment1 + i), v = load_moment(moment2 + i);
    catch_up(load_lazy_factor(table, last[i / width], tensor), value[i], m, v);
    store_moments(moment1 + i, moment2 + i, m, v, salt);
  }
}

}  // namespace

cudaError_t splat_lazy_extend_launch(const LazyState& lazy, const float* scalars, cudaStream_t stream) {
  extend_kernel<<<1, kThreads, 0, stream>>>(lazy, scalars);
  return cudaGetLastError();
}

cudaError_t splat_flush_launch(const FlushLaunch& launch, cudaStream_t stream) {
  FlushBlocks blocks = {};
  for (int i = 0; i < kUpdateTensors; ++i) {
    const int64_t count = int64_t{launch.points} * width_of(i, launch.rest_floats);
    blocks.first[i + 1] = blocks.first[i] + static_cast<uint32_t>((count + kStretch - 1) / kStretch);
  }
  if (launch.points > 0) {
    const unsigned number = blocks.first[kUpdateTensors];
    cudaError_t status = with_moments(launch.compact, [&](auto moment) {
      flush_kernel<decltype(moment)><<<number, kThreads, 0, stream>>>(launch, blocks);
      return cudaGetLastError();
    });
    if (status != cudaSuccess) return status;
    status = cudaMemsetAsync(launch.lazy.last, 0, launch.points, stream);
    if (status != cudaSuccess) return status;
  }
  restart_kernel<<<1, kThreads, 0, stream>>>(launch.lazy);
  return cudaGetLastError();
}

}  // namespace nsmg
