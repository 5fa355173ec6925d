// A 4D Gaussian at a moment: the conditional 3D Gaussian and what is left of its opacity (Yang et al. 2024, "Real-time
// Photorealistic Dynamic Scene Representation and Rendering with 4D Gaussian Splatting", equations 6 to 8).
//
// Four numbers are a quaternion whose w is along time. M = R diag(scale) has the rows m (time) and m_x, m_y, m_z; row i
// of R is conj(left) e_i right, where right is left times motion. The covariance of space at a time is N (I - v v^T) N^T, v = m / |m|, N the rows of
// space. Its factor is N times those columns of v's Householder reflection that are perpendicular to v.
#pragma once

#include "common/projection.h"

namespace nsmg {

template <typename T>
struct MovingPoint {
  Vec3<T> mean;
  T time;
  Quat<T> left, motion;
  Quat<T> scale;  // along time, then three of space
  T opacity;
};

template <typename T>
NSMG_HD Quat<T> operator+(const Quat<T>& a, const Quat<T>& b) {
  return {a.w + b.w, a.x + b.x, a.y + b.y, a.z + b.z};
}

template <typename T>
NSMG_HD Quat<T> times(const Quat<T>& a, const Quat<T>& b) {
  return {a.w * b.w, a.x * b.x, a.y * b.y, a.z * b.z};
}

template <typename T>
NSMG_HD T dot(const Quat<T>& a, const Quat<T>& b) {
  return a.w * b.w + a.x * b.x + a.y * b.y + a.z * b.z;
}

template <typename T>
NSMG_HD Quat<T> conjugate(const Quat<T>& q) {
  return {q.w, -q.x, -q.y, -q.z};
}

template <typename T>
NSMG_HD Quat<T> product(const Quat<T>& a, const Quat<T>& b) {
  return {a.w * b.w - a.x * b.x - a.y * b.y - a.z * b.z, a.w * b.x + a.x * b.w + a.y * b.z - a.z * b.y,
          a.w * b.y - a.x * b.z + a.y * b.w + a.z * b.x, a.w * b.z + a.x * b.y - a.y * b.x + a.z * b.w};
}

// q e_x, q e_y, q e_z.
template <typename T>
NSMG_HD Quat<T> by_x(const Quat<T>& q) {
  return {-q.x, q.w, q.z, -q.y};
}

template <typename T>
NSMG_HD Quat<T> by_y(const Quat<T>& q) {
  return {-q.y, -q.z, q.w, q.x};
}

template <typename T>
NSMG_HD Quat<T> by_z(const Quat<T>& q) {
  return {-q.z, q.y, -q.x, q.w};
}

template <typename T>
struct Quat4 {
  Quat<T> t, x, y, z;  // rows
};

// What forward and backward both need on the way to the moment.
template <typename T>
struct Slice {
  Quat<T> left, right;  // at length one
  T left_inverse, right_inverse;
  Quat4<T> turn;        // R
  Quat4<T> factor;      // M
  T inverse_spread;     // 1 / |m|
  Quat<T> unit, mirror; // v, and v + sign(v_w) e_w
  T sign, halving;      // sign(v_w), 1 / (1 + |v_w|)
  T away, presence;     // how far the moment is from the point's time, in standard deviations; exp(-away^2 / 2)
  Vec3<T> along, facing;  // N v, N mirror
};

template <typename T>
NSMG_HD Slice<T> slice(const MovingPoint<T>& point, T moment) {
  Slice<T> s;
  s.left_inverse = inverse_length(point.left);
  const Quat<T> right = product(point.left, point.motion);
  s.right_inverse = inverse_length(right);
  s.left = scaled(point.left, s.left_inverse);
  s.right = scaled(right, s.right_inverse);
  const Quat<T> back = conjugate(s.left);
  s.turn = {product(back, s.right), product(by_x(back), s.right), product(by_y(back), s.right),
            product(by_z(back), s.right)};
  s.factor = {times(s.turn.t, point.scale), times(s.turn.x, point.scale), times(s.turn.y, point.scale),
              times(s.turn.z, point.scale)};
  s.inverse_spread = T(1) / std::sqrt(dot(s.factor.t, s.factor.t));
  s.unit = scaled(s.factor.t, s.inverse_spread);
  s.sign = s.unit.w < T(0) ? T(-1) : T(1);
  s.mirror = s.unit;
  s.mirror.w += s.sign;
  s.halving = T(1) / (T(1) + std::abs(s.unit.w));
  s.away = (moment - point.time) * s.inverse_spread;
  s.presence = std::exp(T(-0.5) * s.away * s.away);
  s.along = {dot(s.factor.x, s.unit), dot(s.factor.y, s.unit), dot(s.factor.z, s.unit)};
  s.facing = {dot(s.factor.x, s.mirror), dot(s.factor.y, s.mirror), dot(s.factor.z, s.mirror)};
  return s;
}

template <typename T>
NSMG_HD Vec3<T> in_space(const Quat<T>& q) {
  return {q.x, q.y, q.z};
}

template <typename T>
NSMG_HD AxesPoint<T> moment_of(const MovingPoint<T>& point, T moment) {
  const Slice<T> s = slice(point, moment);
  const Vec3<T> across = s.halving * s.facing, mirror = in_space(s.mirror);
  return {point.mean + s.away * s.along,
          {in_space(s.factor.x) - across.x * mirror, in_space(s.factor.y) - across.y * mirror,
           in_space(s.factor.z) - across.z * mirror},
          point.opacity * s.presence};
}

// The gradient with respect to a quaternion of any length, by that with respect to it at length one.
template <typename T>
NSMG_HD Quat<T> normalized_vjp(const Quat<T>& unit, T inverse_length, const Quat<T>& g) {
  return scaled(g + scaled(unit, -dot(unit, g)), inverse_length);
}

// The gradient with respect to a row of N, by those of its axes and of its products with mirror and unit.
template <typename T>
NSMG_HD Quat<T> row_vjp(const Slice<T>& s, const Vec3<T>& axis, T facing, T along) {
  const Quat<T> direct = {T(0), axis.x, axis.y, axis.z};
  return direct + scaled(s.mirror, facing) + scaled(s.unit, along);
}

// The gradient of moment_of; `g` has that of its mean, axes and opacity.
template <typename T>
NSMG_HD MovingPoint<T> moment_vjp(const MovingPoint<T>& point, T moment, const AxesPoint<T>& g) {
  const Slice<T> s = slice(point, moment);
  MovingPoint<T> out;
  out.mean = g.mean;
  out.opacity = g.opacity * s.presence;
  const T g_away = dot(g.mean, s.along) - g.opacity * point.opacity * s.presence * s.away;
  const Vec3<T> g_along = s.away * g.mean;

  // axes = N - across mirror^T in space, across = halving N mirror.
  const Vec3<T> mirror = in_space(s.mirror), across = s.halving * s.facing;
  const Vec3<T> g_across = {-dot(g.axes.r0, mirror), -dot(g.axes.r1, mirror), -dot(g.axes.r2, mirror)};
  const Vec3<T> g_facing = s.halving * g_across;
  const T g_halving = dot(g_across, s.facing);
  const Vec3<T> by_axes = across * g.axes;
  Quat<T> g_mirror = {T(0), -by_axes.x, -by_axes.y, -by_axes.z};
  g_mirror = g_mirror + scaled(s.factor.x, g_facing.x) + scaled(s.factor.y, g_facing.y) + scaled(s.factor.z, g_facing.z);

  Quat<T> g_unit = g_mirror + scaled(s.factor.x, g_along.x) + scaled(s.factor.y, g_along.y) +
                   scaled(s.factor.z, g_along.z);
  g_unit.w -= g_halving * s.halving * s.halving * s.sign;

  // unit = m / |m|, away = (moment - time) / |m|.
  const T g_spread = -g_away * s.away * s.inverse_spread;
  out.time = -g_away * s.inverse_spread;
  const Quat<T> g_m = normalized_vjp(s.unit, s.inverse_spread, g_unit) + scaled(s.unit, g_spread);

  const Quat4<T> g_factor = {g_m, row_vjp(s, g.axes.r0, g_facing.x, g_along.x),
                             row_vjp(s, g.axes.r1, g_facing.y, g_along.y), row_vjp(s, g.axes.r2, g_facing.z, g_along.z)};
  out.scale = times(g_factor.t, s.turn.t) + times(g_factor.x, s.turn.x) + times(g_factor.y, s.turn.y) +
              times(g_factor.z, s.turn.z);

  // Row i of R is conj(left) e_i right.
  const Quat<T> back = conjugate(s.left), end = conjugate(s.right);
  const Quat<T> g_t = times(g_factor.t, point.scale), g_x = times(g_factor.x, point.scale),
                g_y = times(g_factor.y, point.scale), g_z = times(g_factor.z, point.scale);
  const Quat<T> g_right = product(s.left, g_t) + product(conjugate(by_x(back)), g_x) +
                          product(conjugate(by_y(back)), g_y) + product(conjugate(by_z(back)), g_z);
  const Quat<T> g_back = product(g_t, end) + scaled(by_x(product(g_x, end)), T(-1)) +
                         scaled(by_y(product(g_y, end)), T(-1)) + scaled(by_z(product(g_z, end)), T(-1));
  const Quat<T> g_product = normalized_vjp(s.right, s.right_inverse, g_right);
  out.left = normalized_vjp(s.left, s.left_inverse, conjugate(g_back)) + product(g_product, conjugate(point.motion));
  out.motion = product(conjugate(point.left), g_product);
  return out;
}

}  // namespace nsmg
