// A thread a Gaussian.

#include "cuda/densify/noise.h"

#include "common/noise.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    noise_kernel(const __grid_constant__ NoiseInputs in, float* __restrict__ means) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= in.points) return;
  const float scale = in.scale * (in.taken != nullptr ? *in.taken : 1.f);
  const float4 q = reinterpret_cast<const float4*>(in.quats)[i];
  const float* const s = in.log_scales + 3 * i;
  const NoiseRule rule = {in.start, in.steepness, in.threshold};
  const Vec3<float> by = noise_of<float>(rule, uint64_t(in.rows != nullptr ? in.rows[i] : in.first + i),
                                         {q.x, q.y, q.z, q.w}, {s[0], s[1], s[2]}, in.logits[i], scale);
  means[3 * i] += by.x;
  means[3 * i + 1] += by.y;
  means[3 * i + 2] += by.z;
}

}  // namespace

cudaError_t add_noise(const NoiseInputs& in, float* means, cudaStream_t stream) {
  if (in.points == 0) return cudaSuccess;
  noise_kernel<<<(in.points + kThreads - 1) / kThreads, kThreads, 0, stream>>>(in, means);
  return cudaGetLastError();
}

}  // namespace nsmg
