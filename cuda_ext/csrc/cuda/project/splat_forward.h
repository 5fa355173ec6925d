// The fused way from raw parameters to splats: culling with compaction, then projection and harmonics of what is left.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/optim/splat_lazy.h"
#include "cuda/common/splat_views.h"

namespace nsmg {

// Raw parameters: log-scales and logits.
struct RawPoints {
  const float *means, *quats, *log_scales, *logits, *sh_dc, *sh_rest;
  int count;
  int rest_floats;  // of a point in sh_rest: 3 R
};

// What the points may have missed of a block of steps; null pointers: nothing.
struct MissedSteps {
  const void *moments1[kUpdateTensors], *moments2[kUpdateTensors];
  bool compact;  // moments are bfloat16, not float32
  const uint8_t* last;
  const float* table;
};

struct SplatSettings {
  int degree;  // or kPlainColor
  float eps2d;
  bool antialiased;
};

struct SplatRows {
  int32_t *view_ids, *point_ids;
  int64_t* count;
  float *means2d, *conics, *opacities, *features, *depths;
  int32_t* radii;
  int capacity;
};

// Points of one view that a block of the culling kernels takes.
constexpr int kCullBlock = 256;

// Buffers of the culling, sized by cull_blocks() and cull_scan_bytes().
struct CullBuffers {
  uint32_t* bits;    // [views, 8 * blocks of points]: a bit for each point that may be seen
  int32_t* counts;   // [views * blocks + 1]
  int64_t* offsets;  // [views * blocks + 1]
  void* scan;
  size_t scan_bytes;
  const float* boxes;  // of the points' groups, or null: see splat_boxes.h
  uint8_t* shows;      // [views, groups], where there are boxes
};

inline int cull_blocks(int points) { return (points + kCullBlock - 1) / kCullBlock; }

// Bytes that the prefix sum over `items` counts needs.
cudaError_t cull_scan_bytes(int64_t items, size_t* bytes, cudaStream_t stream);

// Fills view_ids, point_ids and count: the rows of points that may have alpha 1/255 in a view, in (view, point) order.
// Where steps were missed, of points that may have come there: more rows, and among them those that there should be.
cudaError_t splat_cull_launch(const RawPoints& points, const MissedSteps& missed, const Views& views, float eps2d,
                              const CullBuffers& buffers, const SplatRows& rows, cudaStream_t stream);

// Fills the rest of all lines from view_ids, point_ids and count; padding rows get zeros.
cudaError_t splat_rows_launch(const RawPoints& points, const MissedSteps& missed, const Views& views,
                              const SplatSettings& settings, const SplatRows& rows, cudaStream_t stream);

}  // namespace nsmg
