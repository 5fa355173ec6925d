// Rotations as quaternions (w, x, y, z) of any length but zero.
#pragma once

#include "common/vec.h"

namespace nsmg {

template <typename T>
struct Quat {
  T w, x, y, z;
};

template <typename T>
NSMG_HD T inverse_length(const Quat<T>& q) {
  return T(1) / larger(std::sqrt(q.w * q.w + q.x * q.x + q.y * q.y + q.z * q.z), T(1e-12));
}

template <typename T>
NSMG_HD Quat<T> scaled(const Quat<T>& q, T s) {
  return {q.w * s, q.x * s, q.y * s, q.z * s};
}

// The rotation matrix of a quaternion of length one.
template <typename T>
NSMG_HD Mat3<T> rotation(const Quat<T>& q) {
  const T xx = q.x * q.x, yy = q.y * q.y, zz = q.z * q.z;
  const T xy = q.x * q.y, xz = q.x * q.z, yz = q.y * q.z;
  const T wx = q.w * q.x, wy = q.w * q.y, wz = q.w * q.z;
  return {{1 - 2 * (yy + zz), 2 * (xy - wz), 2 * (xz + wy)},
          {2 * (xy + wz), 1 - 2 * (xx + zz), 2 * (yz - wx)},
          {2 * (xz - wy), 2 * (yz + wx), 1 - 2 * (xx + yy)}};
}

// The gradient with respect to a quaternion q of any length, where g is that of rotation(n), n = q * inverse_length.
template <typename T>
NSMG_HD Quat<T> rotation_vjp(const Quat<T>& n, T inverse_length, const Mat3<T>& g) {
  const T s01 = g.r0.y + g.r1.x, s02 = g.r0.z + g.r2.x, s12 = g.r1.z + g.r2.y;
  const T a01 = g.r1.x - g.r0.y, a02 = g.r0.z - g.r2.x, a12 = g.r2.y - g.r1.z;
  const T w = 2 * (n.x * a12 + n.y * a02 + n.z * a01);
  const T x = 2 * (n.y * s01 + n.z * s02 + n.w * a12) - 4 * n.x * (g.r1.y + g.r2.z);
  const T y = 2 * (n.x * s01 + n.z * s12 + n.w * a02) - 4 * n.y * (g.r0.x + g.r2.z);
  const T z = 2 * (n.x * s02 + n.y * s12 + n.w * a01) - 4 * n.z * (g.r0.x + g.r1.y);
  const T along = w * n.w + x * n.x + y * n.y + z * n.z;  // normalising removes what points along n
  return scaled<T>({w - along * n.w, x - along * n.x, y - along * n.y, z - along * n.z}, inverse_length);
}

}  // namespace nsmg
