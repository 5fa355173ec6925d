// Cameras with a lens: where it maps a point in camera space, its Jacobian there, and that Jacobian's derivative.
//
// Perspective lenses and fisheyes map (X, Y, Z) to s (X, Y) + Q / Z^2 before the focal lengths and the centre, with rho^2 = X^2 + Y^2:
//   perspective  s = g(rho^2 / Z^2) / Z, g = (1 + k1 t + k2 t^2 + k3 t^3) / (1 + k4 t + k5 t^2 + k6 t^3), and the
//                tangential Q = (2 p1 X Y + p2 (3 X^2 + Y^2), p1 (X^2 + 3 Y^2) + 2 p2 X Y)   (Brown 1966; OpenCV);
//   fisheye      s = theta (1 + k1 theta^2 + .. + k4 theta^8) / rho, theta the angle from the axis, up to 180 degrees
//                (Kannala and Brandt 2006; OpenCV). Q = 0.
// As s depends on rho and Z alone, six numbers are all of its derivatives that two orders need: see Radial.
//
// An equirectangular picture maps it to longitude and latitude, (atan2(X, Z), atan2(Y, sqrt(X^2 + Z^2))), in radians. A
// splat that crosses the border where longitudes end is drawn on its mean's side alone.
//
// A splat's covariance is J W S W^T J^T, as in projection.h, with the lens's Jacobian J at the mean: an affine
// approximation. Means beyond `angle` are not drawn: there the lens folds back, or the image is far away.
//
// The depth of a perspective lens is z. That of the others is the ray's length: behind 90 degrees z is negative, and
// would sort farther points before nearer ones.
#pragma once

#include <type_traits>

#include "common/box.h"

namespace nsmg {

// Numbers of a view in `Ks`: the matrix, and with a lens, its kind, the angle in radians, its squared tangent,
// k1 to k6, p1, p2 and 0.
constexpr int kPinholeNumbers = 9, kLensNumbers = 21;

enum class LensKind : int { kPerspective, kFisheye, kEquirectangular };

// The angle in radians around the poles of an equirectangular picture where no mean is drawn: there J grows beyond
// bounds.
template <typename T>
inline constexpr T kPole = T(0.01);

template <typename T>
struct Lens {
  LensKind kind;
  T angle, slope2;  // of the last ray that is drawn; the second for perspective lenses
  T k1, k2, k3, k4, k5, k6, p1, p2;

