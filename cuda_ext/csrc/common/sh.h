// Real spherical harmonics up to degree 3 as polynomials of a unit direction (Sloan 2013, "Efficient Spherical Harmonic
// Evaluation", JCGT 2(2)), with the signs that 3D Gaussian splatting uses.
#pragma once

#include "common/vec.h"

namespace nsmg {

// The degree of points without harmonics: their coefficients of degree 0 are the logits of one colour for all views.
constexpr int kPlainColor = -1;

NSMG_HD constexpr int sh_bases(int degree) { return (degree + 1) * (degree + 1); }

template <typename T>
struct ShConstants {
  static constexpr T k0 = T(0.28209479177387814);
  static constexpr T k1 = T(0.4886025119029199);
  static constexpr T k2 = T(1.0925484305920792);
  static constexpr T k20 = T(0.31539156525252005);
  static constexpr T k22 = T(0.5462742152960396);
  static constexpr T k3 = T(0.5900435899266435);
  static constexpr T k31 = T(0.4570457994644658);
  static constexpr T k32 = T(2.890611442640554);
  static constexpr T k30 = T(0.3731763325901154);
  static constexpr T k33 = T(1.445305721320277);
};

// b[0 .. (Degree + 1)^2) at the unit direction d.
template <int Degree, typename T>
NSMG_HD void sh_basis(const Vec3<T>& d, T* b) {
  using K = ShConstants<T>;
  const T x = d.x, y = d.y, z = d.z;
  b[0] = K::k0;
  if constexpr (Degree >= 1) {
    b[1] = -K::k1 * y;
    b[2] = K::k1 * z;
    b[3] = -K::k1 * x;
  }
  if constexpr (Degree >= 2) {
    const T xx = x * x, yy = y * y, zz = z * z;
    b[4] = K::k2 * x * y;
    b[5] = -K::k2 * y * z;
    b[6] = K::k20 * (3 * zz - 1);
    b[7] = -K::k2 * x * z;
    b[8] = K::k22 * (xx - yy);
    if constexpr (Degree >= 3) {
      b[9] = -K::k3 * y * (3 * xx - yy);
      b[10] = K::k32 * x * y * z;
      b[11] = -K::k31 * y * (5 * zz - 1);
      b[12] = K::k30 * z * (5 * zz - 3);
      b[13] = -K::k31 * x * (5 * zz - 1);
      b[14] = K::k33 * z * (xx - yy);
      b[15] = -K::k3 * x * (xx - 3 * yy);
    }
  }
}

// The gradient with respect to d, as three free variables, of sum_k g[k] b[k].
template <int Degree, typename T>
NSMG_HD Vec3<T> sh_basis_vjp(const Vec3<T>& d, const T* g) {
  using K = ShConstants<T>;
  const T x = d.x, y = d.y, z = d.z;
  Vec3<T> out = {T(0), T(0), T(0)};
  if constexpr (Degree >= 1) {
    out = {-K::k1 * g[3], -K::k1 * g[1], K::k1 * g[2]};
  }
  if constexpr (Degree >= 2) {
    out.x += K::k2 * (y * g[4] - z * g[7]) + 2 * K::k22 * x * g[8];
    out.y += K::k2 * (x * g[4] - z * g[5]) - 2 * K::k22 * y * g[8];
    out.z += 6 * K::k20 * z * g[6] - K::k2 * (y * g[5] + x * g[7]);
  }
  if constexpr (Degree >= 3) {
    const T xx = x * x, yy = y * y, zz = z * z;
    out.x += -6 * K::k3 * x * y * g[9] + K::k32 * y * z * g[10] - K::k31 * (5 * zz - 1) * g[13] +
             2 * K::k33 * x * z * g[14] - 3 * K::k3 * (xx - yy) * g[15];
    out.y += -3 * K::k3 * (xx - yy) * g[9] + K::k32 * x * z * g[10] - K::k31 * (5 * zz - 1) * g[11] -
             2 * K::k33 * y * z * g[14] + 6 * K::k3 * x * y * g[15];
    out.z += K::k32 * x * y * g[10] - 10 * K::k31 * z * (y * g[11] + x * g[13]) + K::k30 * (15 * zz - 3) * g[12] +
             K::k33 * (xx - yy) * g[14];
  }
  return out;
}

// The unit vector from the camera to the point and the inverse of their distance; both zero where they coincide.
template <typename T>
struct Direction {
  Vec3<T> unit;
  T inverse_length;
};

template <typename T>
NSMG_HD Direction<T> direction(const Vec3<T>& from, const Vec3<T>& to) {
  const Vec3<T> way = to - from;
  const T length2 = dot(way, way);
  const T inverse_length = length2 > T(0) ? T(1) / std::sqrt(length2) : T(0);
  return {inverse_length * way, inverse_length};
}

// The gradient with respect to `to` (and, negated, to `from`).
template <typename T>
NSMG_HD Vec3<T> direction_vjp(const Direction<T>& d, const Vec3<T>& g) {
  return d.inverse_length * (g - dot(g, d.unit) * d.unit);
}

}  // namespace nsmg
