// One 3D convex seen by one camera, with its gradient: Held et al. 2024, "3D Convex Splatting", sections 3.1 to
// 3.3. See cuda_ext/ops/raster/convexes.py.
//
// With a lens, its pinhole camera is that which sees the centre's surroundings as the lens does (LocalPinhole, lens.h).
// Corners are projected relative to the projected centre: there nothing cancels. Of each corner, the line of the hull's
// edge that starts there is kept in its place, so that no loop has an index that depends on the hull.
#pragma once

#include "common/alpha.h"
#include "common/projection.h"

namespace nsmg {

constexpr int kCorners = 6;  // of a convex, and so the most edges of its hull

// Alpha is below the opacity everywhere: a convex of less opacity than this is not drawn.
template <typename T>
inline constexpr T kConvexOpaque = T(1.001 / 255.0);

// Of a row's own half extents, relative: bounds by two lines that are almost parallel have lost digits.
template <typename T>
inline constexpr T kConvexMargin = T(2e-3);

// The sine of the angle between two lines below which they bound nothing together.
template <typename T>
inline constexpr T kFlat = T(1e-4);

// Twice a hull's area in units of the sum of its edges' squares, below which there is none: rounding makes such.
template <typename T>
inline constexpr T kThin = T(1e-5);

template <typename T>
struct Vec2 {
  T x, y;
};

template <typename T>
struct Convex {
  Vec3<T> mean;
  Vec3<T> corners[kCorners];  // from the mean, in the world
  T delta, sigma, opacity;
};

// L: of the camera, see local_pinhole.
template <typename T, typename L>
struct ConvexFrame {
  Vec3<T> mean;            // in camera space
  L local;
  Vec3<T> seen;            // the mean as `local` maps it
  Vec3<T> arms[kCorners];  // the corners from there
  Vec2<T> apart[kCorners];  // the corners in pixels, from the projected mean
  T slope_x, slope_y;
  T pixel;                 // the size of a pixel at the mean's depth, world units
  int ends[kCorners];      // the corner at which the edge ends that starts at this one; -1 where none does
  int edges;
  bool regular;            // in the depth range, all corners before the near plane, and with a hull
};

// Whether the third of three corners on one line lies between the first two.
template <typename T>
NSMG_HD bool between(const Vec2<T>& start, const Vec2<T>& end, const Vec2<T>& third) {
  const T ex = end.x - start.x, ey = end.y - start.y;
  return ((third.x - start.x) * ex + (third.y - start.y) * ey >= T(0)) &
         ((third.x - end.x) * -ex + (third.y - end.y) * -ey >= T(0));
}

// Of each corner the end of the hull's edge that starts there: all others are on the side where the cross product is
// positive. Of corners at one place the first counts, of corners on one line the outermost two. Returns their number.
template <typename T>
NSMG_HD int hull_ends(const Vec2<T> (&p)[kCorners], int (&ends)[kCorners]) {
  bool twin[kCorners] = {};
  bool edge[kCorners][kCorners];
#pragma unroll
  for (int i = 0; i < kCorners; ++i) {
#pragma unroll
    for (int j = 0; j < kCorners; ++j) {
      edge[i][j] = i != j;
      if (j > i) twin[j] |= (p[i].x == p[j].x) & (p[i].y == p[j].y);
    }
  }
#pragma unroll
  for (int a = 0; a < kCorners; ++a) {
#pragma unroll
    for (int b = a + 1; b < kCorners; ++b) {
#pragma unroll
      for (int c = b + 1; c < kCorners; ++c) {
        // One sign for the triple, whichever edge asks: so no two corners contradict each other.
        const T turn = (p[b].x - p[a].x) * (p[c].y - p[a].y) - (p[b].y - p[a].y) * (p[c].x - p[a].x);
        const bool skip = twin[a] | twin[b] | twin[c];
        const bool left = skip | (turn > T(0)), right = skip | (turn < T(0)), level = turn == T(0);
        edge[a][b] &= left | (level & between(p[a], p[b], p[c]));
        edge[b][c] &= left | (level & between(p[b], p[c], p[a]));
        edge[c][a] &= left | (level & between(p[c], p[a], p[b]));
        edge[b][a] &= right | (level & between(p[b], p[a], p[c]));
        edge[c][b] &= right | (level & between(p[c], p[b], p[a]));
        edge[a][c] &= right | (level & between(p[a], p[c], p[b]));
      }
    }
  }
  int count = 0;
#pragma unroll
  for (int i = 0; i < kCorners; ++i) {
    ends[i] = -1;
#pragma unroll
    for (int j = kCorners - 1; j >= 0; --j) {
      if (edge[i][j] & !twin[i] & !twin[j]) ends[i] = j;
    }
    count += ends[i] >= 0;
  }
  return count;
}

// A vector of the world in camera space.
template <typename T>
NSMG_HD Vec3<T> turned(const Camera<T>& camera, const Vec3<T>& v) {
  return {dot(camera.rotation.r0, v), dot(camera.rotation.r1, v), dot(camera.rotation.r2, v)};
}

template <template <typename> class C, typename T>
NSMG_HD auto convex_frame(const C<T>& camera, const Convex<T>& point) {
  const Vec3<T> mean = to_camera(camera, point.mean);
  ConvexFrame<T, decltype(local_pinhole(camera, mean))> f;
  f.mean = mean;
  f.local = local_pinhole(camera, mean);
  f.seen = f.local.centre(mean);
  const T z = f.seen.z;
  f.regular = (z >= camera.near_plane) & (z <= camera.far_plane) & f.local.inside();
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    f.arms[k] = f.local.image(turned(camera, point.corners[k]));
    f.regular &= z + f.arms[k].z >= camera.near_plane;
    f.ends[k] = -1;
  }
  f.edges = 0;
  if (!f.regular) return f;
  f.slope_x = f.seen.x / z;
  f.slope_y = f.seen.y / z;
  f.pixel = z / std::sqrt(camera.fx * camera.fy);
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    const T inverse = T(1) / (z + f.arms[k].z);
    f.apart[k] = {camera.fx * (f.arms[k].x - f.slope_x * f.arms[k].z) * inverse,
                  camera.fy * (f.arms[k].y - f.slope_y * f.arms[k].z) * inverse};
  }
  f.edges = hull_ends(f.apart, f.ends);
  f.regular = f.edges >= 3;
  return f;
}

