// One surfel at one pixel, forward and backward, for the CPU and CUDA twins alike. The rule of compositing is in
// alpha.h and compositing.h; what is summed, in cuda_ext/ops/raster/surfels.py; what a kind of splat must have, in
// cuda/raster/primitive_traits.h.
#pragma once

#include "common/columns.h"
#include "common/compositing.h"
#include "common/surfel.h"

namespace nsmg {

// A packed row.
template <typename T>
struct SurfelSplat {
  Vec3<T> u, v, w;
  T x, y, opacity, depth;
  Vec3<T> normal, color;
  T cutoff2;  // an upper bound of the squared distance, in standard deviations, where alpha is 1/255; or negative
};

struct SurfelTraits {
  static constexpr const char* kName = "surfels";
  using PointColumns = Columns<3, 4, 2, 1>;         // means, quats, scales, opacities
  using ProjectedColumns = Columns<2, 9, 3, 1, 1>;  // means2d, transforms, normals, depths, opacities
  using RowColumns = Columns<2, 9, 3, 1, 3, 1>;     // means2d, transforms, normals, opacities, colors, depths
  static constexpr int kExtra = 6;       // numbers of a pixel besides its colour: depth, normal (3), distortion, median
  static constexpr int kSums = 3 + kExtra;
  static constexpr int kGradients = 19;  // sums over pixels: those of a row's numbers
  static constexpr int kForwardBlocks = 6, kBackwardBlocks = 4;  // of 128 threads on a multiprocessor

  template <typename T>
  using Point = Surfel<T>;
  template <typename T>
  using Row = SurfelRow<T>;
  template <typename T>
  using RowGradient = SurfelRowGradient<T>;
  template <typename T>
  using Splat = SurfelSplat<T>;

  template <template <typename> class C, typename T>
  NSMG_HD static SurfelRow<T> project(const C<T>& camera, const Surfel<T>& point) {
    return project_surfel(camera, point);
  }
  template <template <typename> class C, typename T>
  NSMG_HD static SurfelGradient<T> project_vjp(const C<T>& camera, const Surfel<T>& point,
                                               const SurfelRowGradient<T>& g) {
    return surfel_vjp(camera, point, g);
  }

  template <typename T>
  NSMG_HD static SurfelSplat<T> pack(const T (&row)[RowColumns::kNumbers]) {
    SurfelSplat<T> s;
    s.x = row[0];
    s.y = row[1];
    s.u = {row[2], row[3], row[4]};
    s.v = {row[5], row[6], row[7]};
    s.w = {row[8], row[9], row[10]};
    s.normal = {row[11], row[12], row[13]};
    s.opacity = row[14];
    s.color = {row[15], row[16], row[17]};
    s.depth = row[18];
    const bool seen = s.opacity >= kAlphaMin<T>;
    s.cutoff2 = seen ? T(2.002) * std::log(T(255) * s.opacity) + T(1e-3) : T(-1);
    return s;
  }

  // Whether a splat may count at a pixel centre of the box: the image of its disc is an ellipse, and the low-pass
  // filter on the screen is a circle.
  NSMG_HD static bool overlaps(const SurfelSplat<float>& s, float x_lo, float x_hi, float y_lo, float y_hi) {
    constexpr float kSlack = 0.05f;  // pixels, for the rounding of what follows
    const float left = x_lo - s.x - kSlack, right = x_hi - s.x + kSlack;
    const float top = y_lo - s.y - kSlack, bottom = y_hi - s.y + kSlack;
    const float near_x = between(0.0f, left, right), near_y = between(0.0f, top, bottom);
    const bool filter = 2.0f * (near_x * near_x + near_y * near_y) <= s.cutoff2;
    // The ellipse's centre and second moments, from the splat's centre: of points u'/w, v'/w with |(s, t)|^2 <= reach2.
    const Vec3<float> u = s.u - s.x * s.w, v = s.v - s.y * s.w;
    const Vec3<float> metric = {s.cutoff2, s.cutoff2, -1.0f};
    const Vec3<float> mw = times(metric, s.w);
    const float below = dot(s.w, mw), inverse = reciprocal_fast(below);
    const float x = dot(u, mw) * inverse, y = dot(v, mw) * inverse;
    const float xx = x * x - dot(u, times(metric, u)) * inverse, yy = y * y - dot(v, times(metric, v)) * inverse;
    const float xy = x * y - dot(u, times(metric, v)) * inverse;
    const float det = xx * yy - xy * xy, scale = reciprocal_fast(det);
    const ScaledSplat ellipse = {x, y, yy * scale, -2.0f * xy * scale, xx * scale, 0.0f, float_bits(1.0f) + 1u};
    const bool bounded = (below < -1e-4f * s.w.z * s.w.z) & (xx > 0.0f) & (yy > 0.0f) & (det > 1e-5f * xx * yy);
    return (s.cutoff2 >= 0.0f) & (filter | !bounded | overlaps_box(ellipse, left, right, top, bottom));
  }

