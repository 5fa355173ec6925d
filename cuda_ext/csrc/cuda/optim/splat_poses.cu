// The gradient by the cameras' matrices of a fused update, from parameters that it has not yet changed: a thread a row,
// sums in registers, then over the warp and the block, and at last over the blocks in a second launch. No atomics, so
// the same rows give the same bits. The update itself pays nothing for it.

#include "common/activations.h"
#include "common/compact.h"
#include "common/lazy_adam.h"
#include "cuda/optim/splat_update_rows.h"

namespace nsmg {
namespace {

constexpr int kThreads = 128;

// The number of a tensor's element i as the steps that its point has missed leave it.
struct Numbers {
  const UpdateLaunch& launch;
  int tensor;
  float shift = 0.0f, eps = 1.0f;

  __device__ Numbers(const UpdateLaunch& launch, int tensor, int64_t point) : launch(launch), tensor(tensor) {
    if (launch.lazy.last == nullptr) return;
    const float* line = launch.lazy.table + (launch.lazy.last[point] * kUpdateTensors + tensor) * kLazyFloats;
    shift = line[0];
    eps = line[1];
  }
  __device__ __forceinline__ float moment(const void* moments, int64_t i) const {
    return launch.compact ? widened(static_cast<const Bfloat16*>(moments)[i]) : static_cast<const float*>(moments)[i];
  }
  __device__ __forceinline__ float operator[](int64_t i) const {
    const float value = launch.values[tensor][i];
    if (shift == 0.0f) return value;
    return lazy_value(shift, eps, value, moment(launch.moments1[tensor], i), moment(launch.moments2[tensor], i));
  }
  __device__ __forceinline__ Vec3<float> vector(int64_t i) const {
    return {(*this)[3 * i], (*this)[3 * i + 1], (*this)[3 * i + 2]};
  }
};

template <int Degree, typename C>
__device__ __forceinline__ void add_row(const UpdateLaunch& launch, const ViewSetup<C>& view, int64_t row,
                                        float (&pose)[16]) {
  const int64_t id = launch.rows.point_ids[row];
  const RowGradient g = load_gradient(launch.rows, row);
  const Numbers quats(launch, kQuats, id);
  const Quat<float> quat = {quats[4 * id], quats[4 * id + 1], quats[4 * id + 2], quats[4 * id + 3]};
  const Vec3<float> mean = Numbers(launch, kMeans, id).vector(id);
  const Vec3<float> log_scales = Numbers(launch, kLogScales, id).vector(id);
  const Point<float> point = activated(mean, quat, log_scales, Numbers(launch, kLogits, id)[id]);
  const UpdateSettings& settings = launch.settings;
  const PointGradient<float> p = splat_vjp(view.camera, point, settings.eps2d, settings.antialiased, g.splat);
  add_pose(pose, p.rotation, p.translation);
  if constexpr (Degree > 0) {
    const Numbers rest(launch, kShRest, id);
    const int64_t first = id * (launch.rest_floats / 3) - 1;
    float by_basis[sh_bases(Degree)];
    by_basis[0] = 0.0f;
#pragma unroll
    for (int k = 1; k < sh_bases(Degree); ++k) by_basis[k] = dot(rest.vector(first + k), g.color);
    const Direction<float> d = direction(view.center, mean);
    // By the point. By the camera's centre, which is -rotation^T translation, it is minus this.
    const Vec3<float> away = direction_vjp(d, sh_basis_vjp<Degree>(d.unit, by_basis));
    const Mat3<float>& r = view.camera.rotation;
    add_pose(pose, outer(view.camera.translation, away), {dot(r.r0, away), dot(r.r1, away), dot(r.r2, away)});
  }
}

template <int Degree, typename C>
__global__ void __launch_bounds__(kThreads) pose_kernel(const __grid_constant__ UpdateLaunch launch) {
  __shared__ ViewSetup<C> view;
  __shared__ float of_warps[kThreads / 32][16];
  const int v = int(blockIdx.x) / kPoseBlocks, block = int(blockIdx.x) % kPoseBlocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) view = view_setup<C>(launch.views, v);
  __syncthreads();

  const int groups = update_groups(launch.points);
  const int32_t* starts = launch.starts + int64_t{v} * (groups + 1);
  const int64_t begin = starts[0], end = starts[groups];
  float pose[16] = {};
  for (int64_t row = begin + int64_t{block} * kThreads + threadIdx.x; row < end; row += kPoseBlocks * kThreads) {
    if (launch.rows.radii[2 * row] > 0) add_row<Degree>(launch, view, row, pose);
  }
  const float sum = warp_sums(pose, lane);
  if (lane % 2 == 0) of_warps[warp][lane / 2] = sum;
  __syncthreads();
  const int number = int(threadIdx.x);
  if (number >= kPose) return;
  float total = 0.0f;
  for (int w = 0; w < kThreads / 32; ++w) total += of_warps[w][number];
  launch.poses[(int64_t{v} * kPose + number) * kPoseBlocks + block] = total;
}

}  // namespace

cudaError_t splat_poses_launch(const UpdateLaunch& launch, cudaStream_t stream) {
  const int views = launch.views.count;
  const cudaError_t zeroed = cudaMemsetAsync(launch.viewmats, 0, sizeof(float) * 16 * views, stream);
  if (zeroed != cudaSuccess || launch.points == 0 || views == 0) return zeroed;
  const cudaError_t error = with_camera(launch.views.intrinsics_rows, [&](auto kind) {
    using C = typename decltype(kind)::type;
    constexpr decltype(&pose_kernel<0, C>) kernels[] = {&pose_kernel<0, C>, &pose_kernel<1, C>, &pose_kernel<2, C>,
                                                        &pose_kernel<3, C>};
    const auto kernel = kernels[larger(launch.settings.degree, 0)];  // plain colours do not depend on the direction
    kernel<<<views * kPoseBlocks, kThreads, 0, stream>>>(launch);
    return cudaGetLastError();
  });
  if (error != cudaSuccess) return error;
  return sum_partials(launch.poses, kPose * views, kPoseBlocks, true, launch.viewmats, stream);
}

}  // namespace nsmg
