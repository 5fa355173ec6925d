// A lane's point in the fused update: the sums of its rows' gradients, and how a warp's shared memory is laid out.
#pragma once

#include "common/activations.h"
#include "cuda/optim/splat_update_rows.h"
#include "cuda/optim/splat_update_span.h"
#include "cuda/project/splat_boxes_device.h"

namespace nsmg {

static_assert(kGroup == kBoxPoints, "a warp writes one box");

constexpr int kUpdateWarps = 4;
constexpr int kUpdateThreads = 32 * kUpdateWarps;
// Where the gradients of a warp's points lie in its shared memory, in floats.
constexpr int kMeanAt = 0, kQuatAt = 96, kScaleAt = 224, kLogitAt = 320, kDcAt = 352;
constexpr int kFirstAt = 448;  // the means' gradient for the first moment
constexpr int kRestAt = 544;

__host__ __device__ constexpr int warp_floats(int rest_floats) { return kRestAt + 32 * rest_floats; }

// The sums over a point's rows.
struct Sums {
  Vec3<float> mean = {}, scale = {}, dc = {};
  Quat<float> quat = {};
  float opacity = 0.0f;
};

// The part of a whole step that a point's mean takes: its middle scale, of `whole`.
__device__ __forceinline__ float mean_step(const Vec3<float>& scale, float whole) {
  const float middle = fmaxf(fminf(scale.x, scale.y), fminf(fmaxf(scale.x, scale.y), scale.z));
  return middle < whole ? middle / whole : 1.0f;
}

// Writes the gradients of a lane's raw parameters, but for the harmonics beyond the first, to its warp's shared memory.
__device__ __forceinline__ void put_gradients(float* shared, int lane, const Sums& sums, const Point<float>& point,
                                              const UpdateSettings& settings) {
  const float part = mean_step(point.scale, settings.whole_step_scale);
  shared[kFirstAt + 3 * lane] = part * sums.mean.x;
  shared[kFirstAt + 3 * lane + 1] = part * sums.mean.y;
  shared[kFirstAt + 3 * lane + 2] = part * sums.mean.z;
  const float slope = point.opacity * (1.0f - point.opacity);
  const Vec3<float> scale = times(sums.scale, point.scale);
  shared[kMeanAt + 3 * lane] = sums.mean.x;
  shared[kMeanAt + 3 * lane + 1] = sums.mean.y;
  shared[kMeanAt + 3 * lane + 2] = sums.mean.z;
  reinterpret_cast<float4*>(shared + kQuatAt)[lane] = make_float4(sums.quat.w, sums.quat.x, sums.quat.y, sums.quat.z);
  shared[kScaleAt + 3 * lane] = scale.x;
  shared[kScaleAt + 3 * lane + 1] = scale.y;
  shared[kScaleAt + 3 * lane + 2] = scale.z;
  shared[kLogitAt + lane] = sums.opacity * slope;
  shared[kDcAt + 3 * lane] = sums.dc.x;
  shared[kDcAt + 3 * lane + 1] = sums.dc.y;
  shared[kDcAt + 3 * lane + 2] = sums.dc.z;
}

// The derivative of a point's colour by its coefficients of degree 0, which `dc` returns.
template <int Degree, typename Dc>
__device__ __forceinline__ Vec3<float> color_slope(const UpdateSettings& settings, const Dc& dc) {
  constexpr float k0 = ShConstants<float>::k0;
  if (Degree > 0 || settings.degree != kPlainColor) return {k0, k0, k0};
  const Vec3<float> color = sigmoid(dc());
  return times(color, Vec3<float>{1.0f, 1.0f, 1.0f} - color);
}

// The slope, by a point's scales, of the ratio of the largest to the smallest where that exceeds `most`. Equal scales
// share it, as in torch.
__device__ __forceinline__ Vec3<float> needle_slope(const Vec3<float>& scale, float most) {
  const float high = fmaxf(scale.x, fmaxf(scale.y, scale.z)), low = fminf(scale.x, fminf(scale.y, scale.z));
  if (!(high > most * low)) return {};
  const auto equal = [&](float value) {
    return static_cast<float>((scale.x == value) + (scale.y == value) + (scale.z == value));
  };
  const float up = 1.0f / (low * equal(high)), down = -high / (low * low * equal(low));
  const auto slope = [&](float value) { return value == high ? up : value == low ? down : 0.0f; };
  return {slope(scale.x), slope(scale.y), slope(scale.z)};
}

// One lane's point while its rows are gone through.
template <int Degree, typename C>
struct Lane {
  const UpdateLaunch& launch;
  const ViewSetup<C>* views;
  float* rest;  // in shared memory: the point's harmonics, later their gradient
  int group, first, lane;

