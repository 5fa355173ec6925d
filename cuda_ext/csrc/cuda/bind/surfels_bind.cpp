// ns_multigpu::project_surfels, rasterize_surfels and their gradients on CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "common/surfel_pixel.h"
#include "cuda/bind/check.h"
#include "cuda/bind/patch_groups.h"
#include "cuda/raster/surfels.h"

namespace nsmg {
namespace surfels_bind {

// Checked contiguous inputs; they own what the raw pointers of `raw` point at.
struct Points {
  at::Tensor means, quats, scales, opacities, viewmats, Ks, view_ids, point_ids;
  SurfelInputs raw;

  Points(const at::Tensor& means_, const at::Tensor& quats_, const at::Tensor& scales_, const at::Tensor& opacities_,
         const at::Tensor& viewmats_, const at::Tensor& Ks_, at::IntArrayRef sizes, const at::Tensor& view_ids_,
         const at::Tensor& point_ids_, double near_plane, double far_plane) {
    const int points = cuda_count(means_.size(0), "points"), views = cuda_count(viewmats_.size(0), "views");
    const int rows = cuda_count(point_ids_.numel(), "rows");
    TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2LL * views, "sizes must hold 2 numbers a view.");
    means = cuda_floats(means_, "means", {-1, 3}, means_);
    quats = aligned(cuda_floats(quats_, "quats", {points, 4}, means));
    scales = cuda_floats(scales_, "scales", {points, 2}, means);
    opacities = cuda_floats(opacities_, "opacities", {points}, means);
    viewmats = cuda_floats(viewmats_, "viewmats", {-1, 4, 4}, means);
    Ks = cuda_floats(Ks_, "Ks", {views, 3, 3}, means);
    view_ids = cuda_ints(view_ids_, "view_ids", {rows}, means);
    point_ids = cuda_ints(point_ids_, "point_ids", {rows}, means);
    raw = {means.const_data_ptr<float>(),
           quats.const_data_ptr<float>(),
           scales.const_data_ptr<float>(),
           opacities.const_data_ptr<float>(),
           {viewmats.const_data_ptr<float>(), Ks.const_data_ptr<float>(), static_cast<float>(near_plane),
            static_cast<float>(far_plane)},
           sizes.data(),
           view_ids.const_data_ptr<int32_t>(),
           point_ids.const_data_ptr<int32_t>(),
           points,
           views,
           rows};
  }

