// Vectors of three and 3x3 matrices by rows. No loops and no indices: every component ends in a register.
#pragma once

#include "common/scalar.h"

namespace nsmg {

template <typename T>
struct Vec3 {
  T x, y, z;
};

template <typename T>
NSMG_HD Vec3<T> operator+(const Vec3<T>& a, const Vec3<T>& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z};
}

template <typename T>
NSMG_HD Vec3<T> operator-(const Vec3<T>& a, const Vec3<T>& b) {
  return {a.x - b.x, a.y - b.y, a.z - b.z};
}

template <typename T>
NSMG_HD Vec3<T> operator*(T s, const Vec3<T>& a) {
  return {s * a.x, s * a.y, s * a.z};
}

// Component by component.
template <typename T>
NSMG_HD Vec3<T> times(const Vec3<T>& a, const Vec3<T>& b) {
  return {a.x * b.x, a.y * b.y, a.z * b.z};
}

template <typename T>
NSMG_HD T dot(const Vec3<T>& a, const Vec3<T>& b) {
  return a.x * b.x + a.y * b.y + a.z * b.z;
}

template <typename T>
NSMG_HD Vec3<T> cross(const Vec3<T>& a, const Vec3<T>& b) {
  return {a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}

template <typename T>
struct Mat3 {
  Vec3<T> r0, r1, r2;  // rows
};

template <typename T>
NSMG_HD Mat3<T> operator+(const Mat3<T>& a, const Mat3<T>& b) {
  return {a.r0 + b.r0, a.r1 + b.r1, a.r2 + b.r2};
}

// The row vector v times m; also m^T v.
template <typename T>
NSMG_HD Vec3<T> operator*(const Vec3<T>& v, const Mat3<T>& m) {
  return v.x * m.r0 + v.y * m.r1 + v.z * m.r2;
}

template <typename T>
NSMG_HD Mat3<T> operator*(const Mat3<T>& a, const Mat3<T>& b) {
  return {a.r0 * b, a.r1 * b, a.r2 * b};
}

template <typename T>
NSMG_HD Mat3<T> transpose(const Mat3<T>& m) {
  return {{m.r0.x, m.r1.x, m.r2.x}, {m.r0.y, m.r1.y, m.r2.y}, {m.r0.z, m.r1.z, m.r2.z}};
}

// m diag(s).
template <typename T>
NSMG_HD Mat3<T> scale_columns(const Mat3<T>& m, const Vec3<T>& s) {
  return {times(m.r0, s), times(m.r1, s), times(m.r2, s)};
}

// a b^T.
template <typename T>
NSMG_HD Mat3<T> outer(const Vec3<T>& a, const Vec3<T>& b) {
  return {a.x * b, a.y * b, a.z * b};
}

}  // namespace nsmg
