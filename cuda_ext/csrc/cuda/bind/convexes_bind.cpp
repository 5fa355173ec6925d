// ns_multigpu::project_convexes, rasterize_convexes and their gradients on CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "common/convex_pixel.h"
#include "cuda/bind/check.h"
#include "cuda/raster/convexes.h"
#include "cuda/bind/patch_groups.h"

namespace nsmg {
namespace convexes_bind {

constexpr int kLines = 3 * kCorners;

// Checked contiguous inputs; they own what the raw pointers of `raw` point at.
struct Points {
  at::Tensor means, corners, deltas, sigmas, opacities, viewmats, Ks, view_ids, point_ids;
  ConvexInputs raw;

  Points(const at::Tensor& means_, const at::Tensor& corners_, const at::Tensor& deltas_, const at::Tensor& sigmas_, const at::Tensor& opacities_,
         const at::Tensor& viewmats_, const at::Tensor& Ks_, at::IntArrayRef sizes, const at::Tensor& view_ids_,
         const at::Tensor& point_ids_, double near_plane, double far_plane) {
    const int points = cuda_count(means_.size(0), "points"), views = cuda_count(viewmats_.size(0), "views");
    const int rows = cuda_count(point_ids_.numel(), "rows");
    TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2LL * views, "sizes must hold 2 numbers a view.");
    means = cuda_floats(means_, "means", {-1, 3}, means_);
    corners = cuda_floats(corners_, "corners", {points, kLines}, means);
    deltas = cuda_floats(deltas_, "deltas", {points}, means);
    sigmas = cuda_floats(sigmas_, "sigmas", {points}, means);
    opacities = cuda_floats(opacities_, "opacities", {points}, means);
    viewmats = cuda_floats(viewmats_, "viewmats", {-1, 4, 4}, means);
    Ks = cuda_floats(Ks_, "Ks", {views, 3, 3}, means);
    view_ids = cuda_ints(view_ids_, "view_ids", {rows}, means);
    point_ids = cuda_ints(point_ids_, "point_ids", {rows}, means);
    raw = {means.const_data_ptr<float>(),
           corners.const_data_ptr<float>(),
           deltas.const_data_ptr<float>(),
           sigmas.const_data_ptr<float>(),
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

Projected project_rows(const at::Tensor& means, const at::Tensor& corners, const at::Tensor& deltas, const at::Tensor& sigmas,
                       const at::Tensor& opacities, const at::Tensor& viewmats, const at::Tensor& Ks,
                       at::IntArrayRef sizes, const at::Tensor& view_ids, const at::Tensor& point_ids,
                       double near_plane, double far_plane) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Points in(means, corners, deltas, sigmas, opacities, viewmats, Ks, sizes, view_ids, point_ids, near_plane, far_plane);
  const int64_t rows = in.raw.rows;
  const auto options = means.options();
  const at::Tensor means2d = in.made({rows, 2}, options), lines = in.made({rows, kLines}, options),
                   sharpness = in.made({rows}, options), depths = in.made({rows}, options),
                   row_opacities = in.made({rows}, options), radii = in.made({rows, 2}, options.dtype(at::kInt));
  NSMG_CUDA_CHECK(project_convexes(in.raw,
                                  {means2d.mutable_data_ptr<float>(), lines.mutable_data_ptr<float>(),
                                   sharpness.mutable_data_ptr<float>(), depths.mutable_data_ptr<float>(),
                                   row_opacities.mutable_data_ptr<float>(), radii.mutable_data_ptr<int32_t>()},
                                  c10::cuda::getCurrentCUDAStream()));
  return {means2d, lines, sharpness, depths, row_opacities, radii};
}

Projected project_rows_backward(
    const at::Tensor& means, const at::Tensor& corners, const at::Tensor& deltas, const at::Tensor& sigmas, const at::Tensor& opacities,
    const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes, const at::Tensor& view_ids,
    const at::Tensor& point_ids, double near_plane, double far_plane, const at::Tensor& radii_,
    const at::Tensor& v_means2d_, const at::Tensor& v_lines_, const at::Tensor& v_sharpness_,
    const at::Tensor& v_depths_, const at::Tensor& v_row_opacities_) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Points in(means, corners, deltas, sigmas, opacities, viewmats, Ks, sizes, view_ids, point_ids, near_plane, far_plane);
  const int64_t rows = in.raw.rows, points = in.raw.points, views = in.raw.views;
  const at::Tensor radii = cuda_ints(radii_, "radii", {rows, 2}, in.means),
                   v_means2d = cuda_floats(v_means2d_, "v_means2d", {rows, 2}, in.means),
                   v_lines = cuda_floats(v_lines_, "v_lines", {rows, kLines}, in.means),
                   v_sharpness = cuda_floats(v_sharpness_, "v_sharpness", {rows}, in.means),
                   v_depths = cuda_floats(v_depths_, "v_depths", {rows}, in.means),
                   v_row_opacities = cuda_floats(v_row_opacities_, "v_row_opacities", {rows}, in.means);
  const auto options = means.options();
  const at::Tensor v_means = in.made({points, 3}, options), v_corners = in.made({points, kLines}, options),
                   v_deltas = in.made({points}, options), v_sigmas = in.made({points}, options), v_opacities = in.made({points}, options);
  const at::Tensor v_viewmats = at::zeros({views, 4, 4}, options);
  const int groups = groups_of(in.raw.points, kConvexGroup);
  cuda_count(views * groups, "blocks of points");
  const at::Tensor starts = at::empty({views * groups + 1}, options.dtype(at::kInt));
  const at::Tensor poses = at::empty({views, 12, groups}, options);
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  NSMG_CUDA_CHECK(find_group_starts(in.raw.view_ids, in.raw.point_ids, in.raw.rows, in.raw.views, kConvexGroup, groups,
                                    starts.mutable_data_ptr<int32_t>(), stream));
  NSMG_CUDA_CHECK(project_convexes_backward(
      in.raw,
      {v_means2d.const_data_ptr<float>(), v_lines.const_data_ptr<float>(), v_sharpness.const_data_ptr<float>(),
       v_depths.const_data_ptr<float>(), v_row_opacities.const_data_ptr<float>(), radii.const_data_ptr<int32_t>(),
       v_means.mutable_data_ptr<float>(), v_corners.mutable_data_ptr<float>(), v_deltas.mutable_data_ptr<float>(), v_sigmas.mutable_data_ptr<float>(),
       v_opacities.mutable_data_ptr<float>(), v_viewmats.mutable_data_ptr<float>(), starts.const_data_ptr<int32_t>(),
       poses.mutable_data_ptr<float>()},
      stream));
  return {v_means, v_corners, v_deltas, v_sigmas, v_opacities, v_viewmats};
}

struct Rows {
  at::Tensor means2d, lines, sharpness, opacities, colors, depths, tile_offsets, row_ids;
  ConvexRaster raw;

