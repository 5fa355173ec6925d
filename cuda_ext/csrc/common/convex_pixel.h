// One convex at one pixel, forward and backward, for the CPU and CUDA twins alike. The rule of compositing is in
// alpha.h and compositing.h; what a kind of splat must have is in cuda/raster/primitive_traits.h.
//
// Exponents are kept in base 2 as in compositing.h: lines are scaled by log2(e) once a row, and
// phi2 = log2 sum_k 2^(l_k) = log2(e) phi.
#pragma once

#include "common/columns.h"
#include "common/compositing.h"
#include "common/convex.h"

namespace nsmg {

// A packed row.
template <typename T>
struct ConvexSplat {
  T x, y, sharpness;
  T level;                  // an upper bound of phi2 where alpha is 1/255
  Vec3<T> lines[kCorners];  // times log2(e); (0, 0, -1e30) where there is none
  T opacity, depth;
  Vec3<T> color;
};

// Log2 of the sum of the lines' powers of two, with what its gradient needs.
template <typename T>
struct ConvexPhi {
  T parts[kCorners];  // 2^(l_k - the largest)
  T sum, value;
};

template <typename T>
NSMG_HD T largest(const T (&levels)[kCorners]) {
  T most = levels[0];
#pragma unroll
  for (int k = 1; k < kCorners; ++k) most = std::fmax(most, levels[k]);
  return most;
}

template <typename T>
NSMG_HD ConvexPhi<T> convex_phi(const T (&levels)[kCorners], T most) {
  ConvexPhi<T> phi;
  phi.sum = T(0);
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    phi.parts[k] = exp2_fast(levels[k] - most);
    phi.sum += phi.parts[k];
  }
  phi.value = most + log2_fast(phi.sum);
  return phi;
}

struct ConvexTraits {
  static constexpr const char* kName = "convexes";
  using PointColumns = Columns<3, 3 * kCorners, 1, 1, 1>;      // means, corners, deltas, sigmas, opacities
  using ProjectedColumns = Columns<2, 3 * kCorners, 1, 1, 1>;  // means2d, lines, sharpness, depths, opacities
  using RowColumns = Columns<2, 3 * kCorners, 1, 1, 3, 1>;     // means2d, lines, sharpness, opacities, colors, depths
  static constexpr int kExtra = 1;         // numbers of a pixel besides its colour: depth
  static constexpr int kSums = 3 + kExtra;
  static constexpr int kGradients = 24;    // sums over pixels: lines (18), sharpness, opacity, colour (3), depth
  static constexpr int kForwardBlocks = 6, kBackwardBlocks = 4;  // of 128 threads on a multiprocessor

  template <typename T>
  using Point = Convex<T>;
  template <typename T>
  using Row = ConvexRow<T>;
  template <typename T>
  using RowGradient = ConvexRowGradient<T>;
  template <typename T>
  using Splat = ConvexSplat<T>;

  template <template <typename> class C, typename T>
  NSMG_HD static ConvexRow<T> project(const C<T>& camera, const Convex<T>& point) {
    return project_convex(camera, point);
  }
  template <template <typename> class C, typename T>
  NSMG_HD static ConvexGradient<T> project_vjp(const C<T>& camera, const Convex<T>& point,
                                               const ConvexRowGradient<T>& g) {
    return convex_vjp(camera, point, g);
  }

