// The parts of the walk down a strip (band_loss.cu): where it goes, what lies in shared memory, filters, and SSIM.
//
// A lane works on a *pair*: one channel of two neighbouring pixels. Pairs lie interleaved as the pixels do (r, g, b of
// the first two pixels, r, g, b of the next two, ...), so that the windows of both pixels are six pairs, every third
// from the lane's on, which is 12 numbers read for 22 taps, and lanes read neighbouring 16 bytes.
#pragma once

#include <cuda_runtime.h>

#include "common/compositing.h"
#include "common/ssim.h"
#include "cuda/loss/band_loss.h"

namespace nsmg {

constexpr int kChannels = 3;
constexpr int kGroup = 128, kThreads = 2 * kGroup;  // two groups of warps: windows and pixels
constexpr int kBeyond = kSsimHalf * kChannels;      // pairs that a window of two pixels spans beyond the first
constexpr int kFiltered = kGroup / kChannels * kChannels;          // pairs of window centres
constexpr int kLoaded = kFiltered + kBeyond;                       // pairs that their windows cover
constexpr int kFinished = kFiltered - kBeyond;                     // pairs whose windows' derivatives are all there
constexpr int kStrip = 2 * kFinished / kChannels;                  // pixels: 74
constexpr int kWindowRows = 2 * kSsimHalf;                         // rows of a window before its last
constexpr int kFar = 2 * kFiltered / kChannels;                    // pixels that a group loads beyond kFiltered pairs
constexpr int kPairsOfWindow = (kSsimTaps + 1) / 2;
constexpr int kRing = 16;                                          // rows of images in shared memory

// Rows are counted from the walk's first. In round t row t of the images comes in, windows that end in row t - 1 are
// evaluated, their derivatives spread in round t + 1, and so the gradient of row t - kDelay is complete in round t.
constexpr int kDelay = kWindowRows + 2;
static_assert(kRing > kDelay, "the row that is finished must still be there when the newest comes in");

struct WalkMemory {
  float4 images[kRing][(kLoaded + 3) / 4 * 4];  // of both pixels u = pred + target, then v = pred - target
  float4 mean_u[2][kGroup];                     // derivatives by the mean, and by u: of both pixels each
  float2 by_v[2][kGroup];
  float2 shades[2][kFinished + 1];  // gradient by out times background
  double sums[kThreads / 32];
};

// Where rows lie: unsigned, as the remainder of a number that might be negative takes four instructions.
__device__ __forceinline__ unsigned ring_slot(int row) { return unsigned(row) % kRing; }
__device__ __forceinline__ unsigned parity(int row) { return unsigned(row) % 2; }

// What one block does: columns [left, left + kStrip) of the inner rectangle's rows [first, end), on a walk from row
// `start` of the images to row start + steps.
struct Walk {
  int left, first, end, start, steps;
};

__device__ __forceinline__ Walk walk_at(const BandView& view, const BandPlan& plan, int index) {
  const LossRectangle& inner = view.inner;
  Walk walk;
  walk.left = inner.x0 + index % plan.strips * kStrip;
  walk.first = inner.y0 + index / plan.strips * plan.rows;
  walk.end = min(walk.first + plan.rows, inner.y1);
  walk.start = max(walk.first - kWindowRows, 0);
  walk.steps = walk.end + kWindowRows - walk.start;
  return walk;
}

// Adds the k-th pair of six to the windows that begin at the first and at the second pixel of the first pair.
__device__ __forceinline__ void add_pair(const SsimWindow<float>& window, int k, float even, float odd,
                                         float (&sums)[2]) {
  sums[0] = k == 0 ? window.weight[0] * even : fmaf(window.weight[2 * k], even, sums[0]);
  if (2 * k + 1 < kSsimTaps) sums[0] = fmaf(window.weight[2 * k + 1], odd, sums[0]);
  if (k > 0) sums[1] = fmaf(window.weight[2 * k - 1], even, sums[1]);
  sums[1] = k == 0 ? window.weight[0] * odd : fmaf(window.weight[2 * k], odd, sums[1]);
}

// The filter down the columns of two pixels, in transposed form: a new row costs one multiply-add a tap.
struct ColumnPair {
  float pending[kSsimTaps - 1][2] = {};

