// ns_multigpu::rasterize_convexes and its backward on CPU: a tile at a time, a pixel after the other. The gradient of
// each entry of a list is summed over its tile's pixels first, then over lists in their order: the number of threads
// changes no bit.

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "common/convex_pixel.h"
#include "cpu/common/patches.h"
#include "cpu/common/rows.h"

namespace nsmg {
namespace {

constexpr int kLines = 3 * kCorners;

struct Inputs {
  at::Tensor means2d, lines, sharpness, opacities, colors, depths, tile_offsets, row_ids;
  PatchList list;

  Inputs(const at::Tensor& means2d_, const at::Tensor& lines_, const at::Tensor& sharpness_,
         const at::Tensor& opacities_, const at::Tensor& colors_, const at::Tensor& depths_,
         const at::Tensor& tile_offsets_, const at::Tensor& row_ids_, at::IntArrayRef patches, int64_t tile_size)
      : list(patches, tile_size) {
    const auto dtype = means2d_.scalar_type();
    const int64_t rows = means2d_.size(0);
    means2d = checked(means2d_, "means2d", {rows, 2}, dtype);
    lines = checked(lines_, "lines", {rows, kLines}, dtype);
    sharpness = checked(sharpness_, "sharpness", {rows}, dtype);
    opacities = checked(opacities_, "row_opacities", {rows}, dtype);
    colors = checked(colors_, "colors", {rows, 3}, dtype);
    depths = checked(depths_, "depths", {rows}, dtype);
    tile_offsets = checked(tile_offsets_, "tile_offsets", {list.tiles + 1}, at::kInt);
    row_ids = checked(row_ids_, "row_ids", {-1}, at::kInt);
    const int32_t* offsets = tile_offsets.const_data_ptr<int32_t>();
    bool good = offsets[0] >= 0 && offsets[list.tiles] <= row_ids.size(0);
    for (int64_t t = 0; t < list.tiles; ++t) good &= offsets[t] <= offsets[t + 1];
    const int32_t* ids = row_ids.const_data_ptr<int32_t>();
    for (int64_t i = 0; good && i < offsets[list.tiles]; ++i) good &= ids[i] >= 0 && ids[i] < rows;
    TORCH_CHECK_INDEX(good, "rasterize_convexes: tile_offsets or row_ids name what does not exist; take both from "
                            "intersect, of the same rows.");
  }

