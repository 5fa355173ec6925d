// What a thread of the fused update needs of its point's rows: where they are, their gradients, their statistics.
#pragma once

#include "cuda/optim/splat_update.h"
#include "common/sh.h"

namespace nsmg {

// Called by a whole warp, whose lanes hold the points first, first + 1, ...: the row of this lane's point among the rows
// [begin, end) of the group in one view, or -1. Rows are sorted by point and name each once, so there are at most 32.
__device__ __forceinline__ int row_of_lane(const int32_t* point_ids, int begin, int end, int first, int lane) {
  const int row = begin + lane;
  const uint32_t bit = row < end ? 1u << ((point_ids[row] - first) & 31) : 0u;
  const uint32_t present = __reduce_or_sync(0xffffffffu, bit);
  return (present >> lane) & 1 ? begin + __popc(present & ((1u << lane) - 1)) : -1;
}

struct RowGradient {
  SplatGradient<float> splat;
  Vec3<float> color;
  float absolute_x, absolute_y;
  float probe;  // 0, or NaN if a number of the gradient is not finite
};

template <typename... Floats>
__device__ __forceinline__ float probe_of(Floats... numbers) {
  return (... + (0.0f * numbers));
}

// The gradient of a row; where its colour was clamped at black, the colour's is zero.
__device__ __forceinline__ RowGradient load_gradient(const UpdateRows& rows, int64_t row) {
  RowGradient out;
  const Vec3<float> color = load3(rows.features, row);
  const float4* record = reinterpret_cast<const float4*>(rows.records) + 4 * row;
  const float4 a = record[0], b = record[1], c = record[2];
  out.splat = {a.x, a.y, a.z, a.w, b.x, rows.depth ? c.y : 0.0f, b.y};
  out.color = {b.z, b.w, c.x};
  out.absolute_x = c.z;
  out.absolute_y = c.w;
  out.probe = probe_of(out.splat.x, out.splat.y, out.splat.conic_a, out.splat.conic_b, out.splat.conic_c,
                       out.splat.depth, out.splat.opacity, out.color.x, out.color.y, out.color.z, out.absolute_x,
                       out.absolute_y);
  out.color.x = color.x > 0.0f ? out.color.x : 0.0f;
  out.color.y = color.y > 0.0f ? out.color.y : 0.0f;
  out.color.z = color.z > 0.0f ? out.color.z : 0.0f;
  return out;
}

// The radius in pixels of the 3-sigma circle around a splat, from its conic: see `screen_radii` in
// ns_multigpu/primitives/gaussians/functions.py.
__device__ __forceinline__ float screen_radius(const Vec3<float>& conic) {
  const float middle = 0.5f * (conic.x + conic.z), determinant = conic.x * conic.z - conic.y * conic.y;
  const float apart = larger(middle * middle - determinant, 0.01f * determinant * determinant);
  const float largest = middle + sqrtf(larger(apart, 0.0f));
  return ceilf(3.0f * rsqrtf(larger(determinant / larger(largest, 1e-12f), 1e-12f)));
}

// What a point's rows add to densification's running sums.
struct PointStatistics {
  float gradient = 0.0f, seen = 0.0f, radius = 0.0f;
  bool counted = false;  // anything was added

  __device__ __forceinline__ void load(const UpdateStatistics& s, int64_t point) {
    if (s.grad2d != nullptr) gradient = s.grad2d[point];
    if (s.seen != nullptr) seen = s.seen[point];
    if (s.radii_max != nullptr) radius = s.radii_max[point];
  }

  __device__ __forceinline__ void add(const UpdateLaunch& launch, const Camera<float>& camera, const RowGradient& g,
                                      int64_t row) {
    const float views = static_cast<float>(launch.views.count);
    const float x = (launch.settings.absgrad ? g.absolute_x : g.splat.x) * (0.5f * camera.width) * views;
    const float y = (launch.settings.absgrad ? g.absolute_y : g.splat.y) * (0.5f * camera.height) * views;
    gradient += sqrtf(x * x + y * y);
    count(camera, launch.statistics.radii_max != nullptr ? screen_radius(load3(launch.rows.conics, row)) : 0.0f);
  }

  // A row that is seen, if not drawn, of that radius in pixels.
  __device__ __forceinline__ void count(const Camera<float>& camera, float pixels) {
    counted = true;
    seen += 1.0f;
    radius = larger(radius, pixels / larger(camera.width, camera.height));
  }

  __device__ __forceinline__ void store(const UpdateStatistics& s, int64_t point) const {
    if (s.grad2d != nullptr) s.grad2d[point] = gradient;
    if (s.seen != nullptr) s.seen[point] = seen;
    if (s.radii_max != nullptr) s.radii_max[point] = radius;
  }
};

}  // namespace nsmg
