// The support of a splat: the ellipse a ux^2 + 2 b ux uy + c uy^2 <= 2 ln(255 o), u = pixel - mean, outside of which
// alpha < 1/255. Bounds are rounded outward: a pixel that rounding in the compositing may still count is never lost.
// The exact span of an ellipse over a slab follows the scanline test of Speedy-Splat (Hanson et al. 2025, section 3.1).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "alpha.h"

namespace ns_multigpu {

template <typename T>
struct Span {
  T lo, hi;  // empty when lo > hi
};

template <typename T>
struct Ellipse {
  T mean_x, mean_y;
  T b, inv_c;     // conic terms, 1 / c
  T c_q, det;     // c q and a c - b^2, q the inflated 2 ln(255 o)
  T peak_x;       // ux at which uy is largest
  T extent_x;     // largest ux; negative when the splat has no support
  T slack;        // pixels added on either side against rounding

  // Range of y (absolute, pixels) that the ellipse covers while x lies in [x_lo, x_hi].
  Span<T> y_span(T x_lo, T x_hi) const {
    const T lo = x_lo - mean_x, hi = x_hi - mean_x;
    const T reach = extent_x + slack;
    const bool apart = lo > reach || hi < -reach;
    const T at_top = std::min(std::max(peak_x, lo), hi);
    const T at_bottom = std::min(std::max(-peak_x, lo), hi);
    const T top = std::sqrt(std::max(c_q - det * at_top * at_top, T(0))) - b * at_top;
    const T bottom = -std::sqrt(std::max(c_q - det * at_bottom * at_bottom, T(0))) - b * at_bottom;
    const T far = std::numeric_limits<T>::max();
    return {apart ? far : mean_y + bottom * inv_c - slack, apart ? -far : mean_y + top * inv_c + slack};
  }
};

// conic = (a, b, c), the inverse of the 2D covariance. A conic that is not positive definite has no bounded support:
// its ellipse is the whole plane, and the compositing rule alone decides.
template <typename T>
Ellipse<T> make_ellipse(T mean_x, T mean_y, T a, T b, T c, T opacity) {
  Ellipse<T> e;
  e.mean_x = mean_x;
  e.mean_y = mean_y;
  e.b = b;
  if (!(opacity >= kAlphaMin<T>)) {
    e.inv_c = e.c_q = e.det = e.peak_x = e.slack = T(0);
    e.extent_x = T(-1);
    return e;
  }
  const double det = double(a) * double(c) - double(b) * double(b);
  if (!(det > 0) || !(a > 0) || !(c > 0)) {
    const T far = std::sqrt(std::numeric_limits<T>::max()) * T(0.25);
    e.b = e.det = e.peak_x = e.slack = T(0);
    e.inv_c = T(1);
    e.c_q = far * far;
    e.extent_x = far;
    return e;
  }
  const double ac = double(a) * double(c);
  // The compositing evaluates sigma with an error of a few ulp of its largest term, which is ac/det times the result.
  const double inflation = 1.001 + 16.0 * double(std::numeric_limits<T>::epsilon()) * ac / det;
  const double q = 2.0 * double(std::log(T(255) * opacity)) * inflation + 1e-3;
  const double extent_x = std::sqrt(q * c / det), extent_y = std::sqrt(q * a / det);
  e.inv_c = T(1.0 / c);
  e.c_q = T(c * q);
  e.det = T(det);
  e.peak_x = T(-b / a * extent_y);
  e.extent_x = T(extent_x);
  e.slack = T(2e-3 + 1e-6 * (std::abs(double(mean_x)) + std::abs(double(mean_y)) + extent_x + extent_y));
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

}  // namespace ns_multigpu
