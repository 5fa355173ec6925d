// L1 and SSIM of a patch on the device. Everything runs on the given stream and waits for nothing. The same input gives
// the same bits on every run: sums are added up in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace nsmg {

// Images [height, width, 3] in device memory; target is float, or bytes where target_bytes says so.
struct LossImages {
  const float* pred;
  const void* target;
  bool target_bytes;
  int height, width;
};

struct LossRectangle {
  int x0, y0, x1, y1;  // pixels of the patch
};

// The window centres that count: inner pixels whose whole window lies in the patch. x1 >= x0, y1 >= y0.
LossRectangle loss_centres(const LossImages& images, const LossRectangle& inner);

// Bytes of workspace that l1_ssim_launch needs: 36 for each window centre, and the partial sums.
size_t l1_ssim_bytes(const LossImages& images, const LossRectangle& inner);

// l1_sum, ssim_sum: one float each; gradient [height, width, 3]: of ssim_sum by pred.
cudaError_t l1_ssim_launch(const LossImages& images, const LossRectangle& inner, void* workspace, float* l1_sum,
                           float* ssim_sum, float* gradient, cudaStream_t stream);

// v_pred = v_ssim * dssim + v_l1 * sign(pred - target) on the inner rectangle; v_l1, v_ssim: one float each, on the
// device.
cudaError_t l1_ssim_backward_launch(const LossImages& images, const LossRectangle& inner, const float* dssim,
                                    const float* v_l1, const float* v_ssim, float* v_pred, cudaStream_t stream);

}  // namespace nsmg
