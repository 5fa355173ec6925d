// Projection and harmonics backward, the activations' backward, Adam and the densification's statistics in one kernel:
// no gradient of a parameter ever lies in memory. A warp takes 32 neighbouring points. First a lane has a point of its
// own and sums the gradients of the point's rows over the views; those of the harmonics are an outer product a row and go
// to shared memory. Then the warp walks over the parameters, 16 bytes a lane, and takes Adam's step.
//
// 1416 bytes a point (59 floats, three arrays, read and written), and about 100 a row. Selective: only visible points.

#include "cuda/splat_update.h"

#include <type_traits>

#include "common/activations.h"
#include "cuda/splat_update_rows.h"
#include "cuda/splat_update_span.h"

namespace nsmg {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
// Where the gradients of a warp's points lie in its shared memory, in floats.
constexpr int kMeanAt = 0, kQuatAt = 96, kScaleAt = 224, kLogitAt = 320, kDcAt = 352, kRestAt = 448;

template <int Count>
using Batch = std::integral_constant<int, Count>;

__host__ __device__ constexpr int warp_floats(int rest_floats) { return kRestAt + 32 * rest_floats; }

// starts[view * (groups + 1) + group]: the first row at or after the group's first point; the last of a view is its end.
__global__ void starts_kernel(const UpdateRows rows, int views, int groups, int32_t* starts) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= int64_t{views} * (groups + 1)) return;
  const int view = static_cast<int>(i / (groups + 1)), group = static_cast<int>(i % (groups + 1));
  const int segment = view / (views / rows.segments), length = rows.rows / rows.segments;
  int low = segment * length;
  int high = low + (rows.counts == nullptr ? length : static_cast<int>(smaller<int64_t>(rows.counts[segment], length)));
  while (low < high) {
    const int middle = low + (high - low) / 2;
    const int v = rows.view_ids[middle], point = rows.point_ids[middle];
    // Padding, whose point is -1, comes after all rows.
    const bool before = point >= 0 && (v < view || (v == view && (group == groups || point / kGroup < group)));
    if (before) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  starts[i] = low;
}

// The sums over a point's rows.
struct Sums {
  Vec3<float> mean = {}, scale = {}, dc = {};
  Quat<float> quat = {};
  float opacity = 0.0f;
};

// One lane's point while its rows are gone through.
template <int Degree>
struct Lane {
  const UpdateLaunch& launch;
  const ViewSetup* views;
  float* rest;  // in shared memory: the point's harmonics, later their gradient
  int group, first, lane;

  // Calls f(view, row) for each row of the lane's point that is drawn. The whole warp calls it.
  template <typename F>
  __device__ __forceinline__ void for_rows(const F& f) const {
    const int groups = update_groups(launch.points);
    for (int v = 0; v < launch.views.count; ++v) {
      const int32_t* start = launch.starts + int64_t{v} * (groups + 1) + group;
      const int begin = start[0], end = start[1];
      if (begin == end) continue;
      const int row = row_of_lane(launch.rows.point_ids, begin, end, first, lane);
      if (row >= 0 && launch.rows.radii[2 * int64_t{row}] > 0) f(v, int64_t{row});
      __syncwarp();
    }
  }

  // Sums all gradients but those of the harmonics beyond the first; returns whether the point is drawn anywhere.
  __device__ __forceinline__ bool sum_rows(const Point<float>& point, Sums& sums, PointStatistics& statistics) const {
    bool drawn = false;
    for_rows([&](int v, int64_t row) {
      const ViewSetup& view = views[v];
      const RowGradient g = load_gradient(launch.gradients, launch.rows, row);
      const PointGradient<float> p =
          splat_vjp(view.camera, point, launch.settings.eps2d, launch.settings.antialiased, g.splat);
      sums.mean = sums.mean + p.mean;
      sums.scale = sums.scale + p.scale;
      sums.quat = {sums.quat.w + p.quat.w, sums.quat.x + p.quat.x, sums.quat.y + p.quat.y, sums.quat.z + p.quat.z};
      sums.opacity += p.opacity;
      sums.dc = sums.dc + ShConstants<float>::k0 * g.color;
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
    });
    return drawn;
  }

