// One point seen by one camera: the EWA projection of 3D Gaussian splatting (Zwicker et al. 2001, "EWA volume
// splatting"; Kerbl et al. 2023, section 4), as gsplat 1.4.0 computes it, with its gradient.
//
// With W = R Rq diag(s) (the point's axes in camera space, by rows) and J the Jacobian of the perspective division at
// the mean, the 2D covariance is A A^T + eps2d I where A = J W has the two rows a0 and a1. Its determinant without the
// blur is |a0 x a1|^2, and with it that plus eps2d (trace + eps2d): sums of squares, where the textbook difference of
// products loses all digits of a thin splat.
//
// J is the camera's: jacobian_at(camera, seen) returns a PinholeJacobian here, or a LensJacobian (lens.h).
#pragma once

#include "common/quaternion.h"

namespace nsmg {

template <typename T>
struct Camera {
  Mat3<T> rotation;
  Vec3<T> translation;
  T fx, fy, cx, cy;
  T width, height;
  T left, right, top, bottom;  // the x/z and y/z at which the Jacobian is clamped: the image and 15 % more a side
  T near_plane, far_plane;
};

// viewmat: 16 numbers, row-major world-to-camera; k: 9 numbers, row-major intrinsics (the skew is ignored).
template <typename T>
NSMG_HD Camera<T> make_camera(const T* viewmat, const T* k, T width, T height, T near_plane, T far_plane) {
  const T fx = k[0], fy = k[4], cx = k[2], cy = k[5];
  const T margin_x = T(0.15) * width / fx, margin_y = T(0.15) * height / fy;
  return {{{viewmat[0], viewmat[1], viewmat[2]},
           {viewmat[4], viewmat[5], viewmat[6]},
           {viewmat[8], viewmat[9], viewmat[10]}},
          {viewmat[3], viewmat[7], viewmat[11]},
          fx, fy, cx, cy, width, height,
          -(cx / fx + margin_x), (width - cx) / fx + margin_x,
          -(cy / fy + margin_y), (height - cy) / fy + margin_y,
          near_plane, far_plane};
}

template <typename T>
NSMG_HD T dot_add(const Vec3<T>& a, const Vec3<T>& b, T c) {
  return multiply_add(a.x, b.x, multiply_add(a.y, b.y, multiply_add(a.z, b.z, c)));
}

template <typename T>
NSMG_HD Vec3<T> to_camera(const Camera<T>& camera, const Vec3<T>& p) {
  return {dot_add(camera.rotation.r0, p, camera.translation.x), dot_add(camera.rotation.r1, p, camera.translation.y),
          dot_add(camera.rotation.r2, p, camera.translation.z)};
}

template <typename T>
struct Point {
  Vec3<T> mean;
  Quat<T> quat;
  Vec3<T> scale;
  T opacity;
};

// A point by any factor of its covariance, which is axes axes^T: the columns need not be perpendicular.
template <typename T>
struct AxesPoint {
  Vec3<T> mean;
  Mat3<T> axes;
  T opacity;
};

template <typename T>
struct SplatGradient {
  T x, y;
  T conic_a, conic_b, conic_c;
  T depth, opacity;
};

// The gradient by what the Jacobian and the mean in pixels are made of.
template <typename T>
struct SeenGradient {
  Mat3<T> camera_axes;
  Vec3<T> seen;
};

// The perspective division at a mean in camera space.
template <typename T>
struct PinholeJacobian {
  T inverse_depth;
  T u, v;                 // clamped x/z and y/z
  bool free_u, free_v;    // whether they were not clamped
  T jx, jy, jxz, jyz;     // the entries of J

  NSMG_HD Vec3<T> a0(const Mat3<T>& camera_axes) const { return jx * camera_axes.r0 + jxz * camera_axes.r2; }
  NSMG_HD Vec3<T> a1(const Mat3<T>& camera_axes) const { return jy * camera_axes.r1 + jyz * camera_axes.r2; }
  NSMG_HD T x(const Camera<T>& camera, const Vec3<T>& seen) const {
    return camera.fx * (seen.x * inverse_depth) + camera.cx;
  }
  NSMG_HD T y(const Camera<T>& camera, const Vec3<T>& seen) const {
    return camera.fy * (seen.y * inverse_depth) + camera.cy;
  }
  NSMG_HD T depth(const Vec3<T>& seen) const { return seen.z; }
  NSMG_HD bool inside() const { return true; }

