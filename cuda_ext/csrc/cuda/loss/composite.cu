// One thread a pixel: a dozen bytes in, a dozen out, so neighbouring threads share every cache line they touch.
#include "cuda/loss/composite.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;

unsigned blocks(int64_t pixels) { return static_cast<unsigned>((pixels + kThreads - 1) / kThreads); }

__global__ void __launch_bounds__(kThreads)
    composite_kernel(const float* __restrict__ out, const float* __restrict__ alpha,
                     const float* __restrict__ background, int64_t pixels, int channels, float* __restrict__ rgb) {
  const int64_t pixel = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (pixel >= pixels) return;
  const float through = 1.0f - alpha[pixel];
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const float value = out[pixel * channels + c] + through * background[c];
    rgb[pixel * 3 + c] = value < 0.0f ? 0.0f : value > 1.0f ? 1.0f : value;  // NaN stays NaN
  }
}

__global__ void __launch_bounds__(kThreads)
    composite_backward_kernel(const float* __restrict__ out, const float* __restrict__ alpha,
                              const float* __restrict__ background, const float* __restrict__ v_rgb, int64_t pixels,
                              int channels, float* __restrict__ v_out, float* __restrict__ v_alpha) {
  const int64_t pixel = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (pixel >= pixels) return;
  const float through = 1.0f - alpha[pixel];
  float along = 0.0f;
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    // The same expression as above, so that both decide alike where the clamp holds.
    const float value = out[pixel * channels + c] + through * background[c];
    const float v = value >= 0.0f && value <= 1.0f ? v_rgb[pixel * 3 + c] : 0.0f;
    v_out[pixel * channels + c] = v;
    along += v * background[c];
  }
  for (int c = 3; c < channels; ++c) v_out[pixel * channels + c] = 0.0f;
  v_alpha[pixel] = -along;
}

}  // namespace

cudaError_t composite_launch(const float* out, const float* alpha, const float* background, int64_t pixels,
                             int channels, float* rgb, cudaStream_t stream) {
  if (pixels == 0) return cudaSuccess;
  composite_kernel<<<blocks(pixels), kThreads, 0, stream>>>(out, alpha, background, pixels, channels, rgb);
  return cudaGetLastError();
}

cudaError_t composite_backward_launch(const float* out, const float* alpha, const float* background,
                                      const float* v_rgb, int64_t pixels, int channels, float* v_out, float* v_alpha,
                                      cudaStream_t stream) {
  if (pixels == 0) return cudaSuccess;
  composite_backward_kernel<<<blocks(pixels), kThreads, 0, stream>>>(out, alpha, background, v_rgb, pixels, channels,
                                                                      v_out, v_alpha);
  return cudaGetLastError();
}

}  // namespace nsmg