  // An output. The kernels write every element of it, but without views none runs.
  at::Tensor made(at::IntArrayRef shape, const at::TensorOptions& options) const {
    return raw.views == 0 ? at::zeros(shape, options) : at::empty(shape, options);
  }
};

using Projected = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Projected project_rows(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales,
                       const at::Tensor& opacities, const at::Tensor& viewmats, const at::Tensor& Ks,
                       at::IntArrayRef sizes, const at::Tensor& view_ids, const at::Tensor& point_ids,
                       double near_plane, double far_plane) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Points in(means, quats, scales, opacities, viewmats, Ks, sizes, view_ids, point_ids, near_plane, far_plane);
  const int64_t rows = in.raw.rows;
  const auto options = means.options();
  const at::Tensor means2d = in.made({rows, 2}, options), transforms = in.made({rows, 9}, options),
                   normals = in.made({rows, 3}, options), depths = in.made({rows}, options),
                   row_opacities = in.made({rows}, options), radii = in.made({rows, 2}, options.dtype(at::kInt));
  NSMG_CUDA_CHECK(project_surfels(in.raw,
                                  {means2d.mutable_data_ptr<float>(), transforms.mutable_data_ptr<float>(),
                                   normals.mutable_data_ptr<float>(), depths.mutable_data_ptr<float>(),
                                   row_opacities.mutable_data_ptr<float>(), radii.mutable_data_ptr<int32_t>()},
                                  c10::cuda::getCurrentCUDAStream()));
  return {means2d, transforms, normals, depths, row_opacities, radii};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> project_rows_backward(
    const at::Tensor& means, const at::Tensor& quats, const at::Tensor& scales, const at::Tensor& opacities,
    const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes, const at::Tensor& view_ids,
    const at::Tensor& point_ids, double near_plane, double far_plane, const at::Tensor& radii_,
    const at::Tensor& v_means2d_, const at::Tensor& v_transforms_, const at::Tensor& v_normals_,
    const at::Tensor& v_depths_, const at::Tensor& v_row_opacities_) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Points in(means, quats, scales, opacities, viewmats, Ks, sizes, view_ids, point_ids, near_plane, far_plane);
  const int64_t rows = in.raw.rows, points = in.raw.points, views = in.raw.views;
  const at::Tensor radii = cuda_ints(radii_, "radii", {rows, 2}, in.means),
                   v_means2d = cuda_floats(v_means2d_, "v_means2d", {rows, 2}, in.means),
                   v_transforms = cuda_floats(v_transforms_, "v_transforms", {rows, 9}, in.means),
                   v_normals = cuda_floats(v_normals_, "v_normals", {rows, 3}, in.means),
                   v_depths = cuda_floats(v_depths_, "v_depths", {rows}, in.means),
                   v_row_opacities = cuda_floats(v_row_opacities_, "v_row_opacities", {rows}, in.means);
  const auto options = means.options();
  const at::Tensor v_means = in.made({points, 3}, options), v_quats = in.made({points, 4}, options),
                   v_scales = in.made({points, 2}, options), v_opacities = in.made({points}, options);
  const at::Tensor v_viewmats = at::zeros({views, 4, 4}, options);
  const int groups = groups_of(in.raw.points, kSurfelGroup);
  cuda_count(views * groups, "blocks of points");
  const at::Tensor starts = at::empty({views * groups + 1}, options.dtype(at::kInt));
  const at::Tensor poses = at::empty({views, 12, groups}, options);
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  NSMG_CUDA_CHECK(find_group_starts(in.raw.view_ids, in.raw.point_ids, in.raw.rows, in.raw.views, kSurfelGroup, groups,
                                    starts.mutable_data_ptr<int32_t>(), stream));
  NSMG_CUDA_CHECK(project_surfels_backward(
      in.raw,
      {v_means2d.const_data_ptr<float>(), v_transforms.const_data_ptr<float>(), v_normals.const_data_ptr<float>(),
       v_depths.const_data_ptr<float>(), v_row_opacities.const_data_ptr<float>(), radii.const_data_ptr<int32_t>(),
       v_means.mutable_data_ptr<float>(), v_quats.mutable_data_ptr<float>(), v_scales.mutable_data_ptr<float>(),
       v_opacities.mutable_data_ptr<float>(), v_viewmats.mutable_data_ptr<float>(), starts.const_data_ptr<int32_t>(),
       poses.mutable_data_ptr<float>()},
      stream));
  return {v_means, v_quats, v_scales, v_opacities, v_viewmats};
}

struct Rows {
  at::Tensor means2d, transforms, normals, opacities, colors, depths, tile_offsets, row_ids;
  SurfelRaster raw;

  Rows(const at::Tensor& means2d_, const at::Tensor& transforms_, const at::Tensor& normals_,
       const at::Tensor& opacities_, const at::Tensor& colors_, const at::Tensor& depths_,
       const at::Tensor& tile_offsets_, const at::Tensor& row_ids_, const Cut& cut, int64_t tile_size) {
    means2d = cuda_floats(means2d_, "means2d", {-1, 2}, means2d_);
    const int rows = cuda_count(means2d.size(0), "rows");
    transforms = cuda_floats(transforms_, "transforms", {rows, 9}, means2d);
    normals = cuda_floats(normals_, "normals", {rows, 3}, means2d);
    opacities = cuda_floats(opacities_, "row_opacities", {rows}, means2d);
    colors = cuda_floats(colors_, "colors", {rows, 3}, means2d);
    depths = cuda_floats(depths_, "depths", {rows}, means2d);
    tile_offsets = cuda_ints(tile_offsets_, "tile_offsets (one number more than the patches have tiles)",
                             {cut.tiles + 1}, means2d);
    row_ids = cuda_ints(row_ids_, "row_ids", {-1}, means2d);
    raw = {means2d.const_data_ptr<float>(),   transforms.const_data_ptr<float>(),
           normals.const_data_ptr<float>(),   opacities.const_data_ptr<float>(),
           colors.const_data_ptr<float>(),    depths.const_data_ptr<float>(),
           tile_offsets.const_data_ptr<int32_t>(), row_ids.const_data_ptr<int32_t>(),
           rows,                              cuda_count(row_ids.size(0), "intersections"),
           int(tile_size)};
  }