// Corner `index` of some, without an address: an index into registers would send them to memory.
template <typename T>
NSMG_HD Vec2<T> pick(const Vec2<T> (&places)[kCorners], int index) {
  Vec2<T> found = places[0];
#pragma unroll
  for (int k = 1; k < kCorners; ++k) {
    found.x = index == k ? places[k].x : found.x;
    found.y = index == k ? places[k].y : found.y;
  }
  return found;
}

template <typename T>
struct ConvexRow {
  T x, y;
  Vec3<T> lines[kCorners];  // (a_x, a_y, b), zeros where no edge starts
  T sharpness, depth, opacity;
  T rx, ry;    // radii, whole numbers
  bool alive;  // whether it is drawn anywhere in its view; if not, nothing means anything
};

// How far from the centre a place can be at which no line is above `level`, by axis; `rx` and `ry` come in as the most.
template <typename T>
NSMG_HD void convex_extent(const Vec3<T> (&lines)[kCorners], T level, T& rx, T& ry) {
  T right = rx, left = rx, below = ry, above = ry;
#pragma unroll
  for (int i = 0; i < kCorners; ++i) {
#pragma unroll
    for (int j = i + 1; j < kCorners; ++j) {
      const Vec3<T> &a = lines[i], &b = lines[j];
      const T det = a.x * b.y - a.y * b.x;
      const T lengths = std::sqrt((a.x * a.x + a.y * a.y) * (b.x * b.x + b.y * b.y));
      if (!(std::abs(det) > kFlat<T> * lengths)) continue;
      // A direction between two normals is s a + t b with s, t >= 0: so far can a place be (the dual of a linear program).
      const T inverse = T(1) / det, sa = level - a.z, sb = level - b.z;
      const T ax = b.y * inverse, bx = -a.y * inverse, ay = -b.x * inverse, by = a.x * inverse;
      const T x = ax * sa + bx * sb, y = ay * sa + by * sb;
      if ((ax >= T(0)) & (bx >= T(0))) right = smaller(right, x);
      if ((ax <= T(0)) & (bx <= T(0))) left = smaller(left, -x);
      if ((ay >= T(0)) & (by >= T(0))) below = smaller(below, y);
      if ((ay <= T(0)) & (by <= T(0))) above = smaller(above, -y);
    }
  }
  rx = larger(right, left);
  ry = larger(below, above);
}

