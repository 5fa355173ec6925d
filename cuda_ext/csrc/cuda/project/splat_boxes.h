// The boxes of groups of points, and in which views they may show: see common/box.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/box.h"
#include "cuda/common/splat_views.h"

namespace nsmg {

NSMG_HD int box_groups(int points) { return (points + kBoxPoints - 1) / kBoxPoints; }

// Writes the boxes [groups, kBoxFloats] of points as they are in memory.
cudaError_t splat_boxes_launch(const float* means, const float* log_scales, int points, float* boxes,
                               cudaStream_t stream);

// Writes shows [views, groups]: 1 where a point of the group may be kept, else 0.
// `table`: of the deferred steps, or null; `compact`: whether moments are bfloat16, not float32.
cudaError_t box_views_launch(const float* boxes, int groups, const Views& views, float eps2d, const float* table,
                             bool compact, uint8_t* shows, cudaStream_t stream);

}  // namespace nsmg
