// The fused way back: from the gradients of rows to parameters that have taken a step of Adam.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/optim/splat_lazy.h"
#include "cuda/common/splat_views.h"

namespace nsmg {

// Points of a warp: rows of a view within such a group lie together.
constexpr int kGroup = 32;

NSMG_HD int update_groups(int points) { return (points + kGroup - 1) / kGroup; }

struct UpdateRows {
  const int32_t *view_ids, *point_ids;
  const int64_t* counts;  // rows of each segment that are real; null: all
  const float *conics;    // [M, 3]; null where radii_max is
  const float *features;  // [M, 3]
  const int32_t* radii;   // [M, 2]
  const float* records;   // [M, 16]: gradients, as rasterize_backward_into writes them
  int rows;
  int segments;  // parts of equal length, each with as many of the views, one after the other
  bool depth;    // the depth's gradient counts
};

struct UpdateStatistics {  // [N] each, or null
  float *grad2d, *seen, *radii_max;
};

// Flag of gradients that are not finite, over the rows of some views.
struct UpdateFiniteFlag {
  float* at;  // or null
  int first_view, end_view;
};

struct UpdateSettings {
  int degree;  // or kPlainColor
  float eps2d;
  bool antialiased, absgrad;
  float opacity_weight, scale_weight;  // of each row that is drawn
  float max_ratio;                     // of scales, beyond which `needles` weighs
  float whole_step_scale;              // the scale from which on means take whole steps
};

struct UpdateLaunch {
  float* values[kUpdateTensors];
  void *moments1[kUpdateTensors], *moments2[kUpdateTensors];
  bool compact;          // moments are bfloat16, not float32
  const float* scalars;  // [kUpdateTensors, 8]
  int points, rest_floats;
  UpdateRows rows;
  UpdateStatistics statistics;
  UpdateFiniteFlag finite_flag;
  UpdateSettings settings;
  int32_t* starts;  // [views, groups + 1]: where a view's rows of a group begin
  float* viewmats;  // [views, 4, 4]: the gradient by the cameras' matrices; or null
  float* poses;     // [views, kPose, kPoseBlocks]: the blocks' parts of it
  const float* needles;  // the weight of every point's ratio of scales; or null
  float* boxes;     // of the points' groups, widened to what is written; or null
  LazyState lazy;   // null pointers: every point takes every step
  Views views;
};

cudaError_t splat_update_launch(const UpdateLaunch& launch, cudaStream_t stream);

// Blocks that take the rows of one view. As many for any number of rows, so that the same rows give the same bits.
constexpr int kPoseBlocks = 512;

// Fills `viewmats`, from `starts`.
cudaError_t splat_poses_launch(const UpdateLaunch& launch, cudaStream_t stream);

// The lazy one's part: steps the points that are drawn, from `starts`, and extends the table. C: of the views' cameras.
template <typename C>
cudaError_t splat_lazy_update_launch(const UpdateLaunch& launch, cudaStream_t stream);
template <>
cudaError_t splat_lazy_update_launch<Camera<float>>(const UpdateLaunch& launch, cudaStream_t stream);
template <>
cudaError_t splat_lazy_update_launch<LensCamera<float>>(const UpdateLaunch& launch, cudaStream_t stream);

}  // namespace nsmg
