// Corrections of cameras' poses by six numbers, as nerfstudio's camera optimizer has them, and their gradient by dual
// numbers: a value, and its slope as one of the six grows.
#pragma once

#include "common/vec.h"

namespace nsmg {

template <typename T>
struct Dual {
  T value, slope;

  NSMG_HD Dual(T value = T(0), T slope = T(0)) : value(value), slope(slope) {}
};

template <typename T>
NSMG_HD Dual<T> operator+(const Dual<T>& a, const Dual<T>& b) {
  return {a.value + b.value, a.slope + b.slope};
}
template <typename T>
NSMG_HD Dual<T> operator-(const Dual<T>& a, const Dual<T>& b) {
  return {a.value - b.value, a.slope - b.slope};
}
template <typename T>
NSMG_HD Dual<T> operator*(const Dual<T>& a, const Dual<T>& b) {
  return {a.value * b.value, a.slope * b.value + a.value * b.slope};
}
template <typename T>
NSMG_HD Dual<T> operator/(const Dual<T>& a, const Dual<T>& b) {
  const T quotient = a.value / b.value;
  return {quotient, (a.slope - quotient * b.slope) / b.value};
}
template <typename T>
NSMG_HD Dual<T> root(const Dual<T>& a) {
  const T found = std::sqrt(a.value);
  return {found, a.slope / (T(2) * found)};
}
template <typename T>
NSMG_HD Dual<T> sine(const Dual<T>& a) {
  return {std::sin(a.value), std::cos(a.value) * a.slope};
}
template <typename T>
NSMG_HD Dual<T> cosine(const Dual<T>& a) {
  return {std::cos(a.value), -std::sin(a.value) * a.slope};
}

template <typename N>
struct ViewPose {
  Mat3<N> rotation;
  Vec3<N> translation;
};

// The 16 numbers of a world-to-camera matrix, row-major.
template <typename N, typename T>
NSMG_HD ViewPose<N> view_pose(const T* m) {
  return {{{N(m[0]), N(m[1]), N(m[2])}, {N(m[4]), N(m[5]), N(m[6])}, {N(m[8]), N(m[9]), N(m[10])}},
          {N(m[3]), N(m[7]), N(m[11])}};
}

// A pose whose camera is turned by the rotation vector `turn` and shifted, both in the world; N is Dual<T>. With se3 by
// exp_map_SE3, otherwise by exp_map_SO3xR3 of nerfstudio: with their approximations of small angles.
template <typename N>
NSMG_HD ViewPose<N> corrected(const ViewPose<N>& view, const Vec3<N>& shift, const Vec3<N>& turn, bool se3) {
  const N one(1), squared = dot(turn, turn);
  const bool small = squared.value < decltype(squared.value)(1e-4);
  N straight, along, across;  // of the rotation: straight I + along [turn]x + across turn turn^T
  Vec3<N> moved = shift;
  if (!se3) {
    const N angle = small ? N(0.01f) : root(squared);
    along = sine(angle) / angle;
    across = (one - cosine(angle)) / (angle * angle);
    straight = one - across * squared;
  } else {
    N by_shift, by_cross, by_turn;
    if (small) {
      straight = N(8) / (N(4) + squared) - one;
      along = N(0.5f) * straight + N(0.5f);
      across = N(0.5f) * along;
      by_shift = one - squared / N(6);
      by_cross = N(0.5f) - squared / N(24);
      by_turn = one / N(6) - squared / N(120);
    } else {
      const N angle = root(squared);
      straight = cosine(angle);
      by_shift = along = sine(angle) / angle;
      by_cross = across = (one - straight) / squared;
      by_turn = (angle - sine(angle)) / (angle * squared);
    }
    moved = by_shift * shift + by_cross * cross(turn, shift) + (by_turn * dot(turn, shift)) * turn;
  }
  const Vec3<N> a = along * turn, c = across * turn;
  const Mat3<N> inverse = {{straight + c.x * turn.x, a.z + c.x * turn.y, c.x * turn.z - a.y},
                           {c.y * turn.x - a.z, straight + c.y * turn.y, a.x + c.y * turn.z},
                           {a.y + c.z * turn.x, c.z * turn.y - a.x, straight + c.z * turn.z}};
  const Mat3<N> rotation = view.rotation * inverse;
  const Vec3<N> middle = view.translation * view.rotation - moved;
  return {rotation, {dot(rotation.r0, middle), dot(rotation.r1, middle), dot(rotation.r2, middle)}};
}

// The same of a matrix [4, 4] and a correction [6] (shift, turn), with the slopes as number k of the correction grows.
template <typename T>
NSMG_HD ViewPose<Dual<T>> corrected_slopes(const T* matrix, const T* correction, bool se3, int k) {
  const auto one = [&](int i) { return Dual<T>(correction[i], i == k ? T(1) : T(0)); };
  return corrected<Dual<T>>(view_pose<Dual<T>>(matrix), {one(0), one(1), one(2)}, {one(3), one(4), one(5)}, se3);
}

}  // namespace nsmg
