// One splat at one pixel, as the CUDA kernels compute it: forward and backward call these functions alike, so that they
// decide alike about every pixel. The rule itself is in alpha.h.
//
// Exponents are kept in base 2: conics are scaled by log2(e) once a row, so that alpha = 2^(log2(opacity) - sigma2)
// needs one instruction, and alpha >= 1/255 reads sigma2 <= log2(255 opacity), which is known before the exponential.
// (As in FlashGS, Feng et al. 2024, section 4.)
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "alpha.h"
#include "scalar.h"

namespace nsmg {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;

template <typename T>
inline constexpr T kLog2EOf = T(1.44269504088896340736);
template <typename T>
inline constexpr T kLn2Of = T(0.69314718055994530942);

NSMG_HD uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

NSMG_HD float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

NSMG_HD float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

NSMG_HD double exp2_fast(double x) { return std::exp2(x); }

NSMG_HD float log2_fast(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::log2(x);
#endif
}

NSMG_HD double log2_fast(double x) { return std::log2(x); }

NSMG_HD float reciprocal_fast(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

NSMG_HD double reciprocal_fast(double x) { return 1.0 / x; }

// What a splat needs besides its features. sigma2 = a dx^2 + b dx dy + c dy^2 with (dx, dy) = mean - pixel centre.
struct ScaledSplat {
  float mean_x, mean_y, a, b, c, log2_opacity;
  uint32_t limit;  // the splat counts where float_bits(sigma2) < limit; 0: nowhere
};

// Bits of positive floats order as the floats do, and those of negative ones (and NaN) lie above: one comparison tests
// both sigma >= 0 and alpha >= 1/255.
NSMG_HD uint32_t sigma_limit(float opacity) {
  const float largest = std::log2(255.0f * opacity);
  return largest >= 0.0f ? float_bits(largest) + 1u : 0u;
}

NSMG_HD ScaledSplat scale_splat(float mean_x, float mean_y, float a, float b, float c, float opacity) {
  return {mean_x,     mean_y, 0.5f * kLog2E * a, kLog2E * b, 0.5f * kLog2E * c, std::log2(opacity),
          sigma_limit(opacity)};
}

// sigma2, given b dx and a dx^2, which the pixels of a column share.
NSMG_HD float sigma2_of_column(float b_dx, float a_dx_dx, float c, float dy) {
  return multiply_add(dy, multiply_add(c, dy, b_dx), a_dx_dx);
}

NSMG_HD float between(float value, float lo, float hi) { return fminf(fmaxf(value, lo), hi); }

// Whether the splat may count at any pixel centre of the box [x_lo, x_hi] x [y_lo, y_hi]; rounded outward. The least
// sigma2 over a box lies on a side that faces the mean (Radl et al. 2024, StopThePop, section 4.2).
NSMG_HD bool overlaps_box(const ScaledSplat& s, float x_lo, float x_hi, float y_lo, float y_hi) {
  const float ac4 = 4.0f * s.a * s.c;
  const float det4 = multiply_add(-s.b, s.b, ac4);
  // Not positive definite, or so thin that rounding hides it: no bounded support, the rule alone decides.
  const bool bounded = (s.a > 0.0f) & (s.c > 0.0f) & (det4 > 1e-5f * ac4);
  const float left = x_lo - s.mean_x, right = x_hi - s.mean_x, top = y_lo - s.mean_y, bottom = y_hi - s.mean_y;
  const float near_x = between(0.0f, left, right), near_y = between(0.0f, top, bottom);
  const float side_y = between(-0.5f * s.b * near_x * reciprocal_fast(s.c), top, bottom);
  const float side_x = between(-0.5f * s.b * near_y * reciprocal_fast(s.a), left, right);
  const float on_column = sigma2_of_column(s.b * near_x, s.a * near_x * near_x, s.c, side_y);
  const float on_row = sigma2_of_column(s.b * side_x, s.a * side_x * side_x, s.c, near_y);
  // sigma2 is computed with an error of a few ulp of its largest term, which is at most 4ac / (4ac - b^2) times itself.
  const float inflation = 1.001f + 2e-6f * (ac4 * reciprocal_fast(det4));
  const float most = s.limit == 0u ? -1.0f : multiply_add(bits_float(s.limit - 1u), inflation, 1e-3f);
  return (s.limit != 0u) & (!bounded | (fminf(on_column, on_row) <= most));
}

NSMG_HD float capped(float raw) { return fminf(raw, kAlphaMax<float>); }
NSMG_HD double capped(double raw) { return std::fmin(raw, kAlphaMax<double>); }

// Blends one splat into a pixel. A closed pixel is kept as a negative transmittance, which fails the test by itself.
// Returns the weight; 0 where `raw`, the alpha before its cap, is 0 or the pixel is closed or closes here.
template <typename T>
NSMG_HD T blend_weight(T raw, T& transmittance) {
  const T alpha = capped(raw);
  const T after = multiply_add(-alpha, transmittance, transmittance);
  const bool open = after > kTransmittanceMin<T>;
  const T weight = open ? alpha * transmittance : T(0);
  transmittance = open ? after : -std::abs(transmittance);
  return weight;
}

// One step of the backward walk, front to back. `value` is d loss / d weight of this splat at this pixel, `remainder`
// the sum of weight times value over the splats not passed yet. raw == 0: the splat does not count here.
template <typename T>
struct WalkStep {
  T weight, v_sigma;  // v_sigma = d loss / d sigma, with raw = opacity exp(-sigma)
};
using BackwardStep = WalkStep<float>;

template <typename T>
NSMG_HD WalkStep<T> step_backward(T raw, T value, T& transmittance, T& remainder) {
  const T alpha = capped(raw);
  const T weight = alpha * transmittance;
  const T gain = weight * value;
  remainder -= gain;
  transmittance = multiply_add(-alpha, transmittance, transmittance);
  const T slope = multiply_add(remainder, alpha * reciprocal_fast(T(1) - alpha), -gain);
  return {weight, raw <= kAlphaMax<T> ? slope : T(0)};
}

}  // namespace nsmg
