// Adam's steps of points that are not drawn, deferred within a block of steps: see common/lazy_adam.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/splat_views.h"

namespace nsmg {

constexpr int kLazyFloats = 8;  // of a LazyLine in memory

struct LazyState {
  uint8_t* last;   // [N] the step of the block up to which a point is there
  float* table;    // [kLazySteps + 1, kUpdateTensors, kLazyFloats]
  int32_t* steps;  // [1] taken in this block
};

// Counts a step and adds it to the table; not one that stands still, nor one more than kLazySteps.
cudaError_t splat_lazy_extend_launch(const LazyState& lazy, const float* scalars, cudaStream_t stream);

struct FlushLaunch {
  float* values[kUpdateTensors];
  void *moments1[kUpdateTensors], *moments2[kUpdateTensors];
  bool compact;  // moments are bfloat16, not float32
  int points, rest_floats;
  LazyState lazy;
};

// Takes all deferred steps and begins a new block.
cudaError_t splat_flush_launch(const FlushLaunch& launch, cudaStream_t stream);

}  // namespace nsmg
