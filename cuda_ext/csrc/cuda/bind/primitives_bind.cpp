// Projection and compositing of 2D Gaussians and convexes, and their gradients, on CUDA: once for all primitives.

#include "common/arguments.h"
#include "common/convex_pixel.h"
#include "common/surfel_pixel.h"
#include "cuda/bind/call.h"
#include "cuda/bind/patch_groups.h"
#include "cuda/common/primitive.h"

#include <string>

namespace nsmg {
namespace primitives_bind {

// Columns [count, ...]: the arguments behind the one that was read last.
template <typename Columns>
typename Columns::template Pointers<const float> take_columns(Call& call, int64_t count) {
  typename Columns::template Pointers<const float> found;
  for (int c = 0; c < Columns::kCount; ++c)
    found.at[c] = call.floats(call.next_name(), column_shape(count, Columns::width(c)));
  return found;
}

// Results [count, ...], in the schema's order.
template <typename Columns>
typename Columns::template Pointers<float> out_columns(Call& call, int64_t count, bool zero = false) {
  typename Columns::template Pointers<float> found;
  for (int c = 0; c < Columns::kCount; ++c) {
    const auto shape = column_shape(count, Columns::width(c));
    found.at[c] = zero ? call.out_zeros<float>(shape) : call.out<float>(shape);
  }
  return found;
}

template <typename Primitive>
PrimitivePoints<Primitive> take_points(Call& call) {
  const int points = cuda_count(call.like().size(0), "points");  // the first argument is a column
  PrimitivePoints<Primitive> in = {};
  in.columns = take_columns<typename Primitive::PointColumns>(call, points);
  in.views = call.count("viewmats", "views");
  in.cameras.viewmats = call.floats("viewmats", {in.views, 4, 4});
  in.cameras.Ks = call.floats("Ks", {in.views, 3, 3});
  in.sizes = call.integers_of("sizes", 2, in.views, "view");
  in.rows = call.count("view_ids", "rows");
  in.view_ids = call.ints("view_ids", {in.rows});
  in.point_ids = call.ints("point_ids", {in.rows});
  in.cameras.near_plane = call.number("near");
  in.cameras.far_plane = call.number("far");
  in.points = points;
  return in;
}

template <typename Primitive>
void project(Call& call) {
  const PrimitivePoints<Primitive> in = take_points<Primitive>(call);
  const bool zero = in.views == 0;  // then no kernel runs that writes
  PrimitiveProjected<Primitive> out;
  out.columns = out_columns<typename Primitive::ProjectedColumns>(call, in.rows, zero);
  out.radii = zero ? call.out_zeros<int32_t>({in.rows, 2}) : call.out<int32_t>({in.rows, 2});
  NSMG_CUDA_CHECK(project_primitives<Primitive>(in, out, call.stream()));
}

template <typename Primitive>
void project_backward(Call& call) {
  constexpr int kGroup = kPointGroup<Primitive>;
  const PrimitivePoints<Primitive> in = take_points<Primitive>(call);
  const int64_t views = in.views;
  const int groups = groups_of(in.points, kGroup);
  const int blocks = cuda_count(views * groups, "blocks of points");
  PrimitivePointGradients<Primitive> g = {};
  g.radii = call.ints("radii", {in.rows, 2});
  g.given = take_columns<typename Primitive::ProjectedColumns>(call, in.rows);
  g.columns = out_columns<typename Primitive::PointColumns>(call, in.points, views == 0);
  g.viewmats = call.out_zeros<float>({views, 4, 4});
  int32_t* starts = call.scratch<int32_t>(int64_t{blocks} + 1);
  g.starts = starts;
  g.poses = call.scratch<float>(views * 12 * groups);
  NSMG_CUDA_CHECK(
      find_group_starts(in.view_ids, in.point_ids, in.rows, in.views, kGroup, groups, starts, call.stream()));
  NSMG_CUDA_CHECK(project_primitives_backward<Primitive>(in, g, call.stream()));
}

// The inputs of compositing.
template <typename Primitive>
struct Rows {
  RowPointers<Primitive> columns;
  Cut cut;
  RasterShape shape;
  RasterInputs lists = {};  // the lists alone