template <template <typename> class C, typename T>
NSMG_HD ConvexRow<T> project_convex(const C<T>& camera, const Convex<T>& point) {
  const auto f = convex_frame(camera, point);
  ConvexRow<T> row = {};
  if (!f.regular) return row;
  row.x = camera.fx * f.slope_x + camera.cx;
  row.y = camera.fy * f.slope_y + camera.cy;
  row.depth = f.seen.z;
  row.opacity = point.opacity;
  row.sharpness = f.pixel * point.sigma;
  const T scale = f.pixel * point.delta, most = max_radius<T>();
  bool sound = (std::abs(row.x) <= most) & (std::abs(row.y) <= most) & (row.sharpness > T(0)) &
               (row.sharpness - row.sharpness == T(0)) & (row.opacity >= kConvexOpaque<T>);
  T area = T(0), squares = T(0);
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    if (f.ends[k] < 0) continue;
    const Vec2<T> start = f.apart[k], end = pick(f.apart, f.ends[k]);
    const T ax = scale * (end.y - start.y), ay = -scale * (end.x - start.x);
    row.lines[k] = {ax, ay, -(ax * start.x + ay * start.y)};
    const T size = ax + ay + row.lines[k].z;
    sound &= size - size == T(0);  // neither infinite nor NaN
    area -= scale * row.lines[k].z;
    squares += ax * ax + ay * ay;
  }
  if (!(sound & (area > kThin<T> * squares))) return {};
  T rx = larger(std::abs(row.x), std::abs(camera.width - row.x)) + T(1);
  T ry = larger(std::abs(row.y), std::abs(camera.height - row.y)) + T(1);
  convex_extent(row.lines, std::log(T(255) * row.opacity - T(1)) / row.sharpness, rx, ry);
  row.rx = larger(outward(rx, kConvexMargin<T>), T(0));
  row.ry = larger(outward(ry, kConvexMargin<T>), T(0));
  row.alive = (row.rx > T(0)) & (row.ry > T(0)) &
              overlaps(row.x, row.y, row.rx, row.ry, T(0), T(0), camera.width, camera.height);
  if (!row.alive) return {};
  return row;
}

// The gradients of a row's outputs.
template <typename T>
struct ConvexRowGradient {
  T x, y;
  Vec3<T> lines[kCorners];
  T sharpness, depth, opacity;
};

template <typename T>
struct ConvexGradient {
  Vec3<T> mean;
  Vec3<T> corners[kCorners];
  T delta, sigma, opacity;
  Mat3<T> rotation;  // of the camera
  Vec3<T> translation;
};

// Of a row that is alive.
template <template <typename> class C, typename T>
NSMG_HD ConvexGradient<T> convex_vjp(const C<T>& camera, const Convex<T>& point, const ConvexRowGradient<T>& g) {
  const auto f = convex_frame(camera, point);
  const T scale = f.pixel * point.delta;
  Vec2<T> v_apart[kCorners] = {};
  T v_scale = T(0);
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    if (f.ends[k] < 0) continue;
    // a = scale (e_y, -e_x) with e from start to end; b = -a start.
    const Vec2<T> start = f.apart[k], end = pick(f.apart, f.ends[k]);
    const T ex = end.x - start.x, ey = end.y - start.y, v_b = g.lines[k].z;
    const T v_ax = g.lines[k].x - v_b * start.x, v_ay = g.lines[k].y - v_b * start.y;
    v_scale += v_ax * ey - v_ay * ex;
    const T v_ex = -scale * v_ay, v_ey = scale * v_ax;
    v_apart[k].x -= v_b * scale * ey + v_ex;
    v_apart[k].y += v_b * scale * ex - v_ey;
#pragma unroll
    for (int other = 0; other < kCorners; ++other) {
      v_apart[other].x += f.ends[k] == other ? v_ex : T(0);
      v_apart[other].y += f.ends[k] == other ? v_ey : T(0);
    }
  }
  ConvexGradient<T> out;
  out.delta = v_scale * f.pixel;
  out.sigma = g.sharpness * f.pixel;
  out.opacity = g.opacity;
  const T z = f.seen.z, inverse_z = T(1) / z;
  T v_slope_x = camera.fx * g.x, v_slope_y = camera.fy * g.y;
  T v_z = g.depth + (v_scale * point.delta + g.sharpness * point.sigma) * f.pixel * inverse_z;
  out.rotation = {};
  Mat3<T> v_local = {};
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    const T inverse = T(1) / (z + f.arms[k].z);
    const T v_x = v_apart[k].x * camera.fx * inverse, v_y = v_apart[k].y * camera.fy * inverse;
    const T v_depth = -(v_apart[k].x * f.apart[k].x + v_apart[k].y * f.apart[k].y) * inverse;
    v_slope_x -= f.arms[k].z * v_x;
    v_slope_y -= f.arms[k].z * v_y;
    v_z += v_depth;
    const Vec3<T> v_image = {v_x, v_y, v_depth - f.slope_x * v_x - f.slope_y * v_y};
    v_local = v_local + outer(v_image, turned(camera, point.corners[k]));
    const Vec3<T> v_arm = f.local.image_vjp(v_image);
    out.corners[k] = v_arm * camera.rotation;
    out.rotation = out.rotation + outer(v_arm, point.corners[k]);
  }
  const Vec3<T> v_at = {v_slope_x * inverse_z, v_slope_y * inverse_z,
                        v_z - (f.slope_x * v_slope_x + f.slope_y * v_slope_y) * inverse_z};
  // Where the mean is, `local` is the lens to first order: its own change adds nothing to that of `seen`.
  const Vec3<T> v_seen = f.local.image_vjp(v_at) + f.local.vjp(camera, f.mean, v_local);
  out.mean = v_seen * camera.rotation;
  out.rotation = out.rotation + outer(v_seen, point.mean);
  out.translation = v_seen;
  return out;
}

}  // namespace nsmg
