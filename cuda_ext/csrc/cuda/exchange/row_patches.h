// Patches as kernels look at them: uploaded by value, found by view, and tested as `intersect` tests.
#pragma once

#include <cuda_runtime.h>

#include "common/ellipse.h"
#include "cuda/exchange/row_exchange.h"

namespace nsmg {

constexpr int kUpload = 128;  // patches a launch: within the 4 KB of kernel parameters

struct PatchBatch {
  RankPatch patches[kUpload];
};

static __global__ void upload_kernel(const __grid_constant__ PatchBatch batch, int count, RankPatch* table) {
  if (int(threadIdx.x) < count) table[threadIdx.x] = batch.patches[threadIdx.x];
}

inline void upload_patches(const RankPatch* host_patches, int patch_count, RankPatch* patches, cudaStream_t stream) {
  for (int first = 0; first < patch_count; first += kUpload) {
    PatchBatch batch = {};
    const int number = patch_count - first < kUpload ? patch_count - first : kUpload;
    for (int k = 0; k < number; ++k) batch.patches[k] = host_patches[first + k];
    upload_kernel<<<1, kUpload, 0, stream>>>(batch, number, patches + first);
  }
}

// Whether the box around the row's mean holds a pixel centre of the patch: the rule of `intersect`.
__device__ __forceinline__ bool box_overlaps(float2 mean, int2 radius, const RankPatch& patch) {
  const float radius_x = float(radius.x), radius_y = float(radius.y);
  int first, last;
  covered_steps(Span<float>{mean.x - radius_x, mean.x + radius_x}, float(patch.x0), patch.x1 - patch.x0, first, last);
  if (first >= last) return false;
  covered_steps(Span<float>{mean.y - radius_y, mean.y + radius_y}, float(patch.y0), patch.y1 - patch.y0, first, last);
  return first < last;
}

// Calls `reached(patch)` for each patch that the row overlaps.
template <typename Reached>
__device__ __forceinline__ void patches_reached(const RouteRows& rows, const RankPatch* patches, int patch_count,
                                                int64_t row, Reached reached) {
  const int2 radius = reinterpret_cast<const int2*>(rows.radii)[row];
  if (radius.x <= 0 || radius.y <= 0) return;
  const int view = rows.view_ids[row];
  int first = 0, last = patch_count;
  while (first < last) {  // the first patch of a view not before the row's
    const int middle = (first + last) / 2;
    if (__ldg(&patches[middle].view) < view)
      first = middle + 1;
    else
      last = middle;
  }
  const float2 mean = reinterpret_cast<const float2*>(rows.means2d)[row];
  for (int k = first; k < patch_count; ++k) {
    const int32_t* p = &patches[k].view;
    if (__ldg(p) != view) break;
    const RankPatch patch{view, __ldg(p + 1), __ldg(p + 2), __ldg(p + 3), __ldg(p + 4), __ldg(p + 5),
                          __ldg(p + 6)};
    if (box_overlaps(mean, radius, patch)) reached(patch);
  }
}

__device__ __forceinline__ int64_t real_rows(const RouteRows& rows) {
  const int64_t real = *rows.real;
  return real < rows.count ? real : rows.count;
}

}  // namespace nsmg