  // A splat from a pixel. `may`: whether it can count; only then find_alpha() finds whether it does.
  template <typename T>
  struct Sight {
    T px, py, dx, dy;  // (dx, dy): the splat's centre on the screen minus the pixel
    Vec3<T> h_u, h_v, intersection;
    T screen;          // twice the squared distance there
    bool may;
    T s, t, inverse;   // the place in standard deviations; 1 / the third number of the planes' crossing
    T raw;             // alpha before its cap, 0 where the splat does not count
    bool on_plane;     // whether the splat counts, and the crossing decides, not the filter on the screen
  };

  template <typename T>
  NSMG_HD static Vec3<T> through(T pixel, const Vec3<T>& w, const Vec3<T>& row) {
    return {multiply_add(pixel, w.x, -row.x), multiply_add(pixel, w.y, -row.y), multiply_add(pixel, w.z, -row.z)};
  }

  template <typename T>
  NSMG_HD static Sight<T> look(const SurfelSplat<T>& splat, T px, T py) {
    Sight<T> m;
    m.px = px;
    m.py = py;
    m.dx = splat.x - px;
    m.dy = splat.y - py;
    // Each product that is added is a multiply_add's, here and below: whichever of a thread's pixels this is, the same
    // bits come out.
    m.screen = T(2) * multiply_add(m.dx, m.dx, m.dy * m.dy);
    m.h_u = through(px, splat.w, splat.u);
    m.h_v = through(py, splat.w, splat.v);
    m.intersection = {multiply_add(m.h_u.y, m.h_v.z, -(m.h_u.z * m.h_v.y)),
                  multiply_add(m.h_u.z, m.h_v.x, -(m.h_u.x * m.h_v.z)),
                  multiply_add(m.h_u.x, m.h_v.y, -(m.h_u.y * m.h_v.x))};
    const Vec3<T>& c = m.intersection;
    m.may = (c.z != T(0)) & ((m.screen <= splat.cutoff2) | (c.x * c.x + c.y * c.y <= splat.cutoff2 * (c.z * c.z)));
    return m;
  }

  template <typename T>
  NSMG_HD static void find_alpha(const SurfelSplat<T>& splat, Sight<T>& m) {
    m.inverse = reciprocal_fast(m.intersection.z != T(0) ? m.intersection.z : T(1));
    m.s = m.intersection.x * m.inverse;
    m.t = m.intersection.y * m.inverse;
    const bool ahead = multiply_add(m.s, splat.w.x, multiply_add(m.t, splat.w.y, splat.w.z)) > T(0);
    const T plane = multiply_add(m.s, m.s, m.t * m.t);
    const bool nearer = ahead & (plane <= m.screen);
    const T raw = splat.opacity * exp2_fast(T(-0.5) * kLog2EOf<T> * (nearer ? plane : m.screen));
    const bool counts = m.may & (raw >= kAlphaMin<T>);
    m.raw = counts ? raw : T(0);
    m.on_plane = nearer & counts;
  }

  // Returns whether the splat was blended.
  template <typename T>
  NSMG_HD static bool blend(const SurfelSplat<T>& s, const Sight<T>& m, T& transmittance, T (&sums)[kSums]) {
    const T before = transmittance, weight = blend_weight(m.raw, transmittance);
    sums[0] = multiply_add(weight, s.color.x, sums[0]);
    sums[1] = multiply_add(weight, s.color.y, sums[1]);
    sums[2] = multiply_add(weight, s.color.z, sums[2]);
    sums[7] = multiply_add(T(2) * weight, multiply_add(s.depth, T(1) - before, -sums[3]), sums[7]);
    sums[3] = multiply_add(weight, s.depth, sums[3]);
    sums[4] = multiply_add(weight, s.normal.x, sums[4]);
    sums[5] = multiply_add(weight, s.normal.y, sums[5]);
    sums[6] = multiply_add(weight, s.normal.z, sums[6]);
    sums[8] = (weight > T(0)) & (before > T(0.5)) ? s.depth : sums[8];
    return weight > T(0);
  }

  // A pixel on the way back, front to back.
  template <typename T>
  struct Walk {
    T v[kSums], v_alpha;  // v_alpha: by what is covered
    T transmittance;      // before the next splat
    T remainder;          // of the splats not passed yet: sum of weight times d loss / d weight
    T depth;              // of the splats that were passed
    T total_weight, total_depth;
  };