  // The rows packed, which every pass reads.
  at::Tensor table(cudaStream_t stream) const {
    at::Tensor packed = at::empty({raw.rows, 4 * kSurfelQuads}, means2d.options());
    NSMG_CUDA_CHECK(pack_surfels(raw, reinterpret_cast<float4*>(packed.mutable_data_ptr<float>()), stream));
    return packed;
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> rasterize(
    const at::Tensor& means2d, const at::Tensor& transforms, const at::Tensor& normals,
    const at::Tensor& row_opacities, const at::Tensor& colors, const at::Tensor& depths,
    const at::Tensor& tile_offsets, const at::Tensor& row_ids, at::IntArrayRef patches, int64_t tile_size) {
  const Cut cut(patches, tile_size);
  const Rows rows(means2d, transforms, normals, row_opacities, colors, depths, tile_offsets, row_ids, cut, tile_size);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::TensorOptions floats = rows.means2d.options();
  at::Tensor out = at::empty({cut.pixels, 3}, floats), geometry = at::empty({cut.pixels, kSurfelGeometry}, floats);
  at::Tensor alpha = at::empty({cut.pixels}, floats), last = at::empty({cut.pixels}, floats.dtype(at::kInt));
  const at::Tensor packed = rows.table(stream);
  const auto* table = reinterpret_cast<const float4*>(packed.const_data_ptr<float>());
  const SurfelImage image = {out.mutable_data_ptr<float>(), geometry.mutable_data_ptr<float>(),
                             alpha.mutable_data_ptr<float>(), last.mutable_data_ptr<int32_t>()};
  for (const PatchGroup& group : cut.groups)
    NSMG_CUDA_CHECK(rasterize_surfels(group, rows.raw, table, image, stream));
  return {out, geometry, alpha, last};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients rasterize_backward(const at::Tensor& means2d, const at::Tensor& transforms, const at::Tensor& normals,
                             const at::Tensor& row_opacities, const at::Tensor& colors, const at::Tensor& depths,
                             const at::Tensor& tile_offsets, const at::Tensor& row_ids, at::IntArrayRef patches,
                             int64_t tile_size, const at::Tensor& out_, const at::Tensor& geometry_,
                             const at::Tensor& alpha_, const at::Tensor& last_, const at::Tensor& v_out_,
                             const at::Tensor& v_geometry_, const at::Tensor& v_alpha_) {
  const Cut cut(patches, tile_size);
  const Rows rows(means2d, transforms, normals, row_opacities, colors, depths, tile_offsets, row_ids, cut, tile_size);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor& like = rows.means2d;
  const int64_t count = rows.raw.rows, pixels = cut.pixels;
  const at::Tensor out = cuda_floats(out_, "out", {pixels, 3}, like),
                   geometry = cuda_floats(geometry_, "geometry", {pixels, kSurfelGeometry}, like),
                   alpha = cuda_floats(alpha_, "alpha", {pixels}, like), last = cuda_ints(last_, "last", {pixels}, like),
                   v_out = cuda_floats(v_out_, "v_out", {pixels, 3}, like),
                   v_geometry = cuda_floats(v_geometry_, "v_geometry", {pixels, kSurfelGeometry}, like),
                   v_alpha = cuda_floats(v_alpha_, "v_alpha", {pixels}, like);
  const at::TensorOptions floats = like.options();
  at::Tensor v_means2d = at::zeros({count, 2}, floats), v_transforms = at::zeros({count, 9}, floats);
  at::Tensor v_normals = at::zeros({count, 3}, floats), v_opacities = at::zeros({count}, floats);
  at::Tensor v_colors = at::zeros({count, 3}, floats), v_depths = at::zeros({count}, floats);
  const at::Tensor packed = rows.table(stream);
  const auto* table = reinterpret_cast<const float4*>(packed.const_data_ptr<float>());
  const SurfelImageGradients image = {out.const_data_ptr<float>(),   geometry.const_data_ptr<float>(),
                                      alpha.const_data_ptr<float>(), last.const_data_ptr<int32_t>(),
                                      v_out.const_data_ptr<float>(), v_geometry.const_data_ptr<float>(),
                                      v_alpha.const_data_ptr<float>()};
  const SurfelRowSums sums = {v_means2d.mutable_data_ptr<float>(),   v_transforms.mutable_data_ptr<float>(),
                              v_normals.mutable_data_ptr<float>(),   v_opacities.mutable_data_ptr<float>(),
                              v_colors.mutable_data_ptr<float>(),    v_depths.mutable_data_ptr<float>()};
  for (const PatchGroup& group : cut.groups)
    NSMG_CUDA_CHECK(rasterize_surfels_backward(group, rows.raw, table, image, sums, stream));
  return {v_means2d, v_transforms, v_normals, v_opacities, v_colors, v_depths};
}

}  // namespace surfels_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("project_surfels", &nsmg::surfels_bind::project_rows);
  m.impl("project_surfels_backward", &nsmg::surfels_bind::project_rows_backward);
  m.impl("rasterize_surfels", &nsmg::surfels_bind::rasterize);
  m.impl("rasterize_surfels_backward", &nsmg::surfels_bind::rasterize_backward);
}
