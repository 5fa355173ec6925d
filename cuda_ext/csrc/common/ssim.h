// SSIM (Wang et al. 2004, equation 13) at one window centre, and the value of a byte. The window is 11x11, Gaussian,
// sigma 1.5; pixels are interleaved (r, g, b, r, ...), so that along a row every third number belongs to a channel.
#pragma once

#include <cmath>
#include <cstdint>

#include "scalar.h"

namespace nsmg {

constexpr int kSsimTaps = 11, kSsimHalf = 5;

template <typename T>
struct SsimWindow {
  T weight[kSsimTaps];
};

template <typename T>
inline SsimWindow<T> make_ssim_window() {
  double exact[kSsimTaps], sum = 0;
  for (int k = 0; k < kSsimTaps; ++k)
    sum += exact[k] = std::exp(-(k - kSsimHalf) * (k - kSsimHalf) / (2 * 1.5 * 1.5));
  SsimWindow<T> window;
  for (int k = 0; k < kSsimTaps; ++k) window.weight[k] = T(exact[k] / sum);
  return window;
}

// SSIM and its derivatives by the filtered pred, pred^2 and pred * target.
template <typename T>
struct SsimPoint {
  T value, d_mu, d_xx, d_xy;
};

// From the filtered u, v, u^2 and v^2 with u = pred + target and v = pred - target: two second moments instead of
// three, and v is small where the images agree, so the difference of the variances keeps its digits.
template <typename T>
NSMG_HD SsimPoint<T> ssim_point(T u, T v, T uu, T vv) {
  const T c1 = T(0.01 * 0.01), c2 = T(0.03 * 0.03), half = T(0.5);
  const T mu_x = half * (u + v), mu_y = half * (u - v);
  const T u2 = u * u, v2 = v * v;
  const T var_u = uu - u2, var_v = vv - v2;
  const T inv_mean = T(1) / (half * (u2 + v2) + c1), inv_var = T(1) / (half * (var_u + var_v) + c2);
  const T luminance = (half * (u2 - v2) + c1) * inv_mean;
  const T contrast = (half * (var_u - var_v) + c2) * inv_var;
  SsimPoint<T> p;
  p.value = luminance * contrast;
  p.d_xy = 2 * luminance * inv_var;
  p.d_xx = -p.value * inv_var;
  p.d_mu = 2 * contrast * inv_mean * (mu_y - mu_x * luminance) - mu_y * p.d_xy - 2 * mu_x * p.d_xx;
  return p;
}

// byte / 255, correctly rounded without a division.
NSMG_HD float byte_fraction(uint8_t byte) {
  const float value = byte, inverse = 1.0f / 255.0f, quotient = value * inverse;
  return multiply_add(multiply_add(-255.0f, quotient, value), inverse, quotient);
}

// A number of an image as a float in [0, 1].
NSMG_HD float image_value(float value) { return value; }
NSMG_HD float image_value(uint8_t value) { return byte_fraction(value); }

}  // namespace nsmg
