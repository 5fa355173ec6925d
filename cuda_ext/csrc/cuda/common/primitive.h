// Launchers of projection and compositing of primitives other than 3D Gaussians, templates over a primitive's traits
// (common/surfel_pixel.h, common/convex_pixel.h; what traits must have: primitive_traits.h). Nothing here reads the
// device or depends on its data. Compositing is that of 3D Gaussians in 16x16 tiles (raster_forward.h,
// raster_backward.h), with the tables of rasterize.h.
#pragma once

#include "common/columns.h"
#include "cuda/raster/rasterize.h"
#include "cuda/common/rows.h"

namespace nsmg {

template <typename Primitive>
struct PrimitivePoints {
  typename Primitive::PointColumns::template Pointers<const float> columns;  // [N, ...]
  Cameras cameras;
  int intrinsics_rows;   // of a view: 3, or 7 with lenses
  const int64_t* sizes;  // on the host
  const int *view_ids, *point_ids;
  int points, views, rows;
};

template <typename Primitive>
struct PrimitiveProjected {
  typename Primitive::ProjectedColumns::template Pointers<float> columns;  // [M, ...]
  int* radii;                                                              // [M, 2]
};

template <typename Primitive>
cudaError_t project_primitives(const PrimitivePoints<Primitive>& in, const PrimitiveProjected<Primitive>& out,
                               cudaStream_t stream);

// Points that a block of the backward kernel owns: as many as its shared memory holds sums of.
template <typename Primitive>
inline constexpr int kPointGroup = Primitive::PointColumns::kNumbers <= 12 ? 512 : 256;

template <typename Primitive>
struct PrimitivePointGradients {
  typename Primitive::ProjectedColumns::template Pointers<const float> given;
  const int* radii;                                                    // rows where they are not positive are dead
  typename Primitive::PointColumns::template Pointers<float> columns;  // every element is written
  float* viewmats;                                                     // [V, 4, 4], zeroed by the caller
  const int* starts;                                                   // find_group_starts with kPointGroup
  float* poses;                                                        // scratch: [V, 12, groups]
};

template <typename Primitive>
cudaError_t project_primitives_backward(const PrimitivePoints<Primitive>& in,
                                        const PrimitivePointGradients<Primitive>& g, cudaStream_t stream);

// Floats of a packed row and of a row's record of sums, in whole float4.
template <typename Primitive>
inline constexpr int kPackedQuads = int(sizeof(typename Primitive::template Splat<float>) + 15) / 16;
template <typename Primitive>
inline constexpr int kSumQuads = (Primitive::kGradients + 3) / 4;

template <typename Primitive>
RasterShape primitive_shape(int64_t rows, int64_t intersections, int64_t tiles) {
  RasterShape shape = {rows, intersections, tiles, Primitive::kSums, kFastTile};
  shape.quads = kPackedQuads<Primitive>;
  shape.pixel_sums = Primitive::kSums;
  return shape;
}

struct PrimitiveOutputs : RasterOutputs {  // out [P, 3]
  float* extra;                            // [P, kExtra]
};

struct PrimitivePixelGradients : RasterGradients {
  const float *extra, *v_extra;
};

template <typename Primitive>
using RowPointers = typename Primitive::RowColumns::template Pointers<const float>;

// Packs the rows into state.table, instead of launch_pack; launch_describe and launch_order follow.
template <typename Primitive>
cudaError_t pack_primitives(const RowPointers<Primitive>& columns, const RasterShape& shape, const RasterState& state,
                            const RasterPlan& plan, cudaStream_t stream);
template <typename Primitive>
cudaError_t draw_primitives(const int32_t* row_ids, const RasterShape& shape, const RasterState& state,
                            const RasterPlan& plan, const PrimitiveOutputs& outputs, cudaStream_t stream);
// Adds to records [M, 4 kSumQuads], zeroed by the caller, and makes gradients [M, ...] of them.
template <typename Primitive>
cudaError_t draw_primitives_backward(const int32_t* row_ids, const RasterShape& shape, const RasterState& state,
                                     const PrimitivePixelGradients& pixels, float* records,
                                     const typename Primitive::RowColumns::template Pointers<float>& gradients,
                                     cudaStream_t stream);

}  // namespace nsmg