  // Calls f(view, row) for each row of the lane's point that is drawn, and undrawn(view, radius in pixels) for each that
  // only counts as seen. The whole warp calls it.
  template <typename F, typename G>
  __device__ __forceinline__ void for_rows(const F& f, const G& undrawn) const {
    const int groups = update_groups(launch.points);
    for (int v = 0; v < launch.views.count; ++v) {
      const int32_t* start = launch.starts + int64_t{v} * (groups + 1) + group;
      const int begin = start[0], end = start[1];
      if (begin == end) continue;
      const int row = row_of_lane(launch.rows.point_ids, begin, end, first, lane);
      const int radius = row >= 0 ? launch.rows.radii[2 * int64_t{row}] : 0;
      if (radius > 0) f(v, int64_t{row});
      if (radius < 0) undrawn(v, static_cast<float>(-radius));
      __syncwarp();
    }
  }

  template <typename F>
  __device__ __forceinline__ void for_rows(const F& f) const {
    for_rows(f, [](int, float) {});
  }

  // A row of the view has a gradient that is not finite.
  __device__ __forceinline__ void publish(int v) const {
    const UpdateFiniteFlag& finite_flag = launch.finite_flag;
    if (finite_flag.at != nullptr && v >= finite_flag.first_view && v < finite_flag.end_view) *finite_flag.at = nanf("");
  }

  // Sums all gradients but those of the harmonics beyond the first; returns whether the point is drawn anywhere.
  // `by_dc`: see color_slope.
  __device__ __forceinline__ bool sum_rows(const Point<float>& point, const Vec3<float>& by_dc, Sums& sums,
                                           PointStatistics& statistics) const {
    bool drawn = false;
    const UpdateSettings& settings = launch.settings;
    const Vec3<float> by_scale = {settings.scale_weight, settings.scale_weight, settings.scale_weight};
    for_rows([&](int v, int64_t row) {
      const ViewSetup<C>& view = views[v];
      const RowGradient g = load_gradient(launch.rows, row);
      if (!(g.probe == 0.0f)) publish(v);
      const PointGradient<float> p =
          splat_vjp(view.camera, point, settings.eps2d, settings.antialiased, g.splat);
      sums.mean = sums.mean + p.mean;
      sums.scale = sums.scale + p.scale + by_scale;
      sums.quat = {sums.quat.w + p.quat.w, sums.quat.x + p.quat.x, sums.quat.y + p.quat.y, sums.quat.z + p.quat.z};
      sums.opacity += p.opacity + settings.opacity_weight;
      sums.dc = sums.dc + times(by_dc, g.color);
      if constexpr (Degree > 0) {
        const Direction<float> d = direction(view.center, point.mean);
        float by_basis[sh_bases(Degree)];
        by_basis[0] = 0.0f;
#pragma unroll
        for (int k = 1; k < sh_bases(Degree); ++k) {
          by_basis[k] = dot(Vec3<float>{rest[3 * k - 3], rest[3 * k - 2], rest[3 * k - 1]}, g.color);
        }
        sums.mean = sums.mean + direction_vjp(d, sh_basis_vjp<Degree>(d.unit, by_basis));
      }
      statistics.add(launch, view.camera, g, row);
      drawn = true;
    }, [&](int v, float radius) { statistics.count(views[v].camera, radius); });
    return drawn;
  }

  // Replaces the point's harmonics in shared memory by their gradient.
  __device__ __forceinline__ void outer_products(const Vec3<float>& mean) const {
    for (int i = 0; i < launch.rest_floats; ++i) rest[i] = 0.0f;
    for_rows([&](int v, int64_t row) {
      const Vec3<float> color = load_gradient(launch.rows, row).color;
      float b[sh_bases(Degree)];
      sh_basis<Degree>(direction(views[v].center, mean).unit, b);
#pragma unroll
      for (int k = 1; k < sh_bases(Degree); ++k) {
        rest[3 * k - 3] += b[k] * color.x;
        rest[3 * k - 2] += b[k] * color.y;
        rest[3 * k - 1] += b[k] * color.z;
      }
    });
  }
};

// Steps all tensors of a warp's points by step(batch, tensor, width, first, gradient), with the gradients that lie in
// shared memory if there are any, and widens the box to the points that have `moved`.
template <int Degree, typename Step>
__device__ __forceinline__ void step_tensors(const UpdateLaunch& launch, const float* shared, bool given, int group,
                                             bool moved, int64_t id, int lane, const Step& step) {
  const auto one = [&](auto batch, int tensor, int width, int place) {
    const float* gradient = given ? shared + place : nullptr;
    step(batch, tensor, width, tensor == kMeans ? shared + kFirstAt : gradient, gradient);
  };
  one(Batch<1>{}, kMeans, 3, kMeanAt);
  one(Batch<1>{}, kQuats, 4, kQuatAt);
  one(Batch<1>{}, kLogScales, 3, kScaleAt);
  one(Batch<1>{}, kLogits, 1, kLogitAt);
  one(Batch<1>{}, kShDc, 3, kDcAt);
  if (launch.boxes != nullptr) {
    widen_box(launch.boxes, group, moved, launch.values[kMeans], launch.values[kLogScales], id, lane);
  }
  const float* rest = Degree > 0 && given ? shared + kRestAt : nullptr;
  if (launch.rest_floats > 0) step(Batch<4>{}, kShRest, launch.rest_floats, rest, rest);
}

}  // namespace nsmg
