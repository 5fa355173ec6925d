// The support of a splat: the ellipse a ux^2 + 2 b ux uy + c uy^2 <= 2 ln(255 o), u = pixel - mean, outside of which
// alpha < 1/255. Bounds are rounded outward: a pixel that rounding in the compositing may still count is never lost.
// The exact span of an ellipse over a slab follows the scanline test of Speedy-Splat (Hanson et al. 2025, section 3.1).
//
// No branches, so that a loop over splats becomes vector code. No sum has a bare product among its terms (multiply_add
// has it instead), so nvcc has nothing to fuse one way here and another way there: two kernels that ask about the same
// splat get the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "alpha.h"
#include "scalar.h"

namespace nsmg {

template <typename T>
inline constexpr T kFarthest = std::numeric_limits<T>::max();
template <typename T>
inline constexpr T kEpsilon = std::numeric_limits<T>::epsilon();

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
  NSMG_HD Span<T> y_span(T x_lo, T x_hi) const {
    const T lo = x_lo - mean_x, hi = x_hi - mean_x;
    const T half_width = extent_x + slack;
    const bool apart = (lo > half_width) | (hi < -half_width);
    const T at_top = smaller(larger(peak_x, lo), hi);
    const T at_bottom = smaller(larger(-peak_x, lo), hi);
    const T top = half_height(at_top), bottom = -half_height(at_bottom);
    const T top_y = multiply_add(multiply_add(-b, at_top, top), inv_c, mean_y) + slack;
    const T bottom_y = multiply_add(multiply_add(-b, at_bottom, bottom), inv_c, mean_y) - slack;
    constexpr T far = kFarthest<T>;
    return {apart ? far : bottom_y, apart ? -far : top_y};
  }

  // c times half the ellipse's height at ux.
  NSMG_HD T half_height(T ux) const { return std::sqrt(larger(multiply_add(-(det * ux), ux, c_q), T(0))); }
};

// An upper bound of ln x, x > 0, at most 1e-3 too large: a cubic on the mantissa (minimax, raised by its error 6.4e-4).
NSMG_HD float log_above(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const float exponent = static_cast<float>((bits >> 23) - 127);
  bits = (bits & 0x007fffff) | 0x3f800000;
  float m;
  std::memcpy(&m, &bits, sizeof(m));
  const float quadratic = multiply_add(multiply_add(0.1582487f, m, -1.0518750f), m, 3.0478841f);
  return 0.69314718f * (exponent + multiply_add(quadratic, m, -2.1529f));
}
NSMG_HD double log_above(double x) { return std::log(x); }

// conic = (a, b, c), the inverse of the 2D covariance. A conic that is not positive definite has no bounded support:
// its ellipse is the whole plane, and the compositing rule alone decides.
template <typename T>
NSMG_HD Ellipse<T> make_ellipse(T mean_x, T mean_y, T a, T b, T c, T opacity) {
  constexpr T alpha_min = kAlphaMin<T>, epsilon = kEpsilon<T>;
  const bool seen = opacity >= alpha_min;
  // a c - b^2 to the last bits, although the two nearly cancel for thin splats (Kahan; Jeannerod et al. 2013).
  const T bb = b * b;
  const T det = std::fma(a, c, -bb) + std::fma(-b, b, bb);
  const bool bounded = (det > 0) & (a > 0) & (c > 0);
  const T inv_det = T(1) / (bounded ? det : T(1));
  // The compositing evaluates sigma with an error of a few ulp of its largest term, which is ac/det times the result.
  const T inflation = multiply_add(T(16) * epsilon, a * c * inv_det, T(1.001));
  const T q = multiply_add(T(2) * log_above(T(255) * (seen ? opacity : T(1))), inflation, T(1e-3));
  const T extent_x = std::sqrt(larger(q * c * inv_det, T(0))), extent_y = std::sqrt(larger(q * a * inv_det, T(0)));
  const T size = std::abs(mean_x) + std::abs(mean_y) + extent_x + extent_y;
  constexpr T far = kFarthest<T> * T(1e-3);
  Ellipse<T> e;
  e.mean_x = mean_x;
  e.mean_y = mean_y;
  e.b = b;
  e.inv_c = T(1) / (bounded ? c : T(1));
  e.c_q = bounded ? c * q : far;
  e.det = bounded ? det : T(0);
  e.peak_x = bounded ? -b / a * extent_y : T(0);
  e.extent_x = seen ? (bounded ? extent_x : far) : T(-1);
  e.slack = seen & bounded ? multiply_add(T(1e-6), size, T(2e-3)) : T(0);
  return e;
}

// Indices [first, last) of the unit steps, counted from `origin` and at most `count`, whose centre lies in the span.
template <typename T>
NSMG_HD void covered_steps(Span<T> span, T origin, int count, int& first, int& last) {
  const T lo = smaller(larger(std::ceil(span.lo - origin - T(0.5)), T(0)), T(count));
  const T hi = smaller(larger(std::floor(span.hi - origin + T(0.5)), T(0)), T(count));
  first = static_cast<int>(lo);
  last = static_cast<int>(hi);
}

// The tiles of a patch that a splat may overlap: of every column of tiles within the splat's box, the range of rows
// over which its ellipse passes. Tiles are counted from the patch's own corner.
struct TileRange {
  int first, last;  // [first, last)
};

// Tiles along one axis whose pixel centres come within [lo, hi] of a patch that starts at `origin`.
template <typename T>
NSMG_HD TileRange covered_tiles(T lo, T hi, int origin, int pixels, int tile_size) {
  int first, last;
  covered_steps(Span<T>{lo, hi}, T(origin), pixels, first, last);
  return first < last ? TileRange{first / tile_size, (last - 1) / tile_size + 1} : TileRange{0, 0};
}

// The columns of tiles within the box; `reach_x` is half the box in pixels. A patch has x0, y0, x1, y1 in pixels.
template <typename T, typename Patch>
NSMG_HD TileRange tile_columns(const Ellipse<T>& e, T radius_x, const Patch& patch, int tile_size) {
  return covered_tiles(e.mean_x - radius_x, e.mean_x + radius_x, patch.x0, patch.x1 - patch.x0, tile_size);
}

// The tiles of one column, as a range of rows of tiles.
template <typename T, typename Patch>
NSMG_HD TileRange tiles_of_column(const Ellipse<T>& e, T radius_y, const Patch& patch, int column, int tile_size) {
  const int x0 = patch.x0 + column * tile_size, x1 = smaller(x0 + tile_size, patch.x1);
  const Span<T> span = e.y_span(T(x0) + T(0.5), T(x1) - T(0.5));
  return covered_tiles(larger(span.lo, e.mean_y - radius_y), smaller(span.hi, e.mean_y + radius_y), patch.y0,
                       patch.y1 - patch.y0, tile_size);
}

}  // namespace nsmg