  template <typename T>
  NSMG_HD static ConvexSplat<T> pack(const T (&row)[RowColumns::kNumbers]) {
    ConvexSplat<T> s;
    s.x = row[0];
    s.y = row[1];
    s.sharpness = row[20];
    s.opacity = row[21];
    s.color = {row[22], row[23], row[24]};
    s.depth = row[25];
    // opacity / (1 + 2^(sharpness phi2)) = 1/255
    const T level = std::log2(larger(T(255) * s.opacity - T(1), T(1e-30))) / s.sharpness;
    s.level = level + (T(1e-3) * std::abs(level) + T(1e-2));
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
      const T x = kLog2EOf<T> * row[2 + 3 * k], y = kLog2EOf<T> * row[3 + 3 * k], b = kLog2EOf<T> * row[4 + 3 * k];
      s.lines[k] = {x, y, (x != T(0)) | (y != T(0)) ? b : T(-1e30)};
    }
    return s;
  }

  // Whether a splat may count at a pixel centre of the box: no line's level is anywhere in it below that at one corner.
  NSMG_HD static bool overlaps(const ConvexSplat<float>& s, float x_lo, float x_hi, float y_lo, float y_hi) {
    float levels[kCorners];
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
      const Vec3<float>& line = s.lines[k];
      const float x = (line.x > 0.0f ? x_lo : x_hi) - s.x, y = (line.y > 0.0f ? y_lo : y_hi) - s.y;
      levels[k] = multiply_add(line.y, y, multiply_add(line.x, x, line.z));
    }
    return convex_phi(levels, largest(levels)).value <= s.level;
  }

  // A splat from a pixel. `may`: whether it can count; only then find_alpha() finds whether it does.
  template <typename T>
  struct Sight {
    T qx, qy, levels[kCorners], most;
    bool may;
    ConvexPhi<T> phi;
    T inside, raw;  // the indicator; alpha before its cap, 0 where the splat does not count
  };

  template <typename T>
  NSMG_HD static Sight<T> look(const ConvexSplat<T>& s, T px, T py) {
    Sight<T> m;
    m.qx = px - s.x;
    m.qy = py - s.y;
#pragma unroll
    for (int k = 0; k < kCorners; ++k)
      m.levels[k] = multiply_add(s.lines[k].y, m.qy, multiply_add(s.lines[k].x, m.qx, s.lines[k].z));
    m.most = largest(m.levels);
    m.may = m.most <= s.level;  // phi2 is at least as large
    return m;
  }

  template <typename T>
  NSMG_HD static void find_alpha(const ConvexSplat<T>& s, Sight<T>& m) {
    m.phi = convex_phi(m.levels, m.most);
    m.inside = reciprocal_fast(T(1) + exp2_fast(s.sharpness * m.phi.value));
    const T raw = s.opacity * m.inside;
    m.raw = m.may & (raw >= kAlphaMin<T>) ? raw : T(0);
  }

  // Returns whether the splat was blended.
  template <typename T>
  NSMG_HD static bool blend(const ConvexSplat<T>& s, const Sight<T>& m, T& transmittance, T (&sums)[kSums]) {
    const T weight = blend_weight(m.raw, transmittance);
    sums[0] = multiply_add(weight, s.color.x, sums[0]);
    sums[1] = multiply_add(weight, s.color.y, sums[1]);
    sums[2] = multiply_add(weight, s.color.z, sums[2]);
    sums[3] = multiply_add(weight, s.depth, sums[3]);
    return weight > T(0);
  }

  // A pixel on the way back, front to back.
  template <typename T>
  struct Walk {
    T v[kSums], v_alpha;  // v_alpha: by what is covered
    T transmittance;      // before the next splat
    T remainder;          // of the splats not passed yet: sum of weight times d loss / d weight
  };

  // `total`: the pixel's sums; `before`: those of the splats that were passed; `covered`: alpha of any sign.
  template <typename T>
  NSMG_HD static Walk<T> begin(const T (&total)[kSums], const T (&v)[kSums], T covered, T v_alpha, T transmittance,
                               const T (&before)[kSums]) {
    Walk<T> walk;
    walk.v_alpha = v_alpha;
    walk.transmittance = transmittance;
    walk.remainder = v_alpha * (transmittance - (T(1) - std::abs(covered)));
#pragma unroll
    for (int d = 0; d < kSums; ++d) {
      walk.v[d] = v[d];
      walk.remainder = multiply_add(v[d], total[d] - before[d], walk.remainder);
    }
    return walk;
  }

  // Passes a splat, and adds to its sums; raw is 0 where it was not blended.
  template <typename T>
  NSMG_HD static void pass(const ConvexSplat<T>& s, const Sight<T>& m, bool, Walk<T>& walk, T (&g)[kGradients]) {
    const T value = multiply_add(
        walk.v[3], s.depth,
        multiply_add(walk.v[2], s.color.z,
                     multiply_add(walk.v[1], s.color.y, multiply_add(walk.v[0], s.color.x, walk.v_alpha))));
    const WalkStep<T> step = step_backward(m.raw, value, walk.transmittance, walk.remainder);
    const T v_level = step.v_sigma * (T(1) - m.inside);  // by sharpness times phi
    const T v_phi = v_level * s.sharpness * reciprocal_fast(m.phi.sum);
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
      const T v_line = v_phi * m.phi.parts[k];
      g[3 * k] = multiply_add(v_line, m.qx, g[3 * k]);
      g[3 * k + 1] = multiply_add(v_line, m.qy, g[3 * k + 1]);
      g[3 * k + 2] += v_line;
    }
    g[18] = multiply_add(v_level, m.phi.value, g[18]);
    g[19] -= step.v_sigma;
#pragma unroll
    for (int d = 0; d < kSums; ++d) g[20 + d] = multiply_add(step.weight, walk.v[d], g[20 + d]);
  }

  // A row's gradients, in the order of its numbers, from the sums.
  template <typename T>
  NSMG_HD static void gradients(const ConvexSplat<T>& s, const T (&sums)[kGradients], T (&g)[RowColumns::kNumbers]) {
    g[0] = g[1] = T(0);
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
      const T v_line = sums[3 * k + 2];  // the centre moves all lines
      g[0] -= kLn2Of<T> * v_line * s.lines[k].x;
      g[1] -= kLn2Of<T> * v_line * s.lines[k].y;
      g[2 + 3 * k] = sums[3 * k];
      g[3 + 3 * k] = sums[3 * k + 1];
      g[4 + 3 * k] = v_line;
    }
    g[20] = kLn2Of<T> * sums[18];
    g[21] = s.opacity > T(0) ? sums[19] / s.opacity : T(0);
#pragma unroll
    for (int d = 0; d < kSums; ++d) g[22 + d] = sums[20 + d];
  }
};

}  // namespace nsmg
