// The blended colours of pixels over a background, clamped to [0, 1]; and the gradient.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

// out [pixels, channels], of which the first three are colour; alpha [pixels]; background [3]; rgb [pixels, 3].
cudaError_t composite_launch(const float* out, const float* alpha, const float* background, int64_t pixels,
                             int channels, float* rgb, cudaStream_t stream);

// v_out [pixels, channels] (zero beyond the colour) and v_alpha [pixels] from v_rgb.
cudaError_t composite_backward_launch(const float* out, const float* alpha, const float* background,
                                      const float* v_rgb, int64_t pixels, int channels, float* v_out, float* v_alpha,
                                      cudaStream_t stream);

}  // namespace nsmg
