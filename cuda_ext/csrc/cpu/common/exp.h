// exp(x) for x <= 0, as the compositing uses it: forward and backward call this one function, so that they decide alike
// about every pixel.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace nsmg {

// Any float type with element-wise operators (a plain float, or a vector of floats). `Bits` is the matching integer
// type. Relative error below 1.5e-7 on [-80, 0]; anything may come out for other x.
// Range reduction x = n ln2 + r in two steps (Cody and Waite 1980), then 1 + r + r^2 p(r) with the p of degree 4 that
// minimises the relative error over |r| <= ln2 / 2 (3e-9; found by iterated weighted least squares).
template <typename Float, typename Bits>
inline Float exp_nonpositive_f32(Float x) {
  static_assert(sizeof(Float) == sizeof(Bits), "Bits must match Float lane by lane");
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, kept in the low bits
  const Float shifted = x * 1.44269504088896341f + magic;
  const Float n = shifted - magic;
  Float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Float p = r * 1.381454007e-3f + 8.368745108e-3f;
  p = p * r + 4.166839079e-2f;
  p = p * r + 1.666652040e-1f;
  p = p * r + 4.999999343e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  Bits shifted_bits, p_bits;
  std::memcpy(&shifted_bits, &shifted, sizeof(Bits));
  std::memcpy(&p_bits, &p, sizeof(Bits));
  p_bits += shifted_bits << 23;  // multiplies by 2^n
  std::memcpy(&p, &p_bits, sizeof(Bits));
  return p;
}

}  // namespace nsmg
