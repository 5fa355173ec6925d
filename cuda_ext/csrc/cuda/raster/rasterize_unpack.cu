// Gradient records of rows, cut into the outputs of `rasterize_backward`.
#include <cuda_runtime.h>

#include "cuda/raster/rasterize.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;

// Four lanes a row read its 64 bytes, three of which hold something.
__global__ void __launch_bounds__(kThreads)
unpack(const float4* __restrict__ records, int64_t rows, int channels, float* __restrict__ v_means2d,
       float* __restrict__ v_conics, float* __restrict__ v_opacities, float* __restrict__ v_features,
       float* __restrict__ v_abs) {
  const int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = item / 4;
  const int quad = int(item % 4);
  if (row >= rows || quad == 3) return;
  const float4 v = records[item];
  if (quad == 0) {
    v_means2d[2 * row] = v.x;
    v_means2d[2 * row + 1] = v.y;
    v_conics[3 * row] = v.z;
    v_conics[3 * row + 1] = v.w;
  } else if (quad == 1) {
    v_conics[3 * row + 2] = v.x;
    v_opacities[row] = v.y;
    if (v_features != nullptr) {
      v_features[channels * row] = v.z;
      if (channels > 1) v_features[channels * row + 1] = v.w;
    }
  } else {
    if (v_features != nullptr && channels > 2) v_features[channels * row + 2] = v.x;
    if (v_features != nullptr && channels > 3) v_features[channels * row + 3] = v.y;
    if (v_abs != nullptr) {
      v_abs[2 * row] = v.z;
      v_abs[2 * row + 1] = v.w;
    }
  }
}

}  // namespace

cudaError_t launch_unpack(const float* records, int64_t rows, int channels, float* v_means2d, float* v_conics,
                          float* v_opacities, float* v_features, float* v_abs, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  unpack<<<unsigned((4 * rows + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      reinterpret_cast<const float4*>(records), rows, channels, v_means2d, v_conics, v_opacities, v_features, v_abs);
  return cudaGetLastError();
}

}  // namespace nsmg
