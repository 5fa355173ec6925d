// One surfel at one pixel, forward and backward: the CPU and CUDA twins call these alike, and so decide alike. The rule
// of compositing is in alpha.h; what is summed, in cuda_ext/ops/surfels.py.
#pragma once

#include "common/alpha.h"
#include "common/vec.h"

namespace nsmg {

constexpr int kSurfelFloats = 19;   // of a row: mean (2), u, v, w, normal (3 each), opacity, colour (3), depth
constexpr int kSurfelGeometry = 6;  // of a pixel: depth, normal (3), distortion, median depth

template <typename T>
struct SurfelSplat {
  T x, y;
  Vec3<T> u, v, w, normal;
  T opacity;
  Vec3<T> color;
  T depth;
};

NSMG_HD float surfel_exp(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  return std::exp(x);
#endif
}
NSMG_HD double surfel_exp(double x) { return std::exp(x); }

// How a pixel's ray meets a surfel's plane.
template <typename T>
struct SurfelMeeting {
  Vec3<T> h_u, h_v;
  T s, t, inverse;  // the place, in standard deviations; 1 / the third number of the planes' crossing
  T dx, dy;         // the splat's centre on the screen minus the pixel's
  T fall;           // exp(-sigma)
  T raw;            // alpha before its cap; 0 where the splat does not count
  bool on_plane;    // whether the crossing decides, not the filter on the screen
};

template <typename T>
NSMG_HD SurfelMeeting<T> meet(const SurfelSplat<T>& splat, T px, T py) {
  SurfelMeeting<T> m;
  m.h_u = px * splat.w - splat.u;
  m.h_v = py * splat.w - splat.v;
  const Vec3<T> crossing = cross(m.h_u, m.h_v);
  const bool meets = crossing.z != T(0);
  m.inverse = T(1) / (meets ? crossing.z : T(1));
  m.s = crossing.x * m.inverse;
  m.t = crossing.y * m.inverse;
  const bool ahead = m.s * splat.w.x + m.t * splat.w.y + splat.w.z > T(0);
  m.dx = splat.x - px;
  m.dy = splat.y - py;
  const T plane = m.s * m.s + m.t * m.t, screen = T(2) * (m.dx * m.dx + m.dy * m.dy);
  m.on_plane = ahead & (plane <= screen);
  m.fall = surfel_exp(T(-0.5) * (m.on_plane ? plane : screen));
  const T raw = splat.opacity * m.fall;
  m.raw = meets & (raw >= kAlphaMin<T>) ? raw : T(0);
  return m;
}

template <typename T>
struct SurfelSums {
  T transmittance, weight, depth, distortion, median;  // weight: the sum of weights so far
  Vec3<T> color, normal;
  bool closed;
};

template <typename T>
NSMG_HD SurfelSums<T> no_surfels() {
  return {T(1), T(0), T(0), T(0), T(0), {T(0), T(0), T(0)}, {T(0), T(0), T(0)}, false};
}

// Blends a splat that counts (raw > 0) into a pixel that is open. Returns whether it was blended; if not, the pixel is
// closed from here on.
template <typename T>
NSMG_HD bool blend_surfel(const SurfelSplat<T>& splat, T raw, SurfelSums<T>& sums) {
  const T alpha = smaller(raw, kAlphaMax<T>);
  const T after = sums.transmittance * (T(1) - alpha);
  if (after <= kTransmittanceMin<T>) {
    sums.closed = true;
    return false;
  }
  const T weight = alpha * sums.transmittance;
  sums.distortion += T(2) * weight * (splat.depth * sums.weight - sums.depth);
  sums.color = sums.color + weight * splat.color;
  sums.normal = sums.normal + weight * splat.normal;
  sums.depth += weight * splat.depth;
  sums.weight += weight;
  if (sums.transmittance > T(0.5)) sums.median = splat.depth;
  sums.transmittance = after;
  return true;
}

// What the backward walk of a pixel, front to back, keeps.
template <typename T>
struct SurfelWalk {
  Vec3<T> v_color, v_normal;
  T v_depth, v_distortion, v_median, v_alpha;  // v_alpha: by what is covered
  T total_weight, total_depth;
  T transmittance, weight, depth;              // before the next splat
  T remainder;                                 // of the splats not passed yet: sum of weight times d loss / d weight
};

// out [3], geometry [6] and alpha (of any sign) of the pixel, and their gradients.
template <typename T>
NSMG_HD SurfelWalk<T> begin_walk(const T* out, const T* geometry, T alpha, const T* v_out, const T* v_geometry,
                                 T v_alpha) {
  SurfelWalk<T> walk;
  walk.v_color = {v_out[0], v_out[1], v_out[2]};
  walk.v_depth = v_geometry[0];
  walk.v_normal = {v_geometry[1], v_geometry[2], v_geometry[3]};
  walk.v_distortion = v_geometry[4];
  walk.v_median = v_geometry[5];
  walk.v_alpha = v_alpha;
  walk.total_weight = std::abs(alpha);
  walk.total_depth = geometry[0];
  walk.transmittance = T(1);
  walk.weight = walk.depth = T(0);
  // The distortion is a form of second degree in the weights: they times its derivatives sum up to twice itself.
  walk.remainder = v_alpha * walk.total_weight + v_out[0] * out[0] + v_out[1] * out[1] + v_out[2] * out[2] +
                   v_geometry[0] * geometry[0] + v_geometry[1] * geometry[1] + v_geometry[2] * geometry[2] +
                   v_geometry[3] * geometry[3] + T(2) * v_geometry[4] * geometry[4];
  return walk;
}

// One splat that was blended at the pixel: adds its 19 gradients to g, in the order of its numbers. `final`: whether it
// was the last one.
template <typename T>
NSMG_HD void walk_surfel(const SurfelSplat<T>& splat, const SurfelMeeting<T>& m, T px, T py, bool final,
                         SurfelWalk<T>& walk, T* g) {
  const T alpha = smaller(m.raw, kAlphaMax<T>);
  const T weight = alpha * walk.transmittance;
  const T behind = walk.total_weight - walk.weight - weight;  // weights of what lies behind
  const T deep_behind = walk.total_depth - walk.depth - weight * splat.depth;
  const T spread = T(2) * (splat.depth * (walk.weight - behind) - walk.depth + deep_behind);
  const T value = walk.v_alpha + dot(walk.v_color, splat.color) + walk.v_depth * splat.depth +
                  dot(walk.v_normal, splat.normal) + walk.v_distortion * spread;
  walk.remainder -= weight * value;
  const T v_alpha = walk.transmittance * value - walk.remainder / (T(1) - alpha);
  const T after = walk.transmittance * (T(1) - alpha);
  const bool halfway = (walk.transmittance > T(0.5)) & ((after <= T(0.5)) | final);
  g[18] += weight * (walk.v_depth + T(2) * walk.v_distortion * (walk.weight - behind)) +
           (halfway ? walk.v_median : T(0));
  g[11] += weight * walk.v_normal.x;
  g[12] += weight * walk.v_normal.y;
  g[13] += weight * walk.v_normal.z;
  g[15] += weight * walk.v_color.x;
  g[16] += weight * walk.v_color.y;
  g[17] += weight * walk.v_color.z;
  walk.weight += weight;
  walk.depth += weight * splat.depth;
  walk.transmittance = after;
  if (m.raw > kAlphaMax<T>) return;  // the cap is a constant
  g[14] += v_alpha * m.fall;
  const T v_sigma = -v_alpha * m.raw;
  if (!m.on_plane) {
    g[0] += T(2) * v_sigma * m.dx;
    g[1] += T(2) * v_sigma * m.dy;
    return;
  }
  const T v_s = v_sigma * m.s * m.inverse, v_t = v_sigma * m.t * m.inverse;
  const Vec3<T> v_crossing = {v_s, v_t, -(v_s * m.s + v_t * m.t)};
  const Vec3<T> v_hu = cross(m.h_v, v_crossing), v_hv = cross(v_crossing, m.h_u);
  g[2] -= v_hu.x;
  g[3] -= v_hu.y;
  g[4] -= v_hu.z;
  g[5] -= v_hv.x;
  g[6] -= v_hv.y;
  g[7] -= v_hv.z;
  g[8] += px * v_hu.x + py * v_hv.x;
  g[9] += px * v_hu.y + py * v_hv.y;
  g[10] += px * v_hu.z + py * v_hv.z;
}

}  // namespace nsmg
