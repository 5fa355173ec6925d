// Culling of points of which only bounds are known.
#pragma once

#include "common/projection.h"

namespace nsmg {

// may_touch for the whole view, of a mean that lies within `moved` world units of `mean`.
//
// Let it be seen at (X', Y', Z') rather than (X, Y, Z). It is drawn only if Z' >= near, so that Z' >= Z* =
// max(Z - moved, near). Its u' = X'/Z' differs from u = X/Z by ((X' - X) - u (Z' - Z)) / Z', that is by at most
// moved sqrt(1 + u^2) / Z*; its extents are at most those of depth Z* and of the largest clamped |u| in that range, and
// so is its square: the largest eigenvalue grows with the size of each number of the covariance.
template <typename T>
NSMG_HD bool may_touch_moving(const Camera<T>& camera, const Vec3<T>& mean, T moved, T largest_scale, T cutoff2,
                              T eps2d) {
  const Vec3<T> seen = to_camera(camera, mean);
  const Vec3<T>& row = camera.rotation.r2;
  // The depth's own rounding error, as in may_touch.
  const T slack = moved + T(1e-6) * (std::abs(row.x * mean.x) + std::abs(row.y * mean.y) + std::abs(row.z * mean.z) +
                                     std::abs(camera.translation.z));
  const T inverse_depth = T(1) / seen.z, inverse_least = T(1) / larger(seen.z - moved, camera.near_plane);
  const T u = seen.x * inverse_depth, v = seen.y * inverse_depth;
  const T moved_u = moved * std::sqrt(1 + u * u) * inverse_least;
  const T moved_v = moved * std::sqrt(1 + v * v) * inverse_least;
  const T clamped_u = std::abs(smaller(larger(u, camera.left), camera.right)) + moved_u;
  const T clamped_v = std::abs(smaller(larger(v, camera.top), camera.bottom)) + moved_v;
  const T jx = largest_scale * camera.fx * inverse_least, jy = largest_scale * camera.fy * inverse_least;
  const T variance_x = jx * jx * (1 + clamped_u * clamped_u) + eps2d;
  const T variance_y = jy * jy * (1 + clamped_v * clamped_v) + eps2d;
  const T square = three_sigma(variance_x, jx * jy * clamped_u * clamped_v, variance_y);
  const T radius_x = larger(std::sqrt(larger(cutoff2, T(0)) * variance_x), square);
  const T radius_y = larger(std::sqrt(larger(cutoff2, T(0)) * variance_y), square);
  const T rx = outward(radius_x + camera.fx * moved_u, bound_margin<T>());
  const T ry = outward(radius_y + camera.fy * moved_v, bound_margin<T>());
  const bool touches = overlaps(camera.fx * u + camera.cx, camera.fy * v + camera.cy, rx, ry, T(0), T(0), camera.width,
                                camera.height);
  // Before the near plane u and v say little: whatever may come out of there is kept.
  return (cutoff2 >= T(0)) & (seen.z >= camera.near_plane - slack) & (seen.z <= camera.far_plane + slack) &
         ((seen.z < camera.near_plane) | touches);
}

}  // namespace nsmg
