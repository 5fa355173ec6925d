// Culling of whole groups of points: the box around a group's means, and its largest scale.
//
// may_show keeps a box wherever may_touch, or may_touch_moving, would keep a point of it, in whatever way these round:
// rows are the same with boxes and without. It says so from half spaces, for the test of a point as it is computed, not
// for the splat.
//
// A point is kept only if its depth Z, as computed, lies within the depth range and a rounding error, and if the
// rectangle around its mean overlaps the image. On the left that is fx X/Z + cx + rx > 0, or, where Z > 0,
//     fx X + (cx + rx) Z > 0.
// rx is no larger than 1.001 e + 1.01 pixels. Without motion e is the larger of Q sqrt(variance) and of three_sigma,
// with Q = sqrt(2 ln 255) > 3. Let s be the largest scale, F the longer focal length and S the root of 1 + u^2 + v^2
// for the largest clamped u and v. The covariance's largest eigenvalue is at most (F s S / Z)^2 + eps2d, and
// three_sigma takes 0.1 more for it. So e <= Q (F s S / Z + sqrt(eps2d + 0.1)), and the left side is linear in X and Z:
//     fx X + (cx + P) Z + 1.001 Q F s S > 0,  P = 1.001 Q sqrt(eps2d + 0.1) + 1.01.
// That is a half space. A box of which no corner lies in it holds no point that is kept.
//
// A point that may have moved by m divides by Z* = max(Z - m, near) instead of Z, and adds fx m sqrt(1 + u^2) / Z*.
// Over a box Z / Z* has a largest value k, |u| a largest value U and Z* a smallest one, which make constants of both.
#pragma once

#include "common/projection.h"

namespace nsmg {

// Points of a group: the warp of the update, which has a box to itself, and a word of the culling's bits.
constexpr int kBoxPoints = 32;
// Numbers of a box in memory: lower x, y, z, upper x, y, z, the largest logarithm of a scale, and 0.
constexpr int kBoxFloats = 8;

template <typename T>
struct Box {
  Vec3<T> lower, upper;
  T log_scale;
};

// Bounds on a point's motion and growth since it was stored: both 0 without deferred steps.
template <typename T>
struct Motion {
  T moved;  // world units, in any direction
  T grown;  // of the logarithm of a scale
};

template <typename T>
NSMG_HD Box<T> load_box(const T* at) {
  return {{at[0], at[1], at[2]}, {at[3], at[4], at[5]}, at[6]};
}

template <typename T>
NSMG_HD Vec3<T> magnitude(const Vec3<T>& a) {
  return {std::abs(a.x), std::abs(a.y), std::abs(a.z)};
}

// A bound on rounding, relative to the sum of the sizes of all terms: of this test and of the point's together about 25
// units in the last place of float32.
template <typename T>
NSMG_HD constexpr T box_error() {
  return T(4e-6);
}

// Whether any point in the box may be kept for the whole view: by may_touch_moving if `Moving`, else by may_touch.
// Every comparison says "outside": a box with a NaN or an infinity is kept, and so is one in which a point that may be
// anywhere was put. A box of no points, whose lower corner lies above the upper one, shows nowhere.
template <bool Moving, typename T>
NSMG_HD bool may_show(const Camera<T>& camera, const Box<T>& box, const Motion<T>& motion, T eps2d) {
  if ((box.lower.x > box.upper.x) | (box.lower.y > box.upper.y) | (box.lower.z > box.upper.z)) return false;
  const Vec3<T> centre = T(0.5) * box.lower + T(0.5) * box.upper, half = T(0.5) * box.upper - T(0.5) * box.lower;
  const Vec3<T> farthest = magnitude(centre) + half;
  const Mat3<T>& R = camera.rotation;
  const Vec3<T>& t = camera.translation;
  const T size_x = dot(magnitude(R.r0), farthest) + std::abs(t.x);
  const T size_y = dot(magnitude(R.r1), farthest) + std::abs(t.y);
  const T size_z = dot(magnitude(R.r2), farthest) + std::abs(t.z);
  const Vec3<T> middle = to_camera(camera, centre);

  const T error_z = box_error<T>() * size_z;
  const T deep = dot(magnitude(R.r2), half) + error_z;
  const T slack = motion.moved + error_z;
  if ((middle.z + deep < camera.near_plane - slack) | (middle.z - deep > camera.far_plane + slack)) return false;
  // Of the points that pass the test of depth, the least depth. Before the near plane points that may move are kept
  // wherever they are; and behind the camera, where rounding lets points pass, half spaces are turned around.
  const T least = Moving ? middle.z - deep : larger(middle.z - deep, camera.near_plane - slack);
  if (!(least > T(0)) | (Moving & !(least >= camera.near_plane))) return true;

  constexpr T kMargin = T(1.002), kPixel = T(1.02), kCutoff = T(3.3291);
  const T pixels = kMargin * kCutoff * std::sqrt(eps2d + T(0.1)) + kPixel;
  T largest = std::exp(box.log_scale + motion.grown);
  T u = larger(std::abs(camera.left), std::abs(camera.right));
  T v = larger(std::abs(camera.top), std::abs(camera.bottom));
  T moved_u = T(0), moved_v = T(0);  // in pixels times depth over the focal length
  if constexpr (Moving) {
    const T inverse_least = T(1) / least;
    const T across = dot(magnitude(R.r0), half) + box_error<T>() * size_x + std::abs(middle.x);
    const T along = dot(magnitude(R.r1), half) + box_error<T>() * size_y + std::abs(middle.y);
    const T slope_u = std::sqrt(1 + square(across * inverse_least));
    const T slope_v = std::sqrt(1 + square(along * inverse_least));
    const T nearest = T(1) / larger(least - motion.moved, camera.near_plane);
    // Z / max(Z - m, near) rises up to Z = near + m, and falls from there on.
    const T ratio = larger(least, camera.near_plane + motion.moved) * nearest;
    u += motion.moved * slope_u * nearest;
    v += motion.moved * slope_v * nearest;
    moved_u = kMargin * ratio * motion.moved * slope_u;
    moved_v = kMargin * ratio * motion.moved * slope_v;
    largest *= ratio;
  }
  const T fx = std::abs(camera.fx), fy = std::abs(camera.fy);
  const T spread = kMargin * kCutoff * larger(fx, fy) * largest * std::sqrt(1 + u * u + v * v);
  const T radius_x = spread + fx * moved_u +
                    box_error<T>() * (fx * size_x + (std::abs(camera.cx) + camera.width + pixels) * size_z);
  const T radius_y = spread + fy * moved_v +
                    box_error<T>() * (fy * size_y + (std::abs(camera.cy) + camera.height + pixels) * size_z);
  // The most that f times the coordinate in `row`, plus w times the depth, is in the box.
  const auto most = [&](const Vec3<T>& row, T at, T f, T w) {
    const Vec3<T> normal = f * row + w * R.r2;
    return f * at + w * t.z + dot(normal, centre) + dot(magnitude(normal), half);
  };
  const bool left = most(R.r0, t.x, camera.fx, camera.cx + pixels) + radius_x < T(0);
  const bool right = most(R.r0, t.x, -camera.fx, camera.width - camera.cx + pixels) + radius_x < T(0);
  const bool above = most(R.r1, t.y, camera.fy, camera.cy + pixels) + radius_y < T(0);
  const bool below = most(R.r1, t.y, -camera.fy, camera.height - camera.cy + pixels) + radius_y < T(0);
  return !(left | right | above | below);
}

}  // namespace nsmg