  // Replaces `values`, of the newest row, by what is filtered out of it and the ten rows before.
  __device__ __forceinline__ void push(const SsimWindow<float>& window, float (&values)[2]) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float value = values[side];
      values[side] = fmaf(window.weight[0], value, pending[0][side]);
#pragma unroll
      for (int k = 0; k < kSsimTaps - 2; ++k)
        pending[k][side] = fmaf(window.weight[k + 1], value, pending[k + 1][side]);
      pending[kSsimTaps - 2][side] = window.weight[kSsimTaps - 1] * value;
    }
  }
};

// SSIM at a window centre. Its gradient by pred at a pixel of the window, of weight w, is
// w (by_mean + u by_u + v by_v).
struct WindowPoint {
  float value, by_mean, by_u, by_v;
};

// `ssim_point` (common/ssim.h) with every difference of like numbers worked out: with the luminance L = 1 - v^2 m and
// the contrast C = 1 - var_v s, where m and s are the inverse denominators, by_u is L s (1 - C) and by_v -L s (1 + C).
__device__ __forceinline__ WindowPoint window_point(float u, float v, float uu, float vv) {
  const float c1 = 1e-4f, c2 = 9e-4f;
  const float u2 = u * u, v2 = v * v, var_u = uu - u2, var_v = vv - v2;
  const float inv_mean = reciprocal_fast(fmaf(0.5f, u2 + v2, c1)), inv_var = reciprocal_fast(fmaf(0.5f, var_u + var_v, c2));
  const float luminance = fmaf(-v2, inv_mean, 1.0f), contrast = fmaf(-var_v, inv_var, 1.0f);
  const float slope = luminance * inv_var * inv_var, part = v * inv_mean;
  WindowPoint p;
  p.value = luminance * contrast;
  p.by_u = slope * var_v;
  p.by_v = -slope * (var_u + 2 * c2);
  const float by_luminance = contrast * part * fmaf(u + v, part, -2.0f);
  p.by_mean = fmaf(-v, p.by_v, fmaf(-u, p.by_u, by_luminance));
  return p;
}

// A colour over the background, as composite_kernel has it.
__device__ __forceinline__ float blend(float out, float alpha, float background) {
  return fmaf(1.0f - alpha, background, out);
}
__device__ __forceinline__ float clamped(float value, const BandView& view) {
  return value < view.lowest ? view.lowest : value > view.highest ? view.highest : value;  // NaN stays NaN
}

// What a lane reads ahead of a pair of pixels.
template <typename Target>
struct Ahead {
  float out[2] = {}, alpha[2] = {};
  Target target[2] = {};

  __device__ __forceinline__ void load(const float* out_at, const float* alpha_at, const Target* target_at,
                                       const bool (&present)[2]) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      if (!present[side]) continue;
      out[side] = __ldg(out_at + kChannels * side);
      alpha[side] = __ldg(alpha_at + side);
      target[side] = __ldg(target_at + kChannels * side);
    }
  }

  // u and v for shared memory; `shown`: the colours; sets a bit in `passed` for each that the clamp leaves as it is.
  __device__ __forceinline__ float4 images(const BandView& view, float background, float (&shown)[2],
                                           unsigned& passed) const {
    float t[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const float value = blend(out[side], alpha[side], background);
      shown[side] = clamped(value, view);
      passed |= unsigned(shown[side] == value) << side;
      t[side] = image_value(target[side]);
    }
    return make_float4(shown[0] + t[0], shown[1] + t[1], shown[0] - t[0], shown[1] - t[1]);
  }
};

// Waits for the other threads of the block, wherever in the code they do.
__device__ __forceinline__ void meet() {
#ifdef __CUDA_ARCH__
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ double total_of_warp(double value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// A lane's sum down its walk, in two floats so that it stays near a double's: up to 32 numbers, then such sums.
struct LongSum {
  float total = 0, recent = 0;
  __device__ __forceinline__ void fold(int round) {
    if (unsigned(round) % 16 == 15) total += recent, recent = 0;
  }
  __device__ __forceinline__ double value() const { return double(total) + double(recent); }
};

}  // namespace nsmg
