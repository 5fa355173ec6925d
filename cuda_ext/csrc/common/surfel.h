// One 2D Gaussian seen by one camera, with its gradient: Huang et al. 2024, "2D Gaussian Splatting", sections
// 4.1 and 4.2, with the conventions of gsplat 1.4.0's rasterization_2dgs. See cuda_ext/ops/raster/surfels.py.
//
// H = [s_u a_u, s_v a_v, mean] in camera space, by rows hx, hy, hz, takes (u, v, 1) in the splat's plane to a place in
// front of the camera; T = K H takes it to homogeneous pixels. With a lens, H is that of the pinhole camera which sees
// the mean's surroundings as the lens does (LocalPinhole, lens.h): H' = A H. Boxes are computed around the projected mean, from the
// axes as they turn on the screen: there nothing cancels.
#pragma once

#include "common/alpha.h"
#include "common/projection.h"

namespace nsmg {

// The disc of one standard deviation must lie in front of the camera's plane by this, relative to its depth squared.
template <typename T>
inline constexpr T kFront = T(1e-6);

template <typename T>
struct Surfel {
  Vec3<T> mean;
  Quat<T> quat;
  T scale_u, scale_v;
  T opacity;
};

// L: of the camera, see local_pinhole.
template <typename T, typename L>
struct SurfelFrame {
  Quat<T> unit;      // the quaternion at length one
  T inverse_length;
  Mat3<T> turn;      // its rotation matrix
  Mat3<T> axes;      // in camera space: columns a_u, a_v, normal
  Vec3<T> mean;      // there
  L local;
  Vec3<T> edge_u, edge_v, seen;  // the columns of H
  Vec3<T> u, v, w;   // T by rows
  T tilt_u, tilt_v;  // how far the axes lead away from the camera
  T slope_x, slope_y;
  T facing;          // 1 where the normal looks at the camera, else -1
  bool in_depth, regular;
};

template <template <typename> class C, typename T>
NSMG_HD auto surfel_frame(const C<T>& camera, const Surfel<T>& point) {
  const Vec3<T> mean = to_camera(camera, point.mean);
  SurfelFrame<T, decltype(local_pinhole(camera, mean))> f;
  f.inverse_length = inverse_length(point.quat);
  f.unit = scaled(point.quat, f.inverse_length);
  f.turn = rotation(f.unit);
  f.axes = camera.rotation * f.turn;
  f.mean = mean;
  f.local = local_pinhole(camera, mean);
  f.edge_u = f.local.image(point.scale_u * Vec3<T>{f.axes.r0.x, f.axes.r1.x, f.axes.r2.x});
  f.edge_v = f.local.image(point.scale_v * Vec3<T>{f.axes.r0.y, f.axes.r1.y, f.axes.r2.y});
  f.seen = f.local.centre(mean);
  const T z = f.seen.z;
  f.in_depth = (z >= camera.near_plane) & (z <= camera.far_plane) & f.local.inside();
  f.slope_x = f.seen.x / z;
  f.slope_y = f.seen.y / z;
  f.tilt_u = f.edge_u.z;
  f.tilt_v = f.edge_v.z;
  f.w = {f.tilt_u, f.tilt_v, z};
  const Vec3<T> hx = {f.edge_u.x, f.edge_v.x, f.seen.x};
  const Vec3<T> hy = {f.edge_u.y, f.edge_v.y, f.seen.y};
  f.u = camera.fx * hx + camera.cx * f.w;
  f.v = camera.fy * hy + camera.cy * f.w;
  f.regular = f.in_depth & (f.tilt_u * f.tilt_u + f.tilt_v * f.tilt_v - z * z < -kFront<T> * z * z);
  const Vec3<T> normal = {f.axes.r0.z, f.axes.r1.z, f.axes.r2.z};
  f.facing = dot(normal, mean) < T(0) ? T(1) : T(-1);
  return f;
}

// Where the image of a disc around the splat's mean lies along one axis of the screen: its box's centre, from the
// projected mean, and half its extent, in pixels. reach2: the disc's radius squared, in standard deviations.
template <typename T>
struct SurfelBox {
  T shift, half;
};

template <typename T>
NSMG_HD SurfelBox<T> surfel_box(T turned_u, T turned_v, T tilt_u, T tilt_v, T z, T cutoff2) {
  const T below = cutoff2 * (tilt_u * tilt_u + tilt_v * tilt_v) - z * z;
  const T shift = cutoff2 * (turned_u * tilt_u + turned_v * tilt_v) / below;
  const T half2 = shift * shift - cutoff2 * (turned_u * turned_u + turned_v * turned_v) / below;
  return {shift, std::sqrt(larger(half2, T(0)))};
}

template <typename T>
struct SurfelRow {
  T x, y;
  Vec3<T> u, v, w, normal;
  T depth, opacity;
  T rx, ry;    // radii, whole numbers
  bool alive;  // whether it is drawn anywhere in its view; if not, only the radii mean anything
};

template <template <typename> class C, typename T>
NSMG_HD SurfelRow<T> project_surfel(const C<T>& camera, const Surfel<T>& point) {
  const auto f = surfel_frame(camera, point);
  SurfelRow<T> row = {};
  if (!f.regular) return row;
  const T z = f.seen.z;
  const T xu = camera.fx * (f.edge_u.x - f.slope_x * f.tilt_u);
  const T xv = camera.fx * (f.edge_v.x - f.slope_x * f.tilt_v);
  const T yu = camera.fy * (f.edge_u.y - f.slope_y * f.tilt_u);
  const T yv = camera.fy * (f.edge_v.y - f.slope_y * f.tilt_v);
  const SurfelBox<T> across = surfel_box(xu, xv, f.tilt_u, f.tilt_v, z, T(1));
  const SurfelBox<T> down = surfel_box(yu, yv, f.tilt_u, f.tilt_v, z, T(1));
  row.x = camera.fx * f.slope_x + camera.cx + across.shift;
  row.y = camera.fy * f.slope_y + camera.cy + down.shift;
  // gsplat's radius.
  const T widest = larger(across.half, down.half);
  const T square = std::ceil(T(3) * std::sqrt(larger(widest * widest, T(1e-4))));
  const T most = max_radius<T>();
  if (!((std::abs(row.x) <= most) & (std::abs(row.y) <= most) & (square <= most))) return {};
  const bool opaque = point.opacity >= kAlphaMin<T>;
  const T cutoff2 = opaque ? cutoff_squared(point.opacity) : T(0);
  const bool bounded = cutoff2 * (f.tilt_u * f.tilt_u + f.tilt_v * f.tilt_v) - z * z < -kFront<T> * z * z;
  T rx, ry;
  if (bounded) {
    const SurfelBox<T> wide_x = surfel_box(xu, xv, f.tilt_u, f.tilt_v, z, cutoff2);
    const SurfelBox<T> wide_y = surfel_box(yu, yv, f.tilt_u, f.tilt_v, z, cutoff2);
    const T disc = std::sqrt(T(0.5) * cutoff2);  // of the low-pass filter
    rx = larger(std::abs(wide_x.shift - across.shift) + wide_x.half, disc);
    ry = larger(std::abs(wide_y.shift - down.shift) + wide_y.half, disc);
  } else {
    rx = larger(std::abs(row.x), std::abs(camera.width - row.x)) + T(1);
    ry = larger(std::abs(row.y), std::abs(camera.height - row.y)) + T(1);
  }
  rx = outward(rx, extent_margin<T>());
  ry = outward(ry, extent_margin<T>());
  row.alive = opaque & overlaps(row.x, row.y, rx, ry, T(0), T(0), camera.width, camera.height);
  const bool counted = overlaps(row.x, row.y, square, square, T(0), T(0), camera.width, camera.height);
  row.rx = row.alive ? rx : counted ? -square : T(0);
  row.ry = row.alive ? ry : counted ? -square : T(0);
  row.u = f.u;
  row.v = f.v;
  row.w = f.w;
  row.normal = f.facing * Vec3<T>{f.axes.r0.z, f.axes.r1.z, f.axes.r2.z};
  row.depth = z;
  row.opacity = point.opacity;
  return row;
}

// The gradients of a row's outputs.
template <typename T>
struct SurfelRowGradient {
  T x, y;
  Vec3<T> u, v, w, normal;
  T depth, opacity;
};

template <typename T>
struct SurfelGradient {
  Vec3<T> mean;
  Quat<T> quat;
  T scale_u, scale_v, opacity;
  Mat3<T> rotation;     // of the camera
  Vec3<T> translation;
};

// Of a row that is alive.
template <template <typename> class C, typename T>
NSMG_HD SurfelGradient<T> surfel_vjp(const C<T>& camera, const Surfel<T>& point, const SurfelRowGradient<T>& g) {
  const auto f = surfel_frame(camera, point);
  // The box's centre is sum(t u w) / sum(t w w) with t = (1, 1, -1), and so for v.
  const T z = f.seen.z;
  const T inverse = T(1) / (f.tilt_u * f.tilt_u + f.tilt_v * f.tilt_v - z * z);
  const Vec3<T> tw = {f.w.x * inverse, f.w.y * inverse, -z * inverse};
  const T x = dot(f.u, tw), y = dot(f.v, tw);
  const Vec3<T> tu = {f.u.x * inverse, f.u.y * inverse, -f.u.z * inverse};
  const Vec3<T> tv = {f.v.x * inverse, f.v.y * inverse, -f.v.z * inverse};
  const Vec3<T> v_u = g.u + g.x * tw, v_v = g.v + g.y * tw;
  const Vec3<T> v_w = g.w + g.x * (tu - (T(2) * x) * tw) + g.y * (tv - (T(2) * y) * tw);
  const Vec3<T> v_hx = camera.fx * v_u, v_hy = camera.fy * v_v;
  const Vec3<T> v_hz = camera.cx * v_u + camera.cy * v_v + v_w;
  const Vec3<T> v_edge_u = {v_hx.x, v_hy.x, v_hz.x}, v_edge_v = {v_hx.y, v_hy.y, v_hz.y};
  const Vec3<T> v_at = {v_hx.z, v_hy.z, v_hz.z + g.depth};
  const Vec3<T> axis_u = {f.axes.r0.x, f.axes.r1.x, f.axes.r2.x}, axis_v = {f.axes.r0.y, f.axes.r1.y, f.axes.r2.y};
  // Where the mean is, `local` is the lens to first order: its own change adds nothing to that of `seen`.
  const Mat3<T> v_local = outer(v_edge_u, point.scale_u * axis_u) + outer(v_edge_v, point.scale_v * axis_v);
  const Vec3<T> v_seen = f.local.image_vjp(v_at) + f.local.vjp(camera, f.mean, v_local);
  const Vec3<T> v_u_axis = f.local.image_vjp(v_edge_u), v_v_axis = f.local.image_vjp(v_edge_v);
  const Mat3<T> v_axes = {{point.scale_u * v_u_axis.x, point.scale_v * v_v_axis.x, f.facing * g.normal.x},
                          {point.scale_u * v_u_axis.y, point.scale_v * v_v_axis.y, f.facing * g.normal.y},
                          {point.scale_u * v_u_axis.z, point.scale_v * v_v_axis.z, f.facing * g.normal.z}};
  SurfelGradient<T> out;
  out.mean = v_seen * camera.rotation;
  out.quat = rotation_vjp(f.unit, f.inverse_length, transpose(camera.rotation) * v_axes);
  out.scale_u = dot(v_u_axis, axis_u);
  out.scale_v = dot(v_v_axis, axis_v);
  out.opacity = g.opacity;
  out.rotation = outer(v_seen, point.mean) + v_axes * transpose(f.turn);
  out.translation = v_seen;
  return out;
}

}  // namespace nsmg