  template <typename T>
  ConvexSplat<T> splat(int64_t entry) const {
    const int64_t row = row_ids.const_data_ptr<int32_t>()[entry];
    const T *xy = means2d.const_data_ptr<T>() + 2 * row, *line = lines.const_data_ptr<T>() + kLines * row,
            *c = colors.const_data_ptr<T>() + 3 * row;
    ConvexSplat<T> found;
    found.x = xy[0];
    found.y = xy[1];
    for (int k = 0; k < kCorners; ++k) found.lines[k] = {line[3 * k], line[3 * k + 1], line[3 * k + 2]};
    found.sharpness = sharpness.const_data_ptr<T>()[row];
    found.opacity = opacities.const_data_ptr<T>()[row];
    found.color = {c[0], c[1], c[2]};
    found.depth = depths.const_data_ptr<T>()[row];
    return found;
  }
};

// Calls f(the first entry, the tile's splats, each pixel (index, x, y)) for every pixel of every tile.
template <typename T, typename F>
void for_pixels(const Inputs& in, const F& f) {
  const std::vector<Tile> tiles = in.list.cut();
  const int32_t* offsets = in.tile_offsets.const_data_ptr<int32_t>();
  for_each_task(int64_t(tiles.size()), [&] {
    return [&, splats = std::vector<ConvexSplat<T>>()](int64_t number) mutable {
      const Tile& tile = tiles[number];
      splats.clear();
      for (int64_t i = offsets[number]; i < offsets[number + 1]; ++i) splats.push_back(in.splat<T>(i));
      for (int y = tile.y0; y < tile.y1; ++y)
        for (int x = tile.x0; x < tile.x1; ++x)
          f(int64_t(offsets[number]), splats, tile.pixel + (y - tile.y0) * tile.pitch + (x - tile.x0), T(x) + T(0.5),
            T(y) + T(0.5));
    };
  });
}

using Rendered = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Rendered rasterize_convexes(const at::Tensor& means2d, const at::Tensor& lines, const at::Tensor& sharpness,
                            const at::Tensor& row_opacities, const at::Tensor& colors, const at::Tensor& depths,
                            const at::Tensor& tile_offsets, const at::Tensor& row_ids, at::IntArrayRef patches,
                            int64_t tile_size) {
  const Inputs in(means2d, lines, sharpness, row_opacities, colors, depths, tile_offsets, row_ids, patches, tile_size);
  const auto options = means2d.options();
  const int64_t pixels = in.list.pixels;
  at::Tensor out = at::empty({pixels, 3}, options), depth = at::empty({pixels}, options);
  at::Tensor alpha = at::empty({pixels}, options), last = at::empty({pixels}, options.dtype(at::kInt));
  AT_DISPATCH_FLOATING_TYPES(means2d.scalar_type(), "rasterize_convexes", [&] {
    using T = scalar_t;
    T *colored = out.mutable_data_ptr<T>(), *deep = depth.mutable_data_ptr<T>(), *covered = alpha.mutable_data_ptr<T>();
    int32_t* ends = last.mutable_data_ptr<int32_t>();
    for_pixels<T>(in, [&](int64_t first, const std::vector<ConvexSplat<T>>& splats, int64_t pixel, T px, T py) {
      ConvexSums<T> sums = no_convexes<T>();
      int64_t end = -1;
      for (size_t i = 0; i < splats.size() && !sums.closed; ++i) {
        const ConvexPlace<T> m = place_in(splats[i], px, py);
        if (m.raw > T(0) && blend_convex(splats[i], m.raw, sums)) end = first + int64_t(i);
      }
      colored[3 * pixel] = sums.color.x;
      colored[3 * pixel + 1] = sums.color.y;
      colored[3 * pixel + 2] = sums.color.z;
      deep[pixel] = sums.depth;
      covered[pixel] = sums.closed ? -sums.weight : sums.weight;
      ends[pixel] = static_cast<int32_t>(end);
    });
  });
  return {out, depth, alpha, last};
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients rasterize_convexes_backward(const at::Tensor& means2d, const at::Tensor& lines, const at::Tensor& sharpness,
                                      const at::Tensor& row_opacities, const at::Tensor& colors,
                                      const at::Tensor& depths, const at::Tensor& tile_offsets,
                                      const at::Tensor& row_ids, at::IntArrayRef patches, int64_t tile_size,
                                      const at::Tensor& out_, const at::Tensor& depth_, const at::Tensor& alpha_,
                                      const at::Tensor& last_, const at::Tensor& v_out_, const at::Tensor& v_depth_,
                                      const at::Tensor& v_alpha_) {
  const Inputs in(means2d, lines, sharpness, row_opacities, colors, depths, tile_offsets, row_ids, patches, tile_size);
  const auto dtype = means2d.scalar_type();
  const int64_t pixels = in.list.pixels, rows = means2d.size(0);
  const at::Tensor out = checked(out_, "out", {pixels, 3}, dtype), depth = checked(depth_, "depth", {pixels}, dtype),
                   alpha = checked(alpha_, "alpha", {pixels}, dtype), last = checked(last_, "last", {pixels}, at::kInt),
                   v_out = checked(v_out_, "v_out", {pixels, 3}, dtype),
                   v_depth = checked(v_depth_, "v_depth", {pixels}, dtype),
                   v_alpha = checked(v_alpha_, "v_alpha", {pixels}, dtype);
  const auto options = means2d.options();
  const int64_t entries = in.tile_offsets.const_data_ptr<int32_t>()[in.list.tiles];
  at::Tensor sums = at::zeros({entries, kConvexFloats}, options);
  const int64_t widths[6] = {2, kLines, 1, 1, 3, 1};
  const int64_t places[6] = {0, 2, 20, 21, 22, 25};
  std::vector<at::Tensor> found;
  for (const int64_t width : widths)
    found.push_back(width == 1 ? at::zeros({rows}, options) : at::zeros({rows, width}, options));
  AT_DISPATCH_FLOATING_TYPES(dtype, "rasterize_convexes_backward", [&] {
    using T = scalar_t;
    T* entry = sums.mutable_data_ptr<T>();
    const T *o = out.const_data_ptr<T>(), *d = depth.const_data_ptr<T>(), *a = alpha.const_data_ptr<T>(),
            *vo = v_out.const_data_ptr<T>(), *vd = v_depth.const_data_ptr<T>(), *va = v_alpha.const_data_ptr<T>();
    const int32_t* ends = last.const_data_ptr<int32_t>();
    for_pixels<T>(in, [&](int64_t first, const std::vector<ConvexSplat<T>>& splats, int64_t pixel, T px, T py) {
      ConvexWalk<T> walk = begin_convex_walk(o + 3 * pixel, d[pixel], a[pixel], vo + 3 * pixel, vd[pixel], va[pixel]);
      for (int64_t i = 0; first + i <= ends[pixel] && i < int64_t(splats.size()); ++i) {
        const ConvexPlace<T> m = place_in(splats[i], px, py);
        if (m.raw > T(0)) walk_convex(splats[i], m, walk, entry + kConvexFloats * (first + i));
      }
    });
    const int32_t* ids = in.row_ids.const_data_ptr<int32_t>();
    for (int part = 0; part < 6; ++part) {
      T* to = found[part].mutable_data_ptr<T>();
      for (int64_t i = 0; i < entries; ++i)
        for (int64_t c = 0; c < widths[part]; ++c)
          to[widths[part] * ids[i] + c] += entry[kConvexFloats * i + places[part] + c];
    }
  });
  return {found[0], found[1], found[2], found[3], found[4], found[5]};
}

}  // namespace
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("rasterize_convexes", &nsmg::rasterize_convexes);
  m.impl("rasterize_convexes_backward", &nsmg::rasterize_convexes_backward);
}
