// Projection and harmonics backward, the activations' backward, Adam and the densification's statistics in one kernel:
// no gradient of a parameter ever lies in memory. A warp takes 32 neighbouring points. First a lane has a point of its
// own and sums the gradients of the point's rows over the views; those of the harmonics are an outer product a row and
// go to shared memory. Then the warp walks over the parameters, 16 bytes a lane, and takes Adam's step.
//
// 1416 bytes a point (59 floats, three arrays, read and written; 944 where moments are bfloat16), and about 100 a row.

#include "cuda/optim/splat_update.h"

#include "cuda/optim/splat_update_lane.h"

namespace nsmg {
namespace {

// starts[view * (groups + 1) + group]: the first row at or after the group's first point; the last of a view is its
// end. A finite flag, if given, is reset here.
__global__ void starts_kernel(const UpdateRows rows, int views, int groups, int32_t* starts, float* finite_flag) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i == 0 && finite_flag != nullptr) *finite_flag = 0.0f;
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

// Copies the harmonics of the warp's points into shared memory.
__device__ __forceinline__ void stage(const float* from, float* to, int floats, int lane) {
  const int quads = floats / 4;
#pragma unroll 4
  for (int q = lane; q < quads; q += 32) reinterpret_cast<float4*>(to)[q] = reinterpret_cast<const float4*>(from)[q];
  const int i = 4 * quads + lane;
  if (i < floats) to[i] = from[i];
}

template <int Degree, typename Moment, typename C>
__global__ void __launch_bounds__(kUpdateThreads, 4) update_kernel(const __grid_constant__ UpdateLaunch launch) {
  extern __shared__ float4 storage[];
  auto* views = reinterpret_cast<ViewSetup<C>*>(storage);
  load_views(views, launch.views);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int groups = update_groups(launch.points);
  const int group = blockIdx.x * kUpdateWarps + warp;
  if (group >= groups) return;  // there are no barriers below
  const int first = group * kGroup;
  const int size = smaller(kGroup, launch.points - first);
  const bool inside = lane < size;
  const int64_t id = first + (inside ? lane : 0);
  float* shared = reinterpret_cast<float*>(reinterpret_cast<char*>(storage) + view_bytes<C>(launch.views.count)) +
                  warp * warp_floats(launch.rest_floats);
  float* rest = shared + kRestAt;

  bool shown = false;
  for (int v = lane; v < launch.views.count; v += 32) {
    const int32_t* start = launch.starts + int64_t{v} * (groups + 1) + group;
    shown |= start[0] != start[1];
  }
  const float needles = launch.needles == nullptr ? 0.0f : *launch.needles;
  shown = __any_sync(0xffffffffu, shown) || needles > 0.0f;

  if (shown) {
    if constexpr (Degree > 0) {
      stage(launch.values[kShRest] + int64_t{first} * launch.rest_floats, rest, size * launch.rest_floats, lane);
      __syncwarp();
    }
    const Point<float> point = activated(load3(launch.values[kMeans], id), load_quat(launch.values[kQuats], id),
                                         load3(launch.values[kLogScales], id), launch.values[kLogits][id]);
    Sums sums;
    const Lane<Degree, C> mine = {launch, views, rest + lane * launch.rest_floats, group, first, lane};
    PointStatistics statistics;
    statistics.load(launch.statistics, id);
    const auto dc = [&] { return load3(launch.values[kShDc], id); };
    mine.sum_rows(point, color_slope<Degree>(launch.settings, dc), sums, statistics);
    if (statistics.counted) statistics.store(launch.statistics, id);
    if (needles > 0.0f) {
      const Vec3<float> slope = needle_slope(point.scale, launch.settings.max_ratio);
      sums.scale = sums.scale + times(slope, Vec3<float>{needles, needles, needles});
    }
    if constexpr (Degree > 0) mine.outer_products(point.mean);
    put_gradients(shared, lane, sums, point, launch.settings);
    __syncwarp();
  }
  const uint32_t salt = step_salt<Moment>(launch.scalars, launch.views);
  const auto step = [&](auto batch, int tensor, int width, const float* first_gradient, const float* gradient) {
    const Span<Moment> span = span_of<Moment>(launch, first, size, tensor, width, salt);
    step_span<decltype(batch)::value>(span, EveryPoint{}, first_gradient, gradient, launch.scalars + 8 * tensor, lane);
  };
  step_tensors<Degree>(launch, shared, shown, group, inside, id, lane, step);
}

template <int Degree, typename Moment, typename C>
cudaError_t launch_update(const UpdateLaunch& launch, cudaStream_t stream) {
  const int blocks = (update_groups(launch.points) + kUpdateWarps - 1) / kUpdateWarps;
  const size_t bytes = view_bytes<C>(launch.views.count) + sizeof(float) * kUpdateWarps * warp_floats(launch.rest_floats);
  update_kernel<Degree, Moment, C><<<blocks, kUpdateThreads, bytes, stream>>>(launch);
  return cudaGetLastError();
}

template <int Degree>
cudaError_t launch_degree(const UpdateLaunch& launch, cudaStream_t stream) {
  return with_camera(launch.views.intrinsics_rows, [&](auto kind) {
    using C = typename decltype(kind)::type;
    return with_moments(launch.compact,
                        [&](auto moment) { return launch_update<Degree, decltype(moment), C>(launch, stream); });
  });
}

}  // namespace

cudaError_t splat_update_launch(const UpdateLaunch& launch, cudaStream_t stream) {
  const int groups = update_groups(launch.points);
  const int64_t starts = launch.points > 0 ? int64_t{launch.views.count} * (groups + 1) : 0;
  if (starts == 0 && launch.finite_flag.at != nullptr) {
    const cudaError_t status = cudaMemsetAsync(launch.finite_flag.at, 0, sizeof(float), stream);
    if (status != cudaSuccess) return status;
  }
  if (starts > 0) {
    constexpr int kSearchThreads = 256;
    const auto blocks = static_cast<unsigned>((starts + kSearchThreads - 1) / kSearchThreads);
    starts_kernel<<<blocks, kSearchThreads, 0, stream>>>(launch.rows, launch.views.count, groups, launch.starts,
                                                         launch.finite_flag.at);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
  }
  if (launch.viewmats != nullptr) {
    const cudaError_t status = splat_poses_launch(launch, stream);
    if (status != cudaSuccess) return status;
  }
  if (launch.points == 0) return cudaSuccess;
  if (launch.lazy.last != nullptr) {
    return with_camera(launch.views.intrinsics_rows, [&](auto kind) {
      return splat_lazy_update_launch<typename decltype(kind)::type>(launch, stream);
    });
  }
  switch (launch.settings.degree) {
    case kPlainColor:
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