  Rows(const at::Tensor& means2d_, const at::Tensor& lines_, const at::Tensor& sharpness_,
       const at::Tensor& opacities_, const at::Tensor& colors_, const at::Tensor& depths_,
       const at::Tensor& tile_offsets_, const at::Tensor& row_ids_, const Cut& cut, int64_t tile_size) {
    means2d = cuda_floats(means2d_, "means2d", {-1, 2}, means2d_);
    const int rows = cuda_count(means2d.size(0), "rows");
    lines = cuda_floats(lines_, "lines", {rows, kLines}, means2d);
    sharpness = cuda_floats(sharpness_, "sharpness", {rows}, means2d);
    opacities = cuda_floats(opacities_, "row_opacities", {rows}, means2d);
    colors = cuda_floats(colors_, "colors", {rows, 3}, means2d);
    depths = cuda_floats(depths_, "depths", {rows}, means2d);
    tile_offsets = cuda_ints(tile_offsets_, "tile_offsets (one number more than the patches have tiles)",
                             {cut.tiles + 1}, means2d);
    row_ids = cuda_ints(row_ids_, "row_ids", {-1}, means2d);
    raw = {means2d.const_data_ptr<float>(),   lines.const_data_ptr<float>(),
           sharpness.const_data_ptr<float>(),   opacities.const_data_ptr<float>(),
           colors.const_data_ptr<float>(),    depths.const_data_ptr<float>(),
           tile_offsets.const_data_ptr<int32_t>(), row_ids.const_data_ptr<int32_t>(),
           rows,                              cuda_count(row_ids.size(0), "intersections"),
           int(tile_size)};
  }

