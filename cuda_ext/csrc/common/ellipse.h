// The support of a splat: the ellipse a ux^2 + 2 b ux uy + c uy^2 <= 2 ln(255 o), u = pixel - mean, outside of which
// alpha < 1/255. Bounds are rounded outward: a pixel that rounding in the compositing may still count is never lost.
// The exact span of an ellipse over a slab follows the scanline test of Speedy-Splat (Hanson et al. 2025, section 3.1).
//
// No branches, so that a loop over splats becomes vector code.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "alpha.h"

namespace nsmg {

template <typename T>
struct Span {
  T lo, hi;  // empty when lo > hi
};

template <typename T>
struct Ellipse {
  T mean_x, mean_y;
  T b, inv_c;     // of the conic; 1 / c
  T c_q, det;     // c q and a c - b^2, q the inflated 2 ln(255 o)
  T peak_x;       // ux at which uy is largest
  T extent_x;     // largest ux; negative when the splat has no support
  T slack;        // pixels added on either side against rounding

  // Range of y (absolute, pixels) that the ellipse covers while x lies in [x_lo, x_hi].
  inline Span<T> y_span(T x_lo, T x_hi) const {
    const T lo = x_lo - mean_x, hi = x_hi - mean_x;
    const T reach = extent_x + slack;
    const bool apart = (lo > reach) | (hi < -reach);
    const T at_top = std::min(std::max(peak_x, lo), hi);
    const T at_bottom = std::min(std::max(-peak_x, lo), hi);
    const T top = std::sqrt(std::max(c_q - det * at_top * at_top, T(0))) - b * at_top;
    const T bottom = -std::sqrt(std::max(c_q - det * at_bottom * at_bottom, T(0))) - b * at_bottom;
    const T far = std::numeric_limits<T>::max();
    return {apart ? far : mean_y + bottom * inv_c - slack, apart ? -far : mean_y + top * inv_c + slack};
  }
};

// An upper bound of ln x, x > 0, at most 1e-3 too large: a cubic on the mantissa (minimax, raised by its error 6.4e-4).
inline float log_above(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const float exponent = static_cast<float>((bits >> 23) - 127);
  bits = (bits & 0x007fffff) | 0x3f800000;
  float m;
  std::memcpy(&m, &bits, sizeof(m));
  const float log2_m = ((0.1582487f * m - 1.0518750f) * m + 3.0478841f) * m - 2.1529f;
  return 0.69314718f * (exponent + log2_m);
}
inline double log_above(double x) { return std::log(x); }

// conic = (a, b, c), the inverse of the 2D covariance. A conic that is not positive definite has no bounded support:
// its ellipse is the whole plane, and the compositing rule alone decides.
template <typename T>
inline Ellipse<T> make_ellipse(T mean_x, T mean_y, T a, T b, T c, T opacity) {
  const bool seen = opacity >= kAlphaMin<T>;
  // a c - b^2 to the last bits, although the two nearly cancel for thin splats (Kahan; Jeannerod et al. 2013).
  const T bb = b * b;
  const T det = std::fma(a, c, -bb) + std::fma(-b, b, bb);
  const bool bounded = (det > 0) & (a > 0) & (c > 0);
  const T inv_det = T(1) / (bounded ? det : T(1));
  // The compositing evaluates sigma with an error of a few ulp of its largest term, which is ac/det times the result.
  const T inflation = T(1.001) + T(16) * std::numeric_limits<T>::epsilon() * (a * c * inv_det);
  const T q = T(2) * log_above(T(255) * (seen ? opacity : T(1))) * inflation + T(1e-3);
  const T extent_x = std::sqrt(std::max(q * c * inv_det, T(0))), extent_y = std::sqrt(std::max(q * a * inv_det, T(0)));
  const T size = std::abs(mean_x) + std::abs(mean_y) + extent_x + extent_y;
  const T far = std::numeric_limits<T>::max() * T(1e-3);
  Ellipse<T> e;
  e.mean_x = mean_x;
  e.mean_y = mean_y;
  e.b = b;
  e.inv_c = T(1) / (bounded ? c : T(1));
  e.c_q = bounded ? c * q : far;
  e.det = bounded ? det : T(0);
  e.peak_x = bounded ? -b / a * extent_y : T(0);
  e.extent_x = seen ? (bounded ? extent_x : far) : T(-1);
  e.slack = seen & bounded ? T(2e-3) + T(1e-6) * size : T(0);
  return e;
}

// Indices [first, last) of the unit steps, counted from `origin` and at most `count`, whose centre lies in the span.
template <typename T>
inline void covered_steps(Span<T> span, T origin, int count, int& first, int& last) {
  const T lo = std::min(std::max(std::ceil(span.lo - origin - T(0.5)), T(0)), T(count));
  const T hi = std::min(std::max(std::floor(span.hi - origin + T(0.5)), T(0)), T(count));
  first = static_cast<int>(lo);
  last = static_cast<int>(hi);
}

}  // namespace nsmg
