// The definitions of primitive.h for projection: a thread a row; backward, a block owns consecutive points and goes
// through their rows, view by view (rows.h): no atomics, the same bits on every run.
#pragma once

#include "cuda/common/primitive.h"
#include "cuda/project/project.h"

namespace nsmg {
namespace {

constexpr int kRowThreads = 128;

template <typename Primitive>
__device__ __forceinline__ auto load_primitive(const PrimitivePoints<Primitive>& in, int64_t id) {
  float numbers[Primitive::PointColumns::kNumbers];
  Primitive::PointColumns::load(in.columns, id, numbers);
  return as_struct<typename Primitive::template Point<float>>(numbers);
}

template <typename Primitive, typename C>
__global__ void __launch_bounds__(kRowThreads)
project_kernel(const __grid_constant__ PrimitivePoints<Primitive> in, const __grid_constant__ ViewSizes sizes,
               const __grid_constant__ PrimitiveProjected<Primitive> out) {
  const int64_t row = int64_t(blockIdx.x) * kRowThreads + threadIdx.x;
  if (row >= in.rows) return;
  const int view = in.view_ids[row];
  if (view < sizes.first || view >= sizes.first + sizes.count) return;  // another launch's
  const int id = in.point_ids[row];
  typename Primitive::template Row<float> r = {};
  if (id >= 0) r = Primitive::project(load_camera<C>(in.cameras, sizes, view), load_primitive(in, id));
  reinterpret_cast<int2*>(out.radii)[row] = make_int2(int(r.rx), int(r.ry));
  if (!r.alive) r = {};
  float numbers[Primitive::ProjectedColumns::kNumbers];
  to_numbers(r, numbers);
  Primitive::ProjectedColumns::store(out.columns, row, numbers);
}

template <typename Primitive, typename C>
__global__ void __launch_bounds__(kRowThreads)
project_backward_kernel(const __grid_constant__ PrimitivePoints<Primitive> in, const __grid_constant__ ViewSizes sizes,
                        const __grid_constant__ PrimitivePointGradients<Primitive> g, int groups) {
  using PointColumns = typename Primitive::PointColumns;
  constexpr int kNumbers = PointColumns::kNumbers, kGroupPoints = kPointGroup<Primitive>;
  __shared__ float sums[kNumbers][kGroupPoints];
  const int64_t base = int64_t(blockIdx.x) * kGroupPoints;
  const int here = int(min(int64_t(kGroupPoints), in.points - base));

  // What an earlier launch found for its views is already there.
  const bool fresh = sizes.first == 0;
  for (int i = threadIdx.x; i < here; i += kRowThreads)
    PointColumns::each(g.columns, base + i, [&](const float* from, int c) { sums[c][i] = fresh ? 0.0f : *from; });
  __syncthreads();

  const auto add = [&](const C& camera, int64_t row, float (&pose)[kPose]) {
    if (g.radii[2 * row] <= 0) return;
    const int id = in.point_ids[row];
    float given[Primitive::ProjectedColumns::kNumbers], found[kNumbers + kPose];
    Primitive::ProjectedColumns::load(g.given, row, given);
    to_numbers(Primitive::project_vjp(camera, load_primitive(in, id),
                                      as_struct<typename Primitive::template RowGradient<float>>(given)),
               found);
    // Within a view no other thread has this point.
#pragma unroll
    for (int c = 0; c < kNumbers; ++c) sums[c][id - base] += found[c];
#pragma unroll
    for (int c = 0; c < kPose; ++c) pose[c] += found[kNumbers + c];
  };
  for_group_rows<kRowThreads, C>(in.cameras, sizes, g.starts, g.poses, groups, add);

  for (int i = threadIdx.x; i < here; i += kRowThreads)
    PointColumns::each(g.columns, base + i, [&](float* to, int c) { *to = sums[c][i]; });
}

}  // namespace

template <typename Primitive>
cudaError_t project_primitives(const PrimitivePoints<Primitive>& in, const PrimitiveProjected<Primitive>& out,
                               cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  return with_camera(in.intrinsics_rows, [&](auto kind) {
    const auto kernel = project_kernel<Primitive, typename decltype(kind)::type>;
    return for_view_sizes(in.sizes, in.views, [&](const ViewSizes& sizes) {
      kernel<<<unsigned((int64_t(in.rows) + kRowThreads - 1) / kRowThreads), kRowThreads, 0, stream>>>(in, sizes, out);
    });
  });
}

template <typename Primitive>
cudaError_t project_primitives_backward(const PrimitivePoints<Primitive>& in,
                                        const PrimitivePointGradients<Primitive>& g, cudaStream_t stream) {
  const int groups = groups_of(in.points, kPointGroup<Primitive>);
  if (groups == 0 || in.views == 0) return cudaSuccess;
  const cudaError_t error = with_camera(in.intrinsics_rows, [&](auto kind) {
    const auto kernel = project_backward_kernel<Primitive, typename decltype(kind)::type>;
    return for_view_sizes(in.sizes, in.views, [&](const ViewSizes& sizes) {
      kernel<<<groups, kRowThreads, 0, stream>>>(in, sizes, g, groups);
    });
  });
  if (error != cudaSuccess) return error;
  return sum_partials(g.poses, kPose * in.views, groups, true, g.viewmats, stream);
}

// Compiles the kernels of a primitive.
#define NSMG_PROJECT_PRIMITIVES(P)                                                                              \
  template cudaError_t project_primitives(const PrimitivePoints<P>&, const PrimitiveProjected<P>&, cudaStream_t); \
  template cudaError_t project_primitives_backward(const PrimitivePoints<P>&, const PrimitivePointGradients<P>&,  \
                                                   cudaStream_t)

}  // namespace nsmg