  explicit Rows(Call& call)
      : columns(take_columns<typename Primitive::RowColumns>(call, call.like().size(0))),  // the first argument is one
        cut(call.integers("patches"), kFastTile) {
    TORCH_CHECK_VALUE(call.integer("tile_size") == kFastTile, "rasterize_", Primitive::kName,
                      ": on CUDA tile_size must be ", kFastTile, ".");
    const int rows = cuda_count(call.like().size(0), "rows");
    lists.tile_offsets = call.ints("tile_offsets", {cut.tiles + 1});  // one number more than the patches have tiles
    const int intersections = call.count("row_ids", "intersections");
    lists.row_ids = call.ints("row_ids", {intersections});
    shape = primitive_shape<Primitive>(rows, intersections, cut.tiles);
  }
};

template <typename Primitive>
void rasterize(Call& call) {
  const Rows<Primitive> rows(call);
  const int64_t pixels = rows.cut.pixels;
  PrimitiveOutputs outputs;
  outputs.out = call.out<float>({pixels, 3});
  outputs.extra = call.out<float>(column_shape(pixels, Primitive::kExtra));
  outputs.alpha = call.out<float>({pixels});
  outputs.last = call.out<int32_t>({pixels});
  outputs.mark_stops = true;
  RasterState state;
  state.place(call.out<float>({state.place(nullptr, rows.shape)}), rows.shape);
  RasterPlan plan;
  plan.place(call.scratch<int32_t>(plan.place(nullptr, rows.shape, false)), rows.shape, false);
  NSMG_CUDA_CHECK(pack_primitives<Primitive>(rows.columns, rows.shape, state, plan, call.stream()));
  for (const PatchGroup& group : rows.cut.groups)
    NSMG_CUDA_CHECK(launch_describe(group, rows.lists, rows.shape, state, plan, call.stream()));
  NSMG_CUDA_CHECK(launch_order(rows.lists, rows.shape, state, plan, call.stream()));
  NSMG_CUDA_CHECK(draw_primitives<Primitive>(rows.lists.row_ids, rows.shape, state, plan, outputs, call.stream()));
}

template <typename Primitive>
void rasterize_backward(Call& call) {
  const Rows<Primitive> rows(call);
  const int64_t pixels = rows.cut.pixels;
  const auto extra_shape = column_shape(pixels, Primitive::kExtra);
  RasterState state;
  PrimitivePixelGradients given;  // each primitive has another name for its pixels' numbers other than colour
  given.out = call.floats("out", {pixels, 3});
  given.extra = call.floats(call.next_name(), extra_shape);
  given.alpha = call.floats("alpha", {pixels});
  given.last = call.ints("last", {pixels});
  const float* kept = call.floats("state", {state.place(nullptr, rows.shape)});
  state.place(const_cast<float*>(kept), rows.shape);  // the kernels read it only
  given.v_out = call.floats("v_out", {pixels, 3});
  given.v_extra = call.floats(call.next_name(), extra_shape);
  given.v_alpha = call.floats("v_alpha", {pixels});
  const at::Tensor records = at::zeros({rows.shape.rows, 4 * kSumQuads<Primitive>}, call.options(at::kFloat));
  const auto gradients = out_columns<typename Primitive::RowColumns>(call, rows.shape.rows);
  NSMG_CUDA_CHECK(draw_primitives_backward<Primitive>(rows.lists.row_ids, rows.shape, state, given,
                                                      records.mutable_data_ptr<float>(), gradients, call.stream()));
}

template <typename Primitive>
void bind(torch::Library& m) {
  const std::string name = Primitive::kName;
  m.impl(("project_" + name).c_str(), bound<project<Primitive>>());
  m.impl(("project_" + name + "_backward").c_str(), bound<project_backward<Primitive>>());
  m.impl(("rasterize_" + name).c_str(), bound<rasterize<Primitive>>());
  m.impl(("rasterize_" + name + "_backward").c_str(), bound<rasterize_backward<Primitive>>());
}

}  // namespace primitives_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  nsmg::primitives_bind::bind<nsmg::SurfelTraits>(m);
  nsmg::primitives_bind::bind<nsmg::ConvexTraits>(m);
}