  // The rows packed, which every pass reads.
  at::Tensor table(cudaStream_t stream) const {
    at::Tensor packed = at::empty({raw.rows, 4 * kConvexQuads}, means2d.options());
    NSMG_CUDA_CHECK(pack_convexes(raw, reinterpret_cast<float4*>(packed.mutable_data_ptr<float>()), stream));
    return packed;
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> rasterize(
    const at::Tensor& means2d, const at::Tensor& lines, const at::Tensor& sharpness,
    const at::Tensor& row_opacities, const at::Tensor& colors, const at::Tensor& depths,
    const at::Tensor& tile_offsets, const at::Tensor& row_ids, at::IntArrayRef patches, int64_t tile_size) {
  const Cut cut(patches, tile_size);
  const Rows rows(means2d, lines, sharpness, row_opacities, colors, depths, tile_offsets, row_ids, cut, tile_size);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::TensorOptions floats = rows.means2d.options();
  at::Tensor out = at::empty({cut.pixels, 3}, floats), depth = at::empty({cut.pixels}, floats);
  at::Tensor alpha = at::empty({cut.pixels}, floats), last = at::empty({cut.pixels}, floats.dtype(at::kInt));
  const at::Tensor packed = rows.table(stream);
  const auto* table = reinterpret_cast<const float4*>(packed.const_data_ptr<float>());
  const ConvexImage image = {out.mutable_data_ptr<float>(), depth.mutable_data_ptr<float>(),
                             alpha.mutable_data_ptr<float>(), last.mutable_data_ptr<int32_t>()};
  for (const PatchGroup& group : cut.groups)
    NSMG_CUDA_CHECK(rasterize_convexes(group, rows.raw, table, image, stream));
  return {out, depth, alpha, last};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients rasterize_backward(const at::Tensor& means2d, const at::Tensor& lines, const at::Tensor& sharpness,
                             const at::Tensor& row_opacities, const at::Tensor& colors, const at::Tensor& depths,
                             const at::Tensor& tile_offsets, const at::Tensor& row_ids, at::IntArrayRef patches,
                             int64_t tile_size, const at::Tensor& out_, const at::Tensor& depth_,
                             const at::Tensor& alpha_, const at::Tensor& last_, const at::Tensor& v_out_,
                             const at::Tensor& v_depth_, const at::Tensor& v_alpha_) {
  const Cut cut(patches, tile_size);
  const Rows rows(means2d, lines, sharpness, row_opacities, colors, depths, tile_offsets, row_ids, cut, tile_size);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor& like = rows.means2d;
  const int64_t count = rows.raw.rows, pixels = cut.pixels;
  const at::Tensor out = cuda_floats(out_, "out", {pixels, 3}, like),
                   depth = cuda_floats(depth_, "depth", {pixels}, like),
                   alpha = cuda_floats(alpha_, "alpha", {pixels}, like), last = cuda_ints(last_, "last", {pixels}, like),
                   v_out = cuda_floats(v_out_, "v_out", {pixels, 3}, like),
                   v_depth = cuda_floats(v_depth_, "v_depth", {pixels}, like),
                   v_alpha = cuda_floats(v_alpha_, "v_alpha", {pixels}, like);
  const at::TensorOptions floats = like.options();
  at::Tensor v_means2d = at::zeros({count, 2}, floats), v_lines = at::zeros({count, kLines}, floats);
  at::Tensor v_sharpness = at::zeros({count}, floats), v_opacities = at::zeros({count}, floats);
  at::Tensor v_colors = at::zeros({count, 3}, floats), v_depths = at::zeros({count}, floats);
  const at::Tensor packed = rows.table(stream);
  const auto* table = reinterpret_cast<const float4*>(packed.const_data_ptr<float>());
  const ConvexImageGradients image = {out.const_data_ptr<float>(),   depth.const_data_ptr<float>(),
                                      alpha.const_data_ptr<float>(), last.const_data_ptr<int32_t>(),
                                      v_out.const_data_ptr<float>(), v_depth.const_data_ptr<float>(),
                                      v_alpha.const_data_ptr<float>()};
  const ConvexRowSums sums = {v_means2d.mutable_data_ptr<float>(),   v_lines.mutable_data_ptr<float>(),
                              v_sharpness.mutable_data_ptr<float>(),   v_opacities.mutable_data_ptr<float>(),
                              v_colors.mutable_data_ptr<float>(),    v_depths.mutable_data_ptr<float>()};
  for (const PatchGroup& group : cut.groups)
    NSMG_CUDA_CHECK(rasterize_convexes_backward(group, rows.raw, table, image, sums, stream));
  return {v_means2d, v_lines, v_sharpness, v_opacities, v_colors, v_depths};
}

}  // namespace convexes_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("project_convexes", &nsmg::convexes_bind::project_rows);
  m.impl("project_convexes_backward", &nsmg::convexes_bind::project_rows_backward);
  m.impl("rasterize_convexes", &nsmg::convexes_bind::rasterize);
  m.impl("rasterize_convexes_backward", &nsmg::convexes_bind::rasterize_backward);
}
