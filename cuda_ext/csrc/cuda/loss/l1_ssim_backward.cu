// The gradient of L1 and SSIM by pred, from that of their sums: one pass over the images.
#include <cuda_runtime.h>

#include "common/ssim.h"
#include "cuda/loss/l1_ssim.h"

namespace nsmg {
namespace {

constexpr int kChannels = 3;

// A thread takes one column of four consecutive rows.
constexpr int kBackwardRows = 4, kBackwardThreads = 256;

template <typename Target>
__global__ void __launch_bounds__(kBackwardThreads)
    backward_kernel(const float* __restrict__ pred, const Target* __restrict__ target, int pitch, int height,
                    LossRectangle inner, const float* __restrict__ dssim, const float* v_l1, const float* v_ssim,
                    float* __restrict__ v_pred) {
  const int column = blockIdx.x * kBackwardThreads + threadIdx.x;
  if (column >= pitch) return;
  const float by_l1 = *v_l1, by_ssim = *v_ssim;
  const bool counted = column >= inner.x0 * kChannels && column < inner.x1 * kChannels;
#pragma unroll
  for (int k = 0; k < kBackwardRows; ++k) {
    const int y = int(blockIdx.y) * kBackwardRows + k;
    if (y >= height) return;
    const size_t place = size_t(y) * pitch + column;
    float v = by_ssim * __ldg(dssim + place);
    if (counted && y >= inner.y0 && y < inner.y1) {
      const float difference = __ldg(pred + place) - image_value(__ldg(target + place));
      v += difference > 0 ? by_l1 : difference < 0 ? -by_l1 : 0.0f;
    }
    v_pred[place] = v;
  }
}

}  // namespace

cudaError_t l1_ssim_backward_launch(const LossImages& images, const LossRectangle& inner, const float* dssim,
                                    const float* v_l1, const float* v_ssim, float* v_pred, cudaStream_t stream) {
  const int pitch = images.width * kChannels;
  if (pitch == 0 || images.height == 0) return cudaSuccess;
  const dim3 blocks((pitch + kBackwardThreads - 1) / kBackwardThreads,
                    (images.height + kBackwardRows - 1) / kBackwardRows);
  if (images.target_bytes)
    backward_kernel<<<blocks, kBackwardThreads, 0, stream>>>(images.pred, static_cast<const uint8_t*>(images.target),
                                                             pitch, images.height, inner, dssim, v_l1, v_ssim, v_pred);
  else
    backward_kernel<<<blocks, kBackwardThreads, 0, stream>>>(images.pred, static_cast<const float*>(images.target),
                                                             pitch, images.height, inner, dssim, v_l1, v_ssim, v_pred);
  return cudaGetLastError();
}

}  // namespace nsmg