  NSMG_HD SeenGradient<T> vjp(const Camera<T>& camera, const Vec3<T>& seen, const Mat3<T>& camera_axes,
                              const Vec3<T>& g_a0, const Vec3<T>& g_a1, const SplatGradient<T>& g) const {
    const T g_jx = dot(g_a0, camera_axes.r0), g_jxz = dot(g_a0, camera_axes.r2);
    const T g_jy = dot(g_a1, camera_axes.r1), g_jyz = dot(g_a1, camera_axes.r2);
    // J and the mean in pixels depend on 1/z and on x/z and y/z, which the clamp holds fixed in J outside its bounds.
    const T g_u = (free_u ? -jx * g_jxz : T(0)) + camera.fx * g.x;
    const T g_v = (free_v ? -jy * g_jyz : T(0)) + camera.fy * g.y;
    const T g_inverse_depth =
        camera.fx * (g_jx - u * g_jxz) + camera.fy * (g_jy - v * g_jyz) + g_u * seen.x + g_v * seen.y;
    return {{jx * g_a0, jy * g_a1, jxz * g_a0 + jyz * g_a1},
            {g_u * inverse_depth, g_v * inverse_depth, g.depth - g_inverse_depth * inverse_depth * inverse_depth}};
  }
};

template <typename T>
NSMG_HD PinholeJacobian<T> jacobian_at(const Camera<T>& camera, const Vec3<T>& seen) {
  PinholeJacobian<T> j;
  j.inverse_depth = T(1) / seen.z;
  const T u = seen.x * j.inverse_depth, v = seen.y * j.inverse_depth;
  j.u = smaller(larger(u, camera.left), camera.right);
  j.v = smaller(larger(v, camera.top), camera.bottom);
  j.free_u = u == j.u;
  j.free_v = v == j.v;
  j.jx = camera.fx * j.inverse_depth;
  j.jy = camera.fy * j.inverse_depth;
  j.jxz = -j.jx * j.u;
  j.jyz = -j.jy * j.v;
  return j;
}

// A pinhole camera as 2D Gaussians and convexes see it: as it is. Of a lens: LocalPinhole (lens.h).
template <typename T>
struct SamePinhole {
  NSMG_HD bool inside() const { return true; }
  NSMG_HD Vec3<T> centre(const Vec3<T>& mean) const { return mean; }
  NSMG_HD Vec3<T> image(const Vec3<T>& arm) const { return arm; }
  NSMG_HD Vec3<T> image_vjp(const Vec3<T>& g) const { return g; }
  NSMG_HD Vec3<T> vjp(const Camera<T>&, const Vec3<T>&, const Mat3<T>&) const { return {T(0), T(0), T(0)}; }
};

template <typename T>
NSMG_HD SamePinhole<T> local_pinhole(const Camera<T>&, const Vec3<T>&) {
  return {};
}

// What forward and backward both need on the way to the splat. J: of the camera.
template <typename T, typename J>
struct Footprint {
  Quat<T> unit;           // the quaternion at length one; of an AxesPoint nothing, as the next two
  T inverse_length;
  Mat3<T> turn;           // its rotation matrix
  Mat3<T> axes;           // turn diag(scale)
  Mat3<T> camera_axes;    // W
  Vec3<T> seen;           // the mean in camera space
  J jacobian;
  Vec3<T> a0, a1;
  T xx, xy, yy;           // covariance with the blur
  T sharp_det, det;       // determinants without and with the blur
};

template <typename T, typename J>
NSMG_HD void set_axes(Footprint<T, J>& f, const Point<T>& point) {
  f.inverse_length = inverse_length(point.quat);
  f.unit = scaled(point.quat, f.inverse_length);
  f.turn = rotation(f.unit);
  f.axes = scale_columns(f.turn, point.scale);
}

template <typename T, typename J>
NSMG_HD void set_axes(Footprint<T, J>& f, const AxesPoint<T>& point) {
  f.axes = point.axes;
}

template <template <typename> class C, typename T, template <typename> class P>
NSMG_HD auto footprint(const C<T>& camera, const P<T>& point, T eps2d) {
  const Vec3<T> seen = to_camera(camera, point.mean);
  Footprint<T, decltype(jacobian_at(camera, seen))> f;
  set_axes(f, point);
  f.camera_axes = camera.rotation * f.axes;
  f.seen = seen;
  f.jacobian = jacobian_at(camera, seen);
  f.a0 = f.jacobian.a0(f.camera_axes);
  f.a1 = f.jacobian.a1(f.camera_axes);
  const T xx = dot(f.a0, f.a0), yy = dot(f.a1, f.a1);
  const Vec3<T> area = cross(f.a0, f.a1);
  f.sharp_det = dot(area, area);
  f.det = f.sharp_det + eps2d * (xx + yy + eps2d);
  f.xx = xx + eps2d;
  f.xy = dot(f.a0, f.a1);
  f.yy = yy + eps2d;
  return f;
}

// sqrt(det / det with blur): what antialiasing multiplies the opacity by (Yu et al. 2024, Mip-Splatting, equation 9).
template <typename T, typename J>
NSMG_HD T compensation(const Footprint<T, J>& f) {
  return std::sqrt(f.sharp_det / f.det);
}

// Half the side in pixels, before rounding up, of the square around a splat of this covariance outside of which gsplat
// 1.4.0 does not see it: 3 standard deviations of its long axis. It grows with the covariance (in the Loewner order),
// for so do the largest eigenvalue and half the trace.
template <typename T>
NSMG_HD T three_sigma(T xx, T xy, T yy) {
  const T middle = T(0.5) * (xx + yy), apart = T(0.5) * (xx - yy);
  return T(3) * std::sqrt(middle + std::sqrt(larger(apart * apart + xy * xy, T(0.01))));
}

template <typename T>
struct Splat {
  T x, y;              // mean in pixels
  T conic_a, conic_b, conic_c;
  T depth, opacity;
  T variance_x, variance_y;
  T square;            // three_sigma, rounded up
  bool regular;        // in the depth range and in the lens, and invertible
  bool alive;          // regular, and opaque enough to be drawn
};

template <template <typename> class C, typename T, template <typename> class P>
NSMG_HD Splat<T> make_splat(const C<T>& camera, const P<T>& point, T eps2d, bool antialiased) {
  const auto f = footprint(camera, point, eps2d);
  const T inverse_det = T(1) / f.det;
  Splat<T> s;
  s.x = f.jacobian.x(camera, f.seen);
  s.y = f.jacobian.y(camera, f.seen);
  s.conic_a = f.yy * inverse_det;
  s.conic_b = -f.xy * inverse_det;
  s.conic_c = f.xx * inverse_det;
  s.depth = f.jacobian.depth(f.seen);
  s.opacity = point.opacity * (antialiased ? compensation(f) : T(1));
  s.variance_x = f.xx;
  s.variance_y = f.yy;
  s.square = smaller(std::ceil(three_sigma(f.xx, f.xy, f.yy)), max_radius<T>());
  // Written so that a NaN anywhere is not alive, nor a determinant that overflowed: its inverse is 0.
  s.regular = (s.depth >= camera.near_plane) & (s.depth <= camera.far_plane) & f.jacobian.inside() & (f.det > T(0)) &
              (inverse_det > T(0));
  s.alive = s.regular & (s.opacity >= min_alpha<T>());
  return s;
}

// The squared Mahalanobis distance at which a splat's alpha falls to 1/255; 0 if alpha is always below.
template <typename T>
NSMG_HD T cutoff_squared(T opacity) {
  return larger(T(2) * std::log(T(255) * opacity), T(0));
}

// Whether the box of half extents (rx, ry) around (x, y) overlaps the rectangle (x0, y0, x1, y1), all in pixels.
template <typename T>
NSMG_HD bool overlaps(T x, T y, T rx, T ry, T x0, T y0, T x1, T y1) {
  return (x + rx > x0) & (x - rx < x1) & (y + ry > y0) & (y - ry < y1);
}

// From a row's half extents, makes its `radii`: what they are where it is drawn; minus its square where only that
// touches the view; else 0. Returns whether it is drawn.
template <typename T>
NSMG_HD bool set_radii(const Camera<T>& camera, T x, T y, T square, bool regular, bool alive, T& rx, T& ry) {
  const bool seen = regular & overlaps(x, y, square, square, T(0), T(0), camera.width, camera.height);
  const bool drawn = seen & alive & overlaps(x, y, rx, ry, T(0), T(0), camera.width, camera.height);
  const T undrawn = seen ? -square : T(0);
  rx = drawn ? rx : undrawn;
  ry = drawn ? ry : undrawn;
  return drawn;
}

// One row as `project` puts it out: the splat, and its `radii`, whole numbers.
template <typename T>
struct ProjectedRow {
  Splat<T> splat;
  T rx, ry;
  bool alive;  // whether it is drawn anywhere in its whole view; if not, the splat means nothing
};

template <template <typename> class C, typename T, template <typename> class P>
NSMG_HD ProjectedRow<T> project_row(const C<T>& camera, const P<T>& point, T eps2d, bool antialiased) {
  ProjectedRow<T> row;
  row.splat = make_splat(camera, point, eps2d, antialiased);
  const T cutoff2 = row.splat.alive ? cutoff_squared(row.splat.opacity) : T(0);
  row.rx = outward(std::sqrt(cutoff2 * row.splat.variance_x), extent_margin<T>());
  row.ry = outward(std::sqrt(cutoff2 * row.splat.variance_y), extent_margin<T>());
  row.alive = set_radii(camera, row.splat.x, row.splat.y, row.splat.square, row.splat.regular, row.splat.alive,
                        row.rx, row.ry);
  return row;
}

// Returns whether a point may have alpha 1/255 in a rectangle, or its square of three sigma the rectangle, from its largest
// scale alone: no rotation widens a splat beyond the sphere of that radius. `cutoff2` as from cutoff_squared(), negative for no
// point.
template <typename T>
NSMG_HD bool may_touch(const Camera<T>& camera, const Vec3<T>& mean, T largest_scale, T cutoff2, T eps2d, T x0, T y0,
                       T x1, T y1) {
  const Vec3<T> seen = to_camera(camera, mean);
  const Vec3<T>& row = camera.rotation.r2;
  // The depth's own rounding error: a point on the near plane must not be lost to it.
  const T slack = T(1e-6) * (std::abs(row.x * mean.x) + std::abs(row.y * mean.y) + std::abs(row.z * mean.z) +
                             std::abs(camera.translation.z));
  const T inverse_depth = T(1) / seen.z;
  const T u = seen.x * inverse_depth, v = seen.y * inverse_depth;
  const T clamped_u = smaller(larger(u, camera.left), camera.right);
  const T clamped_v = smaller(larger(v, camera.top), camera.bottom);
  const T jx = largest_scale * camera.fx * inverse_depth, jy = largest_scale * camera.fy * inverse_depth;
  const T variance_x = jx * jx * (1 + clamped_u * clamped_u) + eps2d;
  const T variance_y = jy * jy * (1 + clamped_v * clamped_v) + eps2d;
  const T square = three_sigma(variance_x, jx * jy * clamped_u * clamped_v, variance_y);
  const T rx = outward(larger(std::sqrt(larger(cutoff2, T(0)) * variance_x), square), bound_margin<T>());
  const T ry = outward(larger(std::sqrt(larger(cutoff2, T(0)) * variance_y), square), bound_margin<T>());
  return (cutoff2 >= T(0)) & (seen.z >= camera.near_plane - slack) & (seen.z <= camera.far_plane + slack) &
         overlaps(camera.fx * u + camera.cx, camera.fy * v + camera.cy, rx, ry, x0, y0, x1, y1);
}

template <typename T>
struct PointGradient {
  Vec3<T> mean;
  Quat<T> quat;
  Vec3<T> scale;
  T opacity;
  Mat3<T> rotation;     // of the camera
  Vec3<T> translation;  // of the camera
};

template <typename T>
struct AxesGradient {
  Vec3<T> mean;
  Mat3<T> axes;
  T opacity;
  Mat3<T> rotation;     // of the camera
  Vec3<T> translation;  // of the camera
};

// The gradient of make_splat, by the point's axes, at a splat that is alive. f: its footprint.
template <template <typename> class C, typename T, typename J>
NSMG_HD AxesGradient<T> axes_vjp(const C<T>& camera, const Footprint<T, J>& f, const Vec3<T>& mean, T opacity,
                                 T eps2d, bool antialiased, const SplatGradient<T>& g) {
  AxesGradient<T> out;
  const T inverse_det = T(1) / f.det;
  const T pa = f.yy * inverse_det, pb = -f.xy * inverse_det, pc = f.xx * inverse_det;

  // The conic is the covariance's inverse P. The covariance's gradient is -P G P, with half of b's gradient in G twice.
  const T half_b = T(0.5) * g.conic_b;
  const T m00 = pa * g.conic_a + pb * half_b, m01 = pa * half_b + pb * g.conic_c;
  const T m10 = pb * g.conic_a + pc * half_b, m11 = pb * half_b + pc * g.conic_c;
  T g_xx = -(m00 * pa + m01 * pb);
  T g_xy = -(m00 * pb + m01 * pc) - (m10 * pa + m11 * pb);
  T g_yy = -(m10 * pb + m11 * pc);

  // r = det / blurred det, opacity = o sqrt(r).
  const T root = compensation(f);
  const T ratio = root * root;
  const T g_ratio = antialiased ? T(0.5) * opacity * g.opacity / root : T(0);
  out.opacity = antialiased ? root * g.opacity : g.opacity;
  g_xx += g_ratio * ((f.yy - eps2d) * inverse_det - ratio * pa);
  g_xy += g_ratio * T(-2) * f.xy * (1 - ratio) * inverse_det;
  g_yy += g_ratio * ((f.xx - eps2d) * inverse_det - ratio * pc);

  // covariance = A A^T, A = J W.
  const Vec3<T> g_a0 = (2 * g_xx) * f.a0 + g_xy * f.a1;
  const Vec3<T> g_a1 = (2 * g_yy) * f.a1 + g_xy * f.a0;
  const SeenGradient<T> by = f.jacobian.vjp(camera, f.seen, f.camera_axes, g_a0, g_a1, g);

  // seen = R mean + t and W = R axes.
  out.axes = transpose(camera.rotation) * by.camera_axes;
  out.mean = by.seen * camera.rotation;
  out.translation = by.seen;
  out.rotation = by.camera_axes * transpose(f.axes) + outer(by.seen, mean);
  return out;
}

// The gradient of make_splat at a splat that is alive.
template <template <typename> class C, typename T>
NSMG_HD PointGradient<T> splat_vjp(const C<T>& camera, const Point<T>& point, T eps2d, bool antialiased,
                                   const SplatGradient<T>& g) {
  const auto f = footprint(camera, point, eps2d);
  const AxesGradient<T> by_axes = axes_vjp(camera, f, point.mean, point.opacity, eps2d, antialiased, g);
  const Mat3<T>& g_axes = by_axes.axes;  // axes = turn diag(scale)
  PointGradient<T> out;
  out.mean = by_axes.mean;
  out.opacity = by_axes.opacity;
  out.rotation = by_axes.rotation;
  out.translation = by_axes.translation;
  out.scale = times(g_axes.r0, f.turn.r0) + times(g_axes.r1, f.turn.r1) + times(g_axes.r2, f.turn.r2);
  out.quat = rotation_vjp(f.unit, f.inverse_length, scale_columns(g_axes, point.scale));
  return out;
}

template <template <typename> class C, typename T>
NSMG_HD AxesGradient<T> splat_vjp(const C<T>& camera, const AxesPoint<T>& point, T eps2d, bool antialiased,
                                  const SplatGradient<T>& g) {
  return axes_vjp(camera, footprint(camera, point, eps2d), point.mean, point.opacity, eps2d, antialiased, g);
}

}  // namespace nsmg
