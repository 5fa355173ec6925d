// The fused update of points that are drawn, all others being deferred: see splat_update.cu and common/lazy_adam.h.
//
// A point that is drawn first takes the steps that it has missed, then the one with the gradient: 1418 bytes, about 100
// a row, and its harmonics' 540 bytes twice (the second time from the L2 cache); where moments are bfloat16, 946 and
// 360. They are rounded once, at the end. A group without rows costs a look at `starts`.

//
// A unit for each type of camera, since this is the longest to compile: splat_update_lazy_lens.cu has the other.

#ifndef NSMG_CAMERA
#define NSMG_CAMERA Camera
#endif

#include "cuda/optim/splat_lazy_device.h"
#include "cuda/optim/splat_update_lane.h"

namespace nsmg {
namespace {

// A warp's shared memory: as in the other update, and then a LazyFactor of each of its points.
__host__ __device__ constexpr int lazy_warp_floats(int rest_floats) { return warp_floats(rest_floats) + 4 * kGroup; }

// What the points of a warp have missed of one tensor's steps, in shared memory. The whole warp calls it.
__device__ __forceinline__ void put_factors(float4* factors, const float* table, int last, int tensor, int lane) {
  __syncwarp();  // all are done with those of the tensor before
  const LazyFactor f = load_lazy_factor(table, last, tensor);
  factors[lane] = make_float4(f.shift, f.eps, f.decay1, f.decay2);
  __syncwarp();
}

// Steps the points whose bit is set: first the steps that they have missed, by `factors` in shared memory.
struct DrawnPoints {
  uint32_t points;
  const float4* factors;

