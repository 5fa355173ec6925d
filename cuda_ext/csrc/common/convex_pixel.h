// One convex at one pixel, forward and backward: the CPU and CUDA twins call these alike, and so decide alike. The rule
// of compositing is in alpha.h.
#pragma once

#include "common/alpha.h"
#include "common/convex.h"

namespace nsmg {

constexpr int kConvexFloats = 26;  // of a row: mean (2), lines (18), sharpness, opacity, colour (3), depth

// sharpness times phi above which alpha is below 1/255 for every opacity up to one: log 254, rounded up.
template <typename T>
inline constexpr T kConvexFar = T(5.5375);

template <typename T>
struct ConvexSplat {
  T x, y;
  Vec3<T> lines[kCorners];
  T sharpness, opacity;
  Vec3<T> color;
  T depth;
};

NSMG_HD float convex_exp(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  return std::exp(x);
#endif
}
NSMG_HD double convex_exp(double x) { return std::exp(x); }
NSMG_HD float convex_log(float x) {
#ifdef __CUDA_ARCH__
  return __logf(x);
#else
  return std::log(x);
#endif
}
NSMG_HD double convex_log(double x) { return std::log(x); }

// Where a pixel lies to a convex.
template <typename T>
struct ConvexPlace {
  T qx, qy;                // the pixel from the centre
  T parts[kCorners];       // exp of each line's distance, less the largest; 0 where there is no line
  T sum, phi;
  T inside;                // the indicator
  T raw;                   // alpha before its cap; 0 where the splat does not count
};

template <typename T>
NSMG_HD ConvexPlace<T> place_in(const ConvexSplat<T>& splat, T px, T py) {
  ConvexPlace<T> m;
  m.qx = px - splat.x;
  m.qy = py - splat.y;
  const T none = T(-1e30);
  T most = none;
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    const Vec3<T>& line = splat.lines[k];
    const bool there = (line.x != T(0)) | (line.y != T(0));
    m.parts[k] = there ? line.x * m.qx + line.y * m.qy + line.z : none;
    most = larger(most, m.parts[k]);
  }
  m.raw = T(0);
  m.inside = m.sum = m.phi = T(0);
  if (!(splat.sharpness * most <= kConvexFar<T>)) return m;  // phi is above the largest
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    m.parts[k] = convex_exp(m.parts[k] - most);
    m.sum += m.parts[k];
  }
  m.phi = most + convex_log(m.sum);
  m.inside = T(1) / (T(1) + convex_exp(splat.sharpness * m.phi));
  const T raw = splat.opacity * m.inside;
  m.raw = raw >= kAlphaMin<T> ? raw : T(0);
  return m;
}

template <typename T>
struct ConvexSums {
  T transmittance, weight, depth;
  Vec3<T> color;
  bool closed;
};

template <typename T>
NSMG_HD ConvexSums<T> no_convexes() {
  return {T(1), T(0), T(0), {T(0), T(0), T(0)}, false};
}

// Blends a splat that counts (raw > 0) into a pixel that is open. Returns whether it was blended; if not, the pixel is
// closed from here on.
template <typename T>
NSMG_HD bool blend_convex(const ConvexSplat<T>& splat, T raw, ConvexSums<T>& sums) {
  const T alpha = smaller(raw, kAlphaMax<T>);
  const T after = sums.transmittance * (T(1) - alpha);
  if (after <= kTransmittanceMin<T>) {
    sums.closed = true;
    return false;
  }
  const T weight = alpha * sums.transmittance;
  sums.color = sums.color + weight * splat.color;
  sums.depth += weight * splat.depth;
  sums.weight += weight;
  sums.transmittance = after;
  return true;
}

// What the backward walk of a pixel, front to back, keeps.
template <typename T>
struct ConvexWalk {
  Vec3<T> v_color;
  T v_depth, v_alpha;  // v_alpha: by what is covered
  T transmittance;     // before the next splat
  T remainder;         // of the splats not passed yet: sum of weight times d loss / d weight
};

// out [3], depth and alpha (of any sign) of the pixel, and their gradients.
template <typename T>
NSMG_HD ConvexWalk<T> begin_convex_walk(const T* out, T depth, T alpha, const T* v_out, T v_depth, T v_alpha) {
  return {{v_out[0], v_out[1], v_out[2]},
          v_depth,
          v_alpha,
          T(1),
          v_alpha * std::abs(alpha) + v_out[0] * out[0] + v_out[1] * out[1] + v_out[2] * out[2] + v_depth * depth};
}

// One splat that was blended at the pixel: adds its 26 gradients to g, in the order of its numbers.
template <typename T>
NSMG_HD void walk_convex(const ConvexSplat<T>& splat, const ConvexPlace<T>& m, ConvexWalk<T>& walk, T* g) {
  const T alpha = smaller(m.raw, kAlphaMax<T>);
  const T weight = alpha * walk.transmittance;
  const T value = walk.v_alpha + dot(walk.v_color, splat.color) + walk.v_depth * splat.depth;
  walk.remainder -= weight * value;
  const T v_alpha = walk.transmittance * value - walk.remainder / (T(1) - alpha);
  walk.transmittance *= T(1) - alpha;
  g[22] += weight * walk.v_color.x;
  g[23] += weight * walk.v_color.y;
  g[24] += weight * walk.v_color.z;
  g[25] += weight * walk.v_depth;
  if (m.raw > kAlphaMax<T>) return;  // the cap is a constant
  g[21] += v_alpha * m.inside;
  const T v_level = -v_alpha * m.raw * (T(1) - m.inside);  // by sharpness times phi
  g[20] += v_level * m.phi;
  const T v_phi = v_level * splat.sharpness / m.sum;
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    const T v_line = v_phi * m.parts[k];
    g[0] -= v_line * splat.lines[k].x;
    g[1] -= v_line * splat.lines[k].y;
    g[2 + 3 * k] += v_line * m.qx;
    g[3 + 3 * k] += v_line * m.qy;
    g[4 + 3 * k] += v_line;
  }
}

}  // namespace nsmg