  NSMG_HD bool depth_is_z() const { return kind == LensKind::kPerspective; }
};

template <typename T>
struct LensCamera : Camera<T> {
  Lens<T> lens;
};

// The camera of a view of `viewmats` [V, 4, 4] and `Ks` [V, numbers / 3, 3]. C: Camera<T> or LensCamera<T>.
template <typename C, typename T>
NSMG_HD C camera_of(const T* viewmats, const T* Ks, int64_t view, T width, T height, T near_plane, T far_plane) {
  viewmats += 16 * view;
  if constexpr (std::is_same_v<C, LensCamera<T>>) {
    const T *k = Ks + kLensNumbers * view, *lens = k + kPinholeNumbers;
    LensCamera<T> camera;
    static_cast<Camera<T>&>(camera) = make_camera(viewmats, k, width, height, near_plane, far_plane);
    camera.lens = {static_cast<LensKind>(static_cast<int>(lens[0])), lens[1], lens[2], lens[3], lens[4], lens[5],
                   lens[6],         lens[7], lens[8], lens[9], lens[10]};
    return camera;
  } else {
    return make_camera(viewmats, Ks + kPinholeNumbers * view, width, height, near_plane, far_plane);
  }
}

// A function of one number, with its first two derivatives.
template <typename T>
struct Jet {
  T value, first, second;
};

template <typename T>
NSMG_HD Jet<T> operator+(T a, const Jet<T>& f) {
  return {a + f.value, f.first, f.second};
}

template <typename T>
NSMG_HD Jet<T> operator*(const Jet<T>& f, const Jet<T>& g) {
  return {f.value * g.value, f.first * g.value + f.value * g.first,
          f.second * g.value + T(2) * f.first * g.first + f.value * g.second};
}

template <typename T>
NSMG_HD Jet<T> operator/(const Jet<T>& f, const Jet<T>& g) {
  const T inverse = T(1) / g.value, value = f.value * inverse, first = (f.first - value * g.first) * inverse;
  return {value, first, (f.second - T(2) * first * g.first - value * g.second) * inverse};
}

// 1 + k1 f + k2 f^2 + k3 f^3 + k4 f^4.
template <typename T>
NSMG_HD Jet<T> polynomial(const Jet<T>& f, T k1, T k2, T k3, T k4) {
  const Jet<T> last = {k4, T(0), T(0)};
  return T(1) + f * (k1 + f * (k2 + f * (k3 + f * last)));
}

// s and its derivatives: ds/dX_i = a X_i, ds/dZ = b, da/dX_i = c X_i, db/dX_i = d X_i = da/dZ X_i, db/dZ = e.
template <typename T>
struct Radial {
  T s, a, b, c, d, e;
  T beyond;  // more than 1 for rays that are not drawn
};

// Of s = g(t) / Z, t = rho^2 / Z^2 and i = 1 / Z.
template <typename T>
NSMG_HD Radial<T> radial_of(const Jet<T>& g, T t, T i, T beyond) {
  const T i2 = i * i, i3 = i2 * i, i4 = i2 * i2;
  return {g.value * i,
          T(2) * g.first * i3,
          -(g.value + T(2) * t * g.first) * i2,
          T(4) * g.second * i4 * i,
          -(T(6) * g.first + T(4) * t * g.second) * i4,
          (T(2) * g.value + T(10) * t * g.first + T(4) * t * t * g.second) * i3,
          beyond};
}

template <typename T>
NSMG_HD Radial<T> radial_at(const Lens<T>& lens, const Vec3<T>& seen) {
  const T rho2 = seen.x * seen.x + seen.y * seen.y, z = seen.z, i = T(1) / z, t = rho2 * i * i;
  const Jet<T> q = {t, T(1), T(0)};
  if (lens.kind == LensKind::kPerspective) {
    const Jet<T> g = polynomial(q, lens.k1, lens.k2, lens.k3, T(0)) / polynomial(q, lens.k4, lens.k5, lens.k6, T(0));
    return radial_of(g, t, i, t / lens.slope2);
  }
  if ((z > T(0)) & (t < T(2.5e-3))) {  // near the axis, where the other way divides by rho: the series of atan
    const Jet<T> ratio = polynomial(q, T(-1) / T(3), T(1) / T(5), T(-1) / T(7), T(1) / T(9));
    const Jet<T> g = ratio * polynomial(q * ratio * ratio, lens.k1, lens.k2, lens.k3, lens.k4);
    return radial_of(g, t, i, t / square(lens.angle));
  }
  const T rho = std::sqrt(rho2), theta = std::atan2(rho, z);
  const Jet<T> x = {theta, T(1), T(0)}, bent = x * polynomial(x * x, lens.k1, lens.k2, lens.k3, lens.k4);
  const T p = bent.first, p2 = bent.second, i_rho = T(1) / rho, i_rho2 = i_rho * i_rho;
  const T r2 = T(1) / (rho2 + z * z), r4 = r2 * r2;  // of the ray's length
  Radial<T> out;
  out.s = bent.value * i_rho;
  out.a = (p * z * r2 - out.s) * i_rho2;
  out.b = -p * r2;
  out.c = (p2 * z * z * r4 * i_rho - T(2) * p * z * r4 - T(3) * out.a) * i_rho2;
  out.d = (T(2) * p - p2 * z * i_rho) * r4;
  out.e = (p2 * rho + T(2) * p * z) * r4;
  out.beyond = theta / lens.angle;
  return out;
}

// What `footprint` takes of a lens at a mean in camera space: see PinholeJacobian.
template <typename T>
struct LensJacobian {
  Radial<T> radial;
  T tangent2, tangent3;  // 1 / Z^2 and 1 / Z^3 of a perspective lens, otherwise 0
  T u, v;                // where the lens maps the mean, in focal lengths
  Vec3<T> r0, r1;        // the rows of J, in pixels
  T ray;                 // the depth

  NSMG_HD Vec3<T> a0(const Mat3<T>& camera_axes) const { return r0 * camera_axes; }
  NSMG_HD Vec3<T> a1(const Mat3<T>& camera_axes) const { return r1 * camera_axes; }
  NSMG_HD T x(const Camera<T>& camera, const Vec3<T>&) const { return camera.fx * u + camera.cx; }
  NSMG_HD T y(const Camera<T>& camera, const Vec3<T>&) const { return camera.fy * v + camera.cy; }
  NSMG_HD T depth(const Vec3<T>&) const { return ray; }
  NSMG_HD bool inside() const { return radial.beyond <= T(1); }