  // Replaces the point's harmonics in shared memory by their gradient.
  __device__ __forceinline__ void outer_products(const Vec3<float>& mean) const {
    for (int i = 0; i < launch.rest_floats; ++i) rest[i] = 0.0f;
    for_rows([&](int v, int64_t row) {
      const Vec3<float> color = load_gradient(launch.gradients, launch.rows, row).color;
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

// Brings the harmonics of the warp's points into shared memory.
__device__ __forceinline__ void stage(const float* from, float* to, int floats, int lane) {
  const int quads = floats / 4;
#pragma unroll 4
  for (int q = lane; q < quads; q += 32) reinterpret_cast<float4*>(to)[q] = reinterpret_cast<const float4*>(from)[q];
  const int i = 4 * quads + lane;
  if (i < floats) to[i] = from[i];
}

template <int Degree, bool Selective>
__global__ void __launch_bounds__(kThreads, 4) update_kernel(const __grid_constant__ UpdateLaunch launch) {
  extern __shared__ float4 storage[];
  auto* views = reinterpret_cast<ViewSetup*>(storage);
  load_views(views, launch.views);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int groups = update_groups(launch.points);
  const int group = blockIdx.x * kWarps + warp;
  if (group >= groups) return;  // there are no barriers below
  const int first = group * kGroup;
  const int size = smaller(kGroup, launch.points - first);
  const bool inside = lane < size;
  const int64_t id = first + (inside ? lane : 0);
  const UpdateSettings& settings = launch.settings;
  float* shared = reinterpret_cast<float*>(reinterpret_cast<char*>(storage) + view_bytes(launch.views.count)) +
                  warp * warp_floats(launch.rest_floats);
  float* rest = shared + kRestAt;

  bool shown = false;
  for (int v = lane; v < launch.views.count; v += 32) {
    const int32_t* start = launch.starts + int64_t{v} * (groups + 1) + group;
    shown |= start[0] != start[1];
  }
  shown = __any_sync(0xffffffffu, shown);

  uint32_t drawn_points = 0;
  const bool weighted = settings.opacity_weight != 0.0f || settings.scale_weight != 0.0f;
  if (shown || weighted) {
    if (Degree > 0 && shown) {
      stage(launch.values[kShRest] + int64_t{first} * launch.rest_floats, rest, size * launch.rest_floats, lane);
      __syncwarp();
    }
    const Point<float> point = activated(load3(launch.values[kMeans], id), load_quat(launch.values[kQuats], id),
                                         load3(launch.values[kLogScales], id), launch.values[kLogits][id]);
    Sums sums;
    if (shown) {
      const Lane<Degree> mine = {launch, views, rest + lane * launch.rest_floats, group, first, lane};
      PointStatistics statistics;
      statistics.load(launch.statistics, id);
      const bool drawn = mine.sum_rows(point, sums, statistics);
      drawn_points = __ballot_sync(0xffffffffu, drawn);
      if (drawn) statistics.store(launch.statistics, id);
      if constexpr (Degree > 0) mine.outer_products(point.mean);
    }
    const float o = point.opacity, slope = o * (1.0f - o);
    sums.scale = times(sums.scale, point.scale) + settings.scale_weight * point.scale;
    shared[kMeanAt + 3 * lane] = sums.mean.x;
    shared[kMeanAt + 3 * lane + 1] = sums.mean.y;
    shared[kMeanAt + 3 * lane + 2] = sums.mean.z;
    reinterpret_cast<float4*>(shared + kQuatAt)[lane] =
        make_float4(sums.quat.w, sums.quat.x, sums.quat.y, sums.quat.z);
    shared[kScaleAt + 3 * lane] = sums.scale.x;
    shared[kScaleAt + 3 * lane + 1] = sums.scale.y;
    shared[kScaleAt + 3 * lane + 2] = sums.scale.z;
    shared[kLogitAt + lane] = (sums.opacity + settings.opacity_weight) * slope;
    shared[kDcAt + 3 * lane] = sums.dc.x;
    shared[kDcAt + 3 * lane + 1] = sums.dc.y;
    shared[kDcAt + 3 * lane + 2] = sums.dc.z;
    __syncwarp();
  }
  if (Selective && drawn_points == 0) return;

  const auto step = [&](auto batch, int tensor, int width, const float* gradient) {
    const int64_t at = int64_t{first} * width;
    const Span span = {launch.values[tensor] + at, launch.moments1[tensor] + at, launch.moments2[tensor] + at,
                       size * width, width};
    step_span<Selective, decltype(batch)::value>(span, gradient, launch.scalars + 8 * tensor, drawn_points, lane);
  };
  const bool moved = shown || weighted;
  step(Batch<1>{}, kMeans, 3, moved ? shared + kMeanAt : nullptr);
  step(Batch<1>{}, kQuats, 4, moved ? shared + kQuatAt : nullptr);
  step(Batch<1>{}, kLogScales, 3, moved ? shared + kScaleAt : nullptr);
  step(Batch<1>{}, kLogits, 1, moved ? shared + kLogitAt : nullptr);
  step(Batch<1>{}, kShDc, 3, moved ? shared + kDcAt : nullptr);
  if (launch.rest_floats > 0) step(Batch<4>{}, kShRest, launch.rest_floats, Degree > 0 && shown ? rest : nullptr);
}

template <int Degree, bool Selective>
cudaError_t launch_update(const UpdateLaunch& launch, cudaStream_t stream) {
  const int blocks = (update_groups(launch.points) + kWarps - 1) / kWarps;
  const size_t bytes = view_bytes(launch.views.count) + sizeof(float) * kWarps * warp_floats(launch.rest_floats);
  update_kernel<Degree, Selective><<<blocks, kThreads, bytes, stream>>>(launch);
  return cudaGetLastError();
}

template <int Degree>
cudaError_t launch_degree(const UpdateLaunch& launch, cudaStream_t stream) {
  return launch.settings.selective ? launch_update<Degree, true>(launch, stream)
                                   : launch_update<Degree, false>(launch, stream);
}

}  // namespace

cudaError_t splat_update_launch(const UpdateLaunch& launch, cudaStream_t stream) {
  if (launch.points == 0) return cudaSuccess;
  const int groups = update_groups(launch.points);
  const int64_t starts = int64_t{launch.views.count} * (groups + 1);
  if (starts > 0) {
    constexpr int kSearchThreads = 256;
    const auto blocks = static_cast<unsigned>((starts + kSearchThreads - 1) / kSearchThreads);
    starts_kernel<<<blocks, kSearchThreads, 0, stream>>>(launch.rows, launch.views.count, groups, launch.starts);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
  }
  switch (launch.settings.degree) {
    case 0:
      return launch_degree<0>(launch, stream);
    case 1:
      return launch_degree<1>(launch, stream);
    case 2:
      return launch_degree<2>(launch, stream);
    default:
      return launch_degree<3>(launch, stream);
  }
}

}  // namespace nsmg
