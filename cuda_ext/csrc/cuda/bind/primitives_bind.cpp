// Projection and compositing of 2D Gaussians and convexes, and their gradients, on CUDA: once for all primitives.

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
    found.at[c] = call.out<float>(shape, zero);
  }
  return found;
}

template <typename Primitive>
PrimitivePoints<Primitive> take_points(Call& call) {
  PrimitivePoints<Primitive> in = {};
  in.points = cuda_count(call.first().size(0), "points");
  in.columns = take_columns<typename Primitive::PointColumns>(call, in.points);
  in.cameras = call.read<Cameras>("viewmats[V,4,4] Ks[V,L,3] near far");
  in.intrinsics_rows = call.read<int>("L");
  in.sizes = call.read<const int64_t*>("sizes[2V]");
  in.view_ids = call.read<const int32_t*>("view_ids[M]");
  in.point_ids = call.read<const int32_t*>("point_ids[M]");
  in.views = call.read<int>("V");
  in.rows = call.read<int>("M");
  return in;
}

template <typename Primitive>
void project(Call& call) {
  const PrimitivePoints<Primitive> in = take_points<Primitive>(call);
  const bool zero = in.views == 0;  // then no kernel runs that writes
  PrimitiveProjected<Primitive> out;
  out.columns = out_columns<typename Primitive::ProjectedColumns>(call, in.rows, zero);
  out.radii = call.out<int32_t>({in.rows, 2}, zero);
  call.run(project_primitives<Primitive>, in, out);
}

template <typename Primitive>
void project_backward(Call& call) {
  constexpr int kGroup = kPointGroup<Primitive>;
  const PrimitivePoints<Primitive> in = take_points<Primitive>(call);
  const int64_t views = in.views;
  const int groups = groups_of(in.points, kGroup);
  const int blocks = cuda_count(views * groups, "blocks of points");
  PrimitivePointGradients<Primitive> g = {};
  g.radii = call.read<const int32_t*>("radii[M,2]");
  g.given = take_columns<typename Primitive::ProjectedColumns>(call, in.rows);
  g.columns = out_columns<typename Primitive::PointColumns>(call, in.points, views == 0);
  g.viewmats = call.out<float>({views, 4, 4}, true);
  int32_t* starts = call.scratch<int32_t>(int64_t{blocks} + 1);
  g.starts = starts;
  g.poses = call.scratch<float>(views * 12 * groups);
  call.run(find_group_starts, in.view_ids, in.point_ids, in.rows, in.views, kGroup, groups, starts);
  call.run(project_primitives_backward<Primitive>, in, g);
}

// The inputs of compositing.
template <typename Primitive>
struct Rows {
  RowPointers<Primitive> columns;
  Cut cut;
  RasterShape shape;
  RasterInputs lists = {};  // the lists alone

  explicit Rows(Call& call)
      : columns(take_columns<typename Primitive::RowColumns>(call, call.first().size(0))),
        cut(call.integers("patches"), kFastTile) {
    TORCH_CHECK_VALUE(call.integer("tile_size") == kFastTile, "rasterize_", Primitive::kName,
                      ": on CUDA tile_size must be ", kFastTile, ".");
    call.set('T', cut.tiles);  // there is one offset more than the patches have tiles
    lists.tile_offsets = call.read<const int32_t*>("tile_offsets[T+1]");
    lists.row_ids = call.read<const int32_t*>("row_ids[I]");
    const int rows = cuda_count(call.first().size(0), "rows");
    shape = primitive_shape<Primitive>(rows, call.read<int>("I"), cut.tiles);
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
  call.run(pack_primitives<Primitive>, rows.columns, rows.shape, state, plan);
  for (const PatchGroup& group : rows.cut.groups)
    call.run(launch_describe, group, rows.lists, rows.shape, state, plan);
  call.run(launch_order, rows.lists, rows.shape, state, plan);
  call.run(draw_primitives<Primitive>, rows.lists.row_ids, rows.shape, state, plan, outputs);
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
  given.last = call.in<int32_t>("last", {pixels});
  const float* kept = call.floats("state", {state.place(nullptr, rows.shape)});
  state.place(const_cast<float*>(kept), rows.shape);  // the kernels read it only
  given.v_out = call.floats("v_out", {pixels, 3});
  given.v_extra = call.floats(call.next_name(), extra_shape);
  given.v_alpha = call.floats("v_alpha", {pixels});
  const at::Tensor records = at::zeros({rows.shape.rows, 4 * kSumQuads<Primitive>}, call.options(at::kFloat));
  const auto gradients = out_columns<typename Primitive::RowColumns>(call, rows.shape.rows);
  call.run(draw_primitives_backward<Primitive>, rows.lists.row_ids, rows.shape, state, given,
           records.mutable_data_ptr<float>(), gradients);
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