  // `total`: the pixel's sums; `before`: those of the splats that were passed; `covered`: alpha of any sign.
  template <typename T>
  NSMG_HD static Walk<T> begin(const T (&total)[kSums], const T (&v)[kSums], T covered, T v_alpha, T transmittance,
                               const T (&before)[kSums]) {
    Walk<T> walk;
    walk.v_alpha = v_alpha;
    walk.transmittance = transmittance;
    walk.depth = before[3];
    walk.total_weight = std::abs(covered);
    walk.total_depth = total[3];
    const T weight = T(1) - transmittance;
    walk.remainder = v_alpha * (walk.total_weight - weight);
#pragma unroll
    for (int d = 0; d < kSums; ++d) {
      walk.v[d] = v[d];
      if (d != 7 && d != 8) walk.remainder = multiply_add(v[d], total[d] - before[d], walk.remainder);
    }
    // The distortion is a form of second degree in the weights: they times its derivatives sum up to twice itself. Of
    // that, splats that were passed have twice the distortion among them, and that between them and the others.
    const T across = weight * (walk.total_depth - walk.depth) - walk.depth * (walk.total_weight - weight);
    walk.remainder += T(2) * v[7] * (total[7] - before[7] - across);
    return walk;
  }

  // Passes a splat, and adds to its sums; raw is 0 where it was not blended. `final`: whether it was the pixel's last.
  template <typename T>
  NSMG_HD static void pass(const SurfelSplat<T>& s, const Sight<T>& m, bool final, Walk<T>& walk,
                           T (&g)[kGradients]) {
    const T before = walk.transmittance, weight_before = T(1) - before, weight = capped(m.raw) * before;
    const T behind = walk.total_weight - weight_before - weight;  // weights of what lies behind
    const T deep_behind = walk.total_depth - walk.depth - weight * s.depth;
    const T spread = T(2) * (s.depth * (weight_before - behind) - walk.depth + deep_behind);
    const Vec3<T> v_color = {walk.v[0], walk.v[1], walk.v[2]}, v_normal = {walk.v[4], walk.v[5], walk.v[6]};
    const T value = walk.v_alpha + dot(v_color, s.color) + walk.v[3] * s.depth + dot(v_normal, s.normal) +
                    walk.v[7] * spread;
    const WalkStep<T> step = step_backward(m.raw, value, walk.transmittance, walk.remainder);
    const bool halfway = (weight > T(0)) & (before > T(0.5)) & ((walk.transmittance <= T(0.5)) | final);
    g[18] += weight * (walk.v[3] + T(2) * walk.v[7] * (weight_before - behind)) + (halfway ? walk.v[8] : T(0));
    g[11] = multiply_add(weight, v_normal.x, g[11]);
    g[12] = multiply_add(weight, v_normal.y, g[12]);
    g[13] = multiply_add(weight, v_normal.z, g[13]);
    g[14] -= step.v_sigma;
    g[15] = multiply_add(weight, v_color.x, g[15]);
    g[16] = multiply_add(weight, v_color.y, g[16]);
    g[17] = multiply_add(weight, v_color.z, g[17]);
    walk.depth = multiply_add(weight, s.depth, walk.depth);
    const T on_screen = m.on_plane ? T(0) : T(2) * step.v_sigma;
    g[0] = multiply_add(on_screen, m.dx, g[0]);
    g[1] = multiply_add(on_screen, m.dy, g[1]);
    const T v_s = m.on_plane ? step.v_sigma * m.inverse * m.s : T(0);
    const T v_t = m.on_plane ? step.v_sigma * m.inverse * m.t : T(0);
    const Vec3<T> v_intersection = {v_s, v_t, m.on_plane ? -(v_s * m.s + v_t * m.t) : T(0)};
    const Vec3<T> v_hu = cross(m.h_v, v_intersection), v_hv = cross(v_intersection, m.h_u);
    g[2] -= v_hu.x;
    g[3] -= v_hu.y;
    g[4] -= v_hu.z;
    g[5] -= v_hv.x;
    g[6] -= v_hv.y;
    g[7] -= v_hv.z;
    g[8] += m.px * v_hu.x + m.py * v_hv.x;
    g[9] += m.px * v_hu.y + m.py * v_hv.y;
    g[10] += m.px * v_hu.z + m.py * v_hv.z;
  }

  // A row's gradients, in the order of its numbers, from the sums.
  template <typename T>
  NSMG_HD static void gradients(const SurfelSplat<T>& s, const T (&sums)[kGradients], T (&g)[RowColumns::kNumbers]) {
#pragma unroll
    for (int c = 0; c < kGradients; ++c) g[c] = sums[c];
    g[14] = s.opacity > T(0) ? sums[14] / s.opacity : T(0);
  }
};

}  // namespace nsmg