  // The gradient by the mean of <g0, J0> + <g1, J1>, with the rows J0 and J1 of J in focal lengths.
  NSMG_HD Vec3<T> bent(const Lens<T>& lens, const Vec3<T>& seen, const Vec3<T>& g0, const Vec3<T>& g1) const {
    if (lens.kind == LensKind::kEquirectangular) return bent_panorama(seen, g0, g1);
    const T x = seen.x, y = seen.y, mixed = g0.y + g1.x, trace = g0.x + g1.y;
    // The radial part of <G, J> is s trace + a (x, y) G (x, y) + b (x, y) G_z.
    const Radial<T>& f = radial;
    const T twice = x * x * g0.x + x * y * mixed + y * y * g1.y, ahead = g0.z * x + g1.z * y;
    const T common = f.a * trace + f.c * twice + f.d * ahead;
    const Vec3<T> by = {common * x + f.a * (T(2) * g0.x * x + mixed * y) + f.b * g0.z,
                        common * y + f.a * (mixed * x + T(2) * g1.y * y) + f.b * g1.z,
                        f.b * trace + f.d * twice + f.e * ahead};
    // The tangential part is (grad Q . G) / Z^2 - 2 (Q . G_z) / Z^3.
    const T p1 = lens.p1, p2 = lens.p2, q00 = T(2) * p1 * y + T(6) * p2 * x,
            q01 = T(2) * (p1 * x + p2 * y), q11 = T(6) * p1 * y + T(2) * p2 * x, i2 = tangent2, i3 = T(-2) * tangent3;
    const T q0 = T(0.5) * (q00 * x + q01 * y), q1 = T(0.5) * (q01 * x + q11 * y);  // of degree 2, so by Euler
    const T a0 = T(6) * p2 * g0.x + T(2) * p1 * mixed + T(2) * p2 * g1.y,
            a1 = T(2) * p1 * g0.x + T(2) * p2 * mixed + T(6) * p1 * g1.y;
    return by + Vec3<T>{i2 * a0 + i3 * (g0.z * q00 + g1.z * q01), i2 * a1 + i3 * (g0.z * q01 + g1.z * q11),
                        i3 * (g0.x * q00 + mixed * q01 + g1.y * q11) + T(6) * i2 * i2 * (g0.z * q0 + g1.z * q1)};
  }

  NSMG_HD Vec3<T> bent_panorama(const Vec3<T>& seen, const Vec3<T>& g0, const Vec3<T>& g1) const {
    const T x = seen.x, y = seen.y, z = seen.z, h2 = x * x + z * z, h = std::sqrt(h2);
    const T i_h = T(1) / h, i_h2 = i_h * i_h, i_r2 = T(1) / (h2 + y * y);
    const T around = (g0.x * z - g0.z * x) * i_h2;  // <g0, J0>
    const T level = (g1.x * x + g1.z * z) * i_h, up = (g1.y * h - y * level) * i_r2;  // <g1, J1>
    const T by_h = g1.y + y * level * i_h;  // of up / i_r2, through h
    return {(-g0.z - T(2) * x * around) * i_h2 + (by_h * x * i_h - y * g1.x * i_h - T(2) * x * up) * i_r2,
            (-level - T(2) * y * up) * i_r2,
            (g0.x - T(2) * z * around) * i_h2 + (by_h * z * i_h - y * g1.z * i_h - T(2) * z * up) * i_r2};
  }

