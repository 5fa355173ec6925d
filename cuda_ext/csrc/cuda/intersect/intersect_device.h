// What counting and listing share on the device: a row's splat, and its patches.
#pragma once

#include <cuda_runtime.h>

#include "common/ellipse.h"
#include "cuda/intersect/intersect.h"

namespace nsmg {

struct RowSplat {
  Ellipse<float> ellipse;
  float radius_x, radius_y;
  int view;
};

__device__ __forceinline__ bool row_alive(const IntersectRows& rows, int row) {
  const int2 radius = __ldg(reinterpret_cast<const int2*>(rows.radii) + row);
  return radius.x > 0 && radius.y > 0;
}

__device__ __forceinline__ RowSplat load_row(const IntersectRows& rows, int row) {
  const float2 mean = __ldg(reinterpret_cast<const float2*>(rows.means2d) + row);
  const int2 radius = __ldg(reinterpret_cast<const int2*>(rows.radii) + row);
  const float* conic = rows.conics + 3 * size_t(row);
  RowSplat splat;
  splat.ellipse = make_ellipse(mean.x, mean.y, __ldg(conic), __ldg(conic + 1), __ldg(conic + 2),
                               __ldg(rows.opacities + row));
  splat.radius_x = float(radius.x);
  splat.radius_y = float(radius.y);
  splat.view = __ldg(rows.view_ids + row);
  return splat;
}

// The first patch of the table whose view is not before `view`.
__device__ __forceinline__ int first_patch(const PatchTable& table, int view) {
  int first = 0, last = table.count;
  while (first < last) {
    const int middle = (first + last) / 2;
    if (__ldg(&table.patches[middle].view) < view)
      first = middle + 1;
    else
      last = middle;
  }
  return first;
}

__device__ __forceinline__ PatchTiles load_patch(const PatchTable& table, int index) {
  const int32_t* p = &table.patches[index].view;
  return {__ldg(p), __ldg(p + 1), __ldg(p + 2), __ldg(p + 3), __ldg(p + 4), __ldg(p + 5), __ldg(p + 6)};
}

// Calls use(patch, columns) for every patch of the splat's view whose pixels its box meets from the side.
template <typename Use>
__device__ __forceinline__ void for_patches(const PatchTable& table, const RowSplat& splat, int tile_size,
                                            const Use& use) {
  for (int k = first_patch(table, splat.view); k < table.count; ++k) {
    const PatchTiles patch = load_patch(table, k);
    if (patch.view != splat.view) break;
    const TileRange columns = tile_columns(splat.ellipse, splat.radius_x, patch, tile_size);
    if (columns.first < columns.last) use(patch, columns);
  }
}

// The bits of a float as an unsigned number of the same order.
__device__ __forceinline__ uint32_t ordered_bits(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

}  // namespace nsmg
