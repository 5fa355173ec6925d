// What primitives_bind.cpp does, for pointers.
#include <cstdint>
#include <vector>

#include "common/convex_pixel.h"
#include "common/surfel_pixel.h"
#include "cuda/common/primitive.h"

using namespace nsmg;

extern "C" {

struct Arguments {
  int64_t rows, intersections, tiles, patches;
  const float* columns[6];
  const int32_t *tile_offsets, *row_ids;
  const int32_t* entries;  // [patches, 8] as PatchEntry, at most kPatchGroup of them
  float *out, *extra, *alpha;
  int32_t* last;
  const float *v_out, *v_extra, *v_alpha;
  float* gradients[6];
};

struct Projection {
  int64_t points, views, rows, intrinsics_rows;
  const float *columns[5], *viewmats, *Ks;
  const int64_t* sizes;
  const int32_t *view_ids, *point_ids;
  float near_plane, far_plane;
  float* projected[5];
  int32_t* radii;
  const float* given[5];  // gradients of `projected`
  float *gradients[5], *v_viewmats;
};
}

namespace {

template <typename Primitive>
void draw(const Arguments* a) {
  const RasterShape shape = primitive_shape<Primitive>(a->rows, a->intersections, a->tiles);
  RasterInputs lists = {};
  lists.tile_offsets = a->tile_offsets;
  lists.row_ids = a->row_ids;
  RasterState state;
  std::vector<float4> memory(state.place(nullptr, shape) / 4 + 1);
  state.place(&memory[0].x, shape);
  RasterPlan plan;
  std::vector<int32_t> scratch(plan.place(nullptr, shape, false));
  plan.place(scratch.data(), shape, false);
  PatchGroup group{int(a->patches), 0, int(a->tiles), 0, {}};
  for (int k = 0; k < a->patches; ++k) {
    const int32_t* e = a->entries + 8 * k;
    group.entries[k] = {e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7]};
  }
  RowPointers<Primitive> columns;
  typename Primitive::RowColumns::template Pointers<float> gradients;
  for (int c = 0; c < 6; ++c) columns.at[c] = a->columns[c], gradients.at[c] = a->gradients[c];
  pack_primitives<Primitive>(columns, shape, state, plan, nullptr);
  launch_describe(group, lists, shape, state, plan, nullptr);
  launch_order(lists, shape, state, plan, nullptr);
  PrimitiveOutputs outputs;
  outputs.out = a->out, outputs.extra = a->extra, outputs.alpha = a->alpha, outputs.last = a->last;
  outputs.mark_stops = true;
  draw_primitives<Primitive>(a->row_ids, shape, state, plan, outputs, nullptr);
  PrimitivePixelGradients pixels;
  pixels.out = a->out, pixels.extra = a->extra, pixels.alpha = a->alpha, pixels.last = a->last;
  pixels.v_out = a->v_out, pixels.v_extra = a->v_extra, pixels.v_alpha = a->v_alpha;
  std::vector<float4> records(kSumQuads<Primitive> * a->rows + 1, float4{0, 0, 0, 0});
  draw_primitives_backward<Primitive>(a->row_ids, shape, state, pixels, &records[0].x, gradients, nullptr);
}

template <typename Primitive>
void project(const Projection* a) {
  PrimitivePoints<Primitive> in = {{}, {a->viewmats, a->Ks, a->near_plane, a->far_plane}, int(a->intrinsics_rows),
                                   a->sizes, a->view_ids, a->point_ids, int(a->points), int(a->views), int(a->rows)};
  PrimitiveProjected<Primitive> out = {{}, a->radii};
  const int groups = groups_of(in.points, kPointGroup<Primitive>);
  std::vector<int> starts(in.views * groups + 1);
  std::vector<float> poses(12 * in.views * groups);
  PrimitivePointGradients<Primitive> g = {{}, a->radii, {}, a->v_viewmats, starts.data(), poses.data()};
  for (int c = 0; c < Primitive::PointColumns::kCount; ++c)
    in.columns.at[c] = a->columns[c], g.columns.at[c] = a->gradients[c];
  for (int c = 0; c < 5; ++c) out.columns.at[c] = a->projected[c], g.given.at[c] = a->given[c];
  project_primitives<Primitive>(in, out, nullptr);
  find_group_starts(in.view_ids, in.point_ids, in.rows, in.views, kPointGroup<Primitive>, groups, starts.data(),
                    nullptr);
  project_primitives_backward<Primitive>(in, g, nullptr);
}

}  // namespace

extern "C" void project_surfels(const Projection* a) { project<SurfelTraits>(a); }
extern "C" void project_convexes(const Projection* a) { project<ConvexTraits>(a); }
extern "C" void draw_surfels(const Arguments* a) { draw<SurfelTraits>(a); }
extern "C" void draw_convexes(const Arguments* a) { draw<ConvexTraits>(a); }
