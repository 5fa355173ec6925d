// The photometric loss of a rendered rectangle with its whole gradient by what was blended, on the device. Everything
// runs on the given stream and waits for nothing. The same input gives the same bits on every run on the same GPU: sums
// are added up in a fixed order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/loss/l1_ssim.h"

namespace nsmg {

// What was rendered, in device memory: out [height width, 3], alpha [height width], background [3]; target [height,
// width, 3] is float, or bytes where target_bytes says so. 3 width height < 2^31. v_l1, v_ssim: the loss's gradient by
// the two sums, one float each. Colours are clamped to [lowest, highest].
struct BandView {
  const float *out, *alpha, *background;
  const void* target;
  bool target_bytes;
  int width, height;
  LossRectangle inner;
  const float *v_l1, *v_ssim;
  float lowest, highest;
};

// rgb, v_out [height width, 3], v_alpha [height width]; last [height width], set to -1 outside the inner rectangle,
// where it is not null. To loss is added offset + scale (v_l1 l1 + v_ssim ssim), of the two sums.
struct BandResults {
  float *rgb, *v_out, *v_alpha;
  int32_t* last;
  float* loss;
  float offset, scale;
};

// Who does what: blocks walk down strips x segments of the inner rectangle, and some do the pixels around it.
struct BandPlan {
  int strips, segments, rows, walks, fringe_blocks;  // rows: of a segment; walks: strips x segments
};

struct Band {
  BandView view;
  BandResults results;
  BandPlan plan;
  int first_block, first_sum;  // of the launch's
};

constexpr int kMostBands = 16;  // of a launch

// Plans bands of one launch, for the current device; their views are given. `sums`: doubles of workspace that they need.
cudaError_t band_loss_plan(Band* bands, int count, int64_t* sums);

// Losses are added in the bands' order. Targets are all of bytes, or none.
cudaError_t band_loss_launch(const Band* bands, int count, double* sums, cudaStream_t stream);

}  // namespace nsmg