  NSMG_HD SeenGradient<T> vjp(const LensCamera<T>& camera, const Vec3<T>& seen, const Mat3<T>& camera_axes,
                              const Vec3<T>& g_a0, const Vec3<T>& g_a1, const SplatGradient<T>& g) const {
    const auto by_row = [&](T focal, const Vec3<T>& g_a) {
      return focal * Vec3<T>{dot(g_a, camera_axes.r0), dot(g_a, camera_axes.r1), dot(g_a, camera_axes.r2)};
    };
    const Vec3<T> g0 = by_row(camera.fx, g_a0), g1 = by_row(camera.fy, g_a1);
    const Vec3<T> by_depth = camera.lens.depth_is_z() ? Vec3<T>{T(0), T(0), g.depth} : (g.depth / ray) * seen;
    return {{r0.x * g_a0 + r1.x * g_a1, r0.y * g_a0 + r1.y * g_a1, r0.z * g_a0 + r1.z * g_a1},
            bent(camera.lens, seen, g0, g1) + g.x * r0 + g.y * r1 + by_depth};
  }
};

template <typename T>
NSMG_HD LensJacobian<T> jacobian_at(const LensCamera<T>& camera, const Vec3<T>& seen) {
  const Lens<T>& lens = camera.lens;
  const T x = seen.x, y = seen.y, i = lens.depth_is_z() ? T(1) / seen.z : T(0);
  LensJacobian<T> j = {};
  if (lens.kind == LensKind::kEquirectangular) {
    const T h2 = x * x + seen.z * seen.z, h = std::sqrt(h2), i_h2 = T(1) / h2, r2 = h2 + y * y, i_r2 = T(1) / r2;
    j.ray = std::sqrt(r2);
    j.radial.beyond = kPole<T> * j.ray / h;
    j.u = std::atan2(x, seen.z);
    j.v = std::atan2(y, h);
    j.r0 = (camera.fx * i_h2) * Vec3<T>{seen.z, T(0), -x};
    j.r1 = (camera.fy * i_r2) * Vec3<T>{-x * y / h, h, -y * seen.z / h};
    return j;
  }
  j.radial = radial_at(lens, seen);
  const Radial<T>& f = j.radial;
  j.tangent2 = i * i;
  j.tangent3 = i * i * i;
  const T q00 = T(2) * lens.p1 * y + T(6) * lens.p2 * x, q01 = T(2) * (lens.p1 * x + lens.p2 * y),
          q11 = T(6) * lens.p1 * y + T(2) * lens.p2 * x;
  const T q0 = T(0.5) * (q00 * x + q01 * y), q1 = T(0.5) * (q01 * x + q11 * y);
  j.u = f.s * x + j.tangent2 * q0;
  j.v = f.s * y + j.tangent2 * q1;
  j.r0 = camera.fx * Vec3<T>{f.s + f.a * x * x + j.tangent2 * q00, f.a * x * y + j.tangent2 * q01,
                             f.b * x - T(2) * j.tangent3 * q0};
  j.r1 = camera.fy * Vec3<T>{f.a * x * y + j.tangent2 * q01, f.s + f.a * y * y + j.tangent2 * q11,
                             f.b * y - T(2) * j.tangent3 * q1};
  j.ray = lens.depth_is_z() ? seen.z : std::sqrt(x * x + y * y + seen.z * seen.z);
  return j;
}

// ---- 2D Gaussians and convexes ----

// The pinhole camera of focal length 1 that sees a mean's surroundings as the lens does, to first order: it maps X to
// A X with A = [d J + (u, v) n^T; n^T], where J is in focal lengths, d the mean's depth and n the gradient of the depth.
// For J m = 0 and n m = d at the mean m.
template <typename T>
struct LocalPinhole {
  LensJacobian<T> jacobian;
  Vec3<T> n;
  Mat3<T> a;

  NSMG_HD bool inside() const { return jacobian.inside(); }
  NSMG_HD Vec3<T> centre(const Vec3<T>&) const { return jacobian.ray * Vec3<T>{jacobian.u, jacobian.v, T(1)}; }  // A m
  NSMG_HD Vec3<T> image(const Vec3<T>& arm) const { return {dot(a.r0, arm), dot(a.r1, arm), dot(a.r2, arm)}; }
  NSMG_HD Vec3<T> image_vjp(const Vec3<T>& g) const { return g * a; }