  __device__ __forceinline__ bool has(int point) const { return (points >> point) & 1; }
  // Those of floats 4 q to 4 q + 3, as four bits.
  __device__ __forceinline__ uint32_t elements(int q, int width) const {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) bits |= ((points >> (static_cast<uint32_t>(4 * q + j) / width)) & 1) << j;
    return bits;
  }
  __device__ __forceinline__ void step(const AdamScalars<float>& s, int element, int width, float first, float gradient,
                                       float& p, float& m, float& v) const {
    const float4 f = factors[static_cast<uint32_t>(element) / width];
    catch_up(LazyFactor{f.x, f.y, f.z, f.w}, p, m, v);
    adam_element(s, first, gradient, p, m, v);
  }
};

// Copies the harmonics of the warp's points to shared memory, with their deferred steps taken.
template <typename Moment>
__device__ __forceinline__ void stage_caught_up(const Span<Moment>& span, const DrawnPoints& points, float* to,
                                                int lane) {
  const float4* factors = points.factors;
  const int quads = span.floats / 4;
#pragma unroll 2
  for (int q = lane; q < quads; q += 32) {
    if (points.elements(q, span.width) == 0) continue;
    float4 p = reinterpret_cast<const float4*>(span.value)[q];
    const float4 m = load_moments(span.moment1, q);
    const float4 v = load_moments(span.moment2, q);
    const uint32_t width = span.width;
    const float4 f0 = factors[4 * q / width], f1 = factors[(4 * q + 1) / width];
    const float4 f2 = factors[(4 * q + 2) / width], f3 = factors[(4 * q + 3) / width];
    p.x = lazy_value(f0.x, f0.y, p.x, m.x, v.x);
    p.y = lazy_value(f1.x, f1.y, p.y, m.y, v.y);
    p.z = lazy_value(f2.x, f2.y, p.z, m.z, v.z);
    p.w = lazy_value(f3.x, f3.y, p.w, m.w, v.w);
    reinterpret_cast<float4*>(to)[q] = p;
  }
  const int i = 4 * quads + lane;
  if (i < span.floats) {
    const float4 f = factors[i / span.width];
    to[i] = lazy_value(f.x, f.y, span.value[i], load_moment(span.moment1 + i), load_moment(span.moment2 + i));
  }
}

// Three numbers of a lane's point as the missed steps leave them.
template <typename Moment>
__device__ __forceinline__ Vec3<float> caught_up_vector(const UpdateLaunch& l, int tensor, int last, int64_t id) {
  return caught_up3(load_lazy_factor(l.lazy.table, last, tensor), l.values[tensor],
                    static_cast<const Moment*>(l.moments1[tensor]), static_cast<const Moment*>(l.moments2[tensor]), id);
}

// A lane's point, all but its harmonics, as the missed steps leave it.
template <typename Moment>
__device__ __forceinline__ Point<float> caught_up_point(const UpdateLaunch& l, int last, int64_t id) {
  const auto factor = [&](int tensor) { return load_lazy_factor(l.lazy.table, last, tensor); };
  const auto first = [&](int tensor) { return static_cast<const Moment*>(l.moments1[tensor]); };
  const auto second = [&](int tensor) { return static_cast<const Moment*>(l.moments2[tensor]); };
  return activated(caught_up_vector<Moment>(l, kMeans, last, id),
                   caught_up_quat(factor(kQuats), l.values[kQuats], first(kQuats), second(kQuats), id),
                   caught_up_vector<Moment>(l, kLogScales, last, id),
                   caught_up(factor(kLogits), l.values[kLogits], first(kLogits), second(kLogits), id));
}

template <int Degree, typename Moment, typename C>
__global__ void __launch_bounds__(kUpdateThreads, 4) lazy_update_kernel(const __grid_constant__ UpdateLaunch launch) {
  extern __shared__ float4 storage[];
  auto* views = reinterpret_cast<ViewSetup<C>*>(storage);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int groups = update_groups(launch.points);
  const int group = blockIdx.x * kUpdateWarps + warp;
  const int steps = *launch.lazy.steps;
  bool shown = false;
  if (group < groups && steps < kLazySteps) {
    for (int v = lane; v < launch.views.count; v += 32) {
      const int32_t* start = launch.starts + int64_t{v} * (groups + 1) + group;
      shown |= start[0] != start[1];
    }
  }
  if (__syncthreads_count(shown) == 0) return;
  load_views(views, launch.views);
  if (!__any_sync(0xffffffffu, shown)) return;  // there are no barriers below

  const int first = group * kGroup;
  const int size = smaller(kGroup, launch.points - first);
  const int64_t id = first + (lane < size ? lane : 0);
  float* shared = reinterpret_cast<float*>(reinterpret_cast<char*>(storage) + view_bytes<C>(launch.views.count)) +
                  warp * lazy_warp_floats(launch.rest_floats);
  float* rest = shared + kRestAt;
  auto* factors = reinterpret_cast<float4*>(shared + warp_floats(launch.rest_floats));
  const Lane<Degree, C> mine = {launch, views, rest + lane * launch.rest_floats, group, first, lane};
  bool drawn = false;
  PointStatistics statistics;
  mine.for_rows([&](int, int64_t) { drawn = true; }, [&](int, float) { statistics.counted = true; });
  const DrawnPoints points = {__ballot_sync(0xffffffffu, drawn), factors};
  const bool counted = drawn || statistics.counted;
  if (counted) statistics.load(launch.statistics, id);
  if (points.points == 0) {
    if (!__any_sync(0xffffffffu, counted)) return;
    mine.for_rows([](int, int64_t) {}, [&](int v, float radius) { statistics.count(views[v].camera, radius); });
    if (counted) statistics.store(launch.statistics, id);
    return;
  }
  const int last = drawn ? launch.lazy.last[id] : steps;

  const uint32_t salt = step_salt<Moment>(launch.scalars, launch.views);
  const auto span = [&](int tensor, int width) { return span_of<Moment>(launch, first, size, tensor, width, salt); };
  if constexpr (Degree > 0) {
    put_factors(factors, launch.lazy.table, last, kShRest, lane);
    stage_caught_up(span(kShRest, launch.rest_floats), points, rest, lane);
    __syncwarp();
  }
  const Point<float> point = caught_up_point<Moment>(launch, last, id);
  Sums sums;
  const auto dc = [&] { return caught_up_vector<Moment>(launch, kShDc, last, id); };
  mine.sum_rows(point, color_slope<Degree>(launch.settings, dc), sums, statistics);
  if (counted) statistics.store(launch.statistics, id);
  if constexpr (Degree > 0) mine.outer_products(point.mean);
  put_gradients(shared, lane, sums, point, launch.settings);

  const auto step = [&](auto batch, int tensor, int width, const float* first_gradient, const float* gradient) {
    put_factors(factors, launch.lazy.table, last, tensor, lane);
    step_span<decltype(batch)::value>(span(tensor, width), points, first_gradient, gradient,
                                      launch.scalars + 8 * tensor, lane);
  };
  step_tensors<Degree>(launch, shared, true, group, drawn, id, lane, step);
  if (drawn) launch.lazy.last[id] = static_cast<uint8_t>(steps + (all_stand_still(launch.scalars) ? 0 : 1));
}

template <int Degree>
cudaError_t launch_lazy(const UpdateLaunch& launch, cudaStream_t stream) {
  const int blocks = (update_groups(launch.points) + kUpdateWarps - 1) / kUpdateWarps;
  const size_t floats = kUpdateWarps * lazy_warp_floats(launch.rest_floats);
  using C = NSMG_CAMERA<float>;
  const size_t bytes = view_bytes<C>(launch.views.count) + sizeof(float) * floats;
  const cudaError_t status = with_moments(launch.compact, [&](auto moment) {
    lazy_update_kernel<Degree, decltype(moment), C><<<blocks, kUpdateThreads, bytes, stream>>>(launch);
    return cudaGetLastError();
  });
  return status != cudaSuccess ? status : splat_lazy_extend_launch(launch.lazy, launch.scalars, stream);
}

}  // namespace

template <>
cudaError_t splat_lazy_update_launch<NSMG_CAMERA<float>>(const UpdateLaunch& launch, cudaStream_t stream) {
  switch (launch.settings.degree) {
    case kPlainColor:
    case 0:
      return launch_lazy<0>(launch, stream);
    case 1:
      return launch_lazy<1>(launch, stream);
    case 2:
      return launch_lazy<2>(launch, stream);
    default:
      return launch_lazy<3>(launch, stream);
  }
}

}  // namespace nsmg