  // The gradient by the mean, from that by A.
  NSMG_HD Vec3<T> vjp(const LensCamera<T>& camera, const Vec3<T>& seen, const Mat3<T>& g) const {
    const LensJacobian<T>& j = jacobian;
    const Vec3<T> j0 = (T(1) / camera.fx) * j.r0, j1 = (T(1) / camera.fy) * j.r1;
    const Vec3<T> by_n = j.u * g.r0 + j.v * g.r1 + g.r2;
    const T turn = camera.lens.depth_is_z() ? T(0) : T(1) / j.ray;
    return j.bent(camera.lens, seen, j.ray * g.r0, j.ray * g.r1) + dot(g.r0, n) * j0 + dot(g.r1, n) * j1 +
           (dot(g.r0, j0) + dot(g.r1, j1)) * n + turn * (by_n - dot(by_n, n) * n);
  }
};

template <typename T>
NSMG_HD LocalPinhole<T> local_pinhole(const LensCamera<T>& camera, const Vec3<T>& seen) {
  LocalPinhole<T> local;
  const LensJacobian<T>& j = local.jacobian = jacobian_at(camera, seen);
  local.n = camera.lens.depth_is_z() ? Vec3<T>{T(0), T(0), T(1)} : (T(1) / j.ray) * seen;
  local.a = {(j.ray / camera.fx) * j.r0 + j.u * local.n, (j.ray / camera.fy) * j.r1 + j.v * local.n, local.n};
  return local;
}

// ---- culling ----

// The sum of the sizes of all terms of a point in camera space: rounding is in proportion to it.
template <typename T>
NSMG_HD T terms_size(const Camera<T>& camera, const Vec3<T>& point) {
  const auto one = [&](const Vec3<T>& row, T t) {
    return std::abs(row.x * point.x) + std::abs(row.y * point.y) + std::abs(row.z * point.z) + std::abs(t);
  };
  return one(camera.rotation.r0, camera.translation.x) + one(camera.rotation.r1, camera.translation.y) +
         one(camera.rotation.r2, camera.translation.z);
}

// As may_touch of a pinhole camera: the ball's covariance is largest_scale^2 J J^T.
template <typename T>
NSMG_HD bool may_touch(const LensCamera<T>& camera, const Vec3<T>& mean, T largest_scale, T cutoff2, T eps2d, T x0,
                       T y0, T x1, T y1) {
  const Vec3<T> seen = to_camera(camera, mean);
  const LensJacobian<T> j = jacobian_at(camera, seen);
  const T slack = T(1e-6) * terms_size(camera, mean), scale2 = square(largest_scale);
  const T variance_x = scale2 * dot(j.r0, j.r0) + eps2d, variance_y = scale2 * dot(j.r1, j.r1) + eps2d;
  const T side = three_sigma(variance_x, scale2 * dot(j.r0, j.r1), variance_y);
  const T rx = outward(larger(std::sqrt(larger(cutoff2, T(0)) * variance_x), side), bound_margin<T>());
  const T ry = outward(larger(std::sqrt(larger(cutoff2, T(0)) * variance_y), side), bound_margin<T>());
  return (cutoff2 >= T(0)) & (j.ray >= camera.near_plane - slack) & (j.ray <= camera.far_plane + slack) &
         (j.radial.beyond <= T(1.00001)) & overlaps(j.x(camera, seen), j.y(camera, seen), rx, ry, x0, y0, x1, y1);
}

// Whether the lens may draw a mean in this ball, in camera space: whether the ball touches the cone of its rays and the
// range of depths. True for NaN. `rounding`: an angle in radians, which is more than the trigonometry here rounds.
template <typename T>
NSMG_HD bool may_draw_in(const LensCamera<T>& camera, const Vec3<T>& centre, T radius, T rounding) {
  const T distance = std::sqrt(dot(centre, centre));
  const bool around = !(distance > radius);
  const T away = std::atan2(std::sqrt(square(centre.x) + square(centre.y)), centre.z) -
                 std::asin(smaller(radius / distance, T(1)));
  const T depth = camera.lens.depth_is_z() ? centre.z : distance;
  return !((!around & (away > camera.lens.angle + rounding)) | (depth + radius < camera.near_plane) |
           (depth - radius > camera.far_plane));
}

// As may_touch_moving of a pinhole camera, by the cone of all rays rather than by the image: it keeps more.
template <typename T>
NSMG_HD bool may_touch_moving(const LensCamera<T>& camera, const Vec3<T>& mean, T moved, T, T cutoff2, T) {
  const T slack = T(1e-6) * terms_size(camera, mean);
  return (cutoff2 >= T(0)) & may_draw_in(camera, to_camera(camera, mean), moved + slack, T(1e-3));
}

// As may_show of a pinhole camera: by the ball around the box, and by the cone.
template <bool Moving, typename T>
NSMG_HD bool may_show(const LensCamera<T>& camera, const Box<T>& box, const Motion<T>& motion, T) {
  if ((box.lower.x > box.upper.x) | (box.lower.y > box.upper.y) | (box.lower.z > box.upper.z)) return false;
  const Vec3<T> centre = T(0.5) * box.lower + T(0.5) * box.upper, half = T(0.5) * box.upper - T(0.5) * box.lower;
  const T error = box_error<T>() * terms_size(camera, magnitude(centre) + half);
  return may_draw_in(camera, to_camera(camera, centre), std::sqrt(dot(half, half)) + motion.moved + error, T(2e-3));
}

}  // namespace nsmg
