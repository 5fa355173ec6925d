// Culling, the projections of rows, their colours and the series behind them on CUDA.

#include "cuda/bind/call.h"
#include "cuda/project/condition.h"
#include "cuda/project/cull.h"
#include "cuda/project/project.h"
#include "cuda/project/project_axes.h"
#include "cuda/project/series.h"
#include "cuda/project/sh.h"

#include <ATen/ops/arange.h>

namespace nsmg {
namespace project_bind {

Cameras cameras(Call& call, int views) {
  return {call.floats("viewmats", {views, 4, 4}), call.floats("Ks", {views, 3, 3}), call.number("near"),
          call.number("far")};
}

// The first row of each group of points in each view.
const int32_t* group_starts(Call& call, const int32_t* view_ids, const int32_t* point_ids, int rows, int views,
                            int group_points, int groups) {
  cuda_count(int64_t{views} * groups, "blocks of points");
  int32_t* starts = call.scratch<int32_t>(int64_t{views} * groups + 1);
  NSMG_CUDA_CHECK(
      find_group_starts(view_ids, point_ids, rows, views, group_points, groups, starts, call.stream()));
  return starts;
}

// Waits for the device: the number of rows is read back.
void cull(Call& call) {
  const int points = call.count("means", "points"), views = call.count("viewmats", "views");
  const CullInputs in = {call.floats("means", {points, 3}),
                         call.floats("scales", {points, 3}),
                         call.floats("opacities", {points}),
                         cameras(call, views),
                         call.integers_of("sizes", 2, views, "view"),
                         call.integers_of("rects", 4, views, "view"),
                         points,
                         views,
                         call.number("eps2d")};
  const int64_t parts = int64_t{views} * groups_of(points, kCullPoints);
  const int count = cuda_count(parts + 1, "blocks of points");
  auto* masks = reinterpret_cast<uint32_t*>(call.scratch<int32_t>(parts * kCullWords));
  int64_t* counts = call.scratch<int64_t>(count);
  const at::Tensor offsets = at::empty({count}, call.options(at::kLong));
  NSMG_CUDA_CHECK(cull_mark(in, masks, counts, call.stream()));
  size_t bytes = 0;
  NSMG_CUDA_CHECK(exclusive_sum(nullptr, bytes, nullptr, nullptr, count, call.stream()));
  void* temporary = call.scratch_bytes(static_cast<int64_t>(bytes));
  NSMG_CUDA_CHECK(
      exclusive_sum(temporary, bytes, counts, offsets.mutable_data_ptr<int64_t>(), count, call.stream()));
  const int rows = cuda_count(offsets.narrow(0, count - 1, 1).item<int64_t>(), "rows");
  int32_t* view_ids = call.out<int32_t>({rows});
  int32_t* point_ids = call.out<int32_t>({rows});
  NSMG_CUDA_CHECK(cull_write(masks, offsets.const_data_ptr<int64_t>(), points, views, view_ids, point_ids,
                             call.stream()));
}

ProjectInputs project_inputs(Call& call) {
  const int points = call.count("means", "points"), views = call.count("viewmats", "views");
  const int rows = call.count("point_ids", "rows");
  return {call.floats("means", {points, 3}),
          call.floats("quats", {points, 4}, 16),
          call.floats("scales", {points, 3}),
          call.floats("opacities", {points}),
          cameras(call, views),
          call.integers_of("sizes", 2, views, "view"),
          call.ints("view_ids", {rows}),
          call.ints("point_ids", {rows}),
          points,
          views,
          rows,
          call.number("eps2d"),
          call.flag("antialiased")};
}

// An output. The kernels write every element of it, but without views none runs.
float* made(Call& call, const ProjectInputs& in, at::IntArrayRef shape) {
  return in.views == 0 ? call.out_zeros<float>(shape) : call.out<float>(shape);
}

void project(Call& call) {
  const ProjectInputs in = project_inputs(call);
  const int64_t rows = in.rows;
  const ProjectOutputs out = {made(call, in, {rows, 2}), made(call, in, {rows, 3}), made(call, in, {rows}),
                              made(call, in, {rows}),
                              in.views == 0 ? call.out_zeros<int32_t>({rows, 2}) : call.out<int32_t>({rows, 2})};
  NSMG_CUDA_CHECK(nsmg::project(in, out, call.stream()));
}

// The conics are recomputed with the rest of the footprint, which costs less than to read them.
void project_backward(Call& call) {
  const ProjectInputs in = project_inputs(call);
  const int64_t rows = in.rows, points = in.points, views = in.views;
  const int groups = groups_of(in.points, kProjectGroup);
  ProjectGradients g = {};
  g.radii = call.ints("radii", {rows, 2});
  g.means2d = call.floats("v_means2d", {rows, 2}, 16);
  g.conics = call.floats("v_conics", {rows, 3});
  g.depths = call.floats("v_depths", {rows});
  g.opacities = call.floats("v_row_opacities", {rows});
  g.means = made(call, in, {points, 3});
  g.quats = made(call, in, {points, 4});
  g.scales = made(call, in, {points, 3});
  g.opacities_out = made(call, in, {points});
  g.viewmats = call.out_zeros<float>({views, 4, 4});
  g.starts = group_starts(call, in.view_ids, in.point_ids, in.rows, in.views, kProjectGroup, groups);
  g.poses = call.scratch<float>(views * 12 * groups);
  NSMG_CUDA_CHECK(nsmg::project_backward(in, g, call.stream()));
}

AxesInputs axes_inputs(Call& call) {
  const int rows = call.count("means", "rows"), views = call.count("viewmats", "views");
  TORCH_CHECK_VALUE(views > 0 || rows == 0, "there are ", rows, " rows and no view.");
  return {call.floats("means", {rows, 3}),
          call.floats("axes", {rows, 3, 3}),
          call.floats("opacities", {rows}),
          cameras(call, views),
          call.integers_of("sizes", 2, views, "view"),
          call.ints("view_ids", {rows}),
          views,
          rows,
          call.number("eps2d"),
          call.flag("antialiased")};
}

void project_axes(Call& call) {
  const AxesInputs in = axes_inputs(call);
  const int64_t rows = in.rows;
  const ProjectOutputs out = {call.out<float>({rows, 2}), call.out<float>({rows, 3}), call.out<float>({rows}),
                              call.out<float>({rows}), call.out<int32_t>({rows, 2})};
  NSMG_CUDA_CHECK(nsmg::project_axes(in, out, call.stream()));
}

void project_axes_backward(Call& call) {
  const AxesInputs in = axes_inputs(call);
  const int64_t rows = in.rows, views = in.views;
  const int groups = groups_of(in.rows, kAxesGroup);
  const at::Tensor& own = call.hold(at::arange(rows, call.options(at::kInt)));  // each row is a point of its own
  AxesGradients g = {};
  g.radii = call.ints("radii", {rows, 2});
  g.means2d = call.floats("v_means2d", {rows, 2});
  g.conics = call.floats("v_conics", {rows, 3});
  g.depths = call.floats("v_depths", {rows});
  g.row_opacities = call.floats("v_row_opacities", {rows});
  g.means = call.out<float>({rows, 3});
  g.axes = call.out<float>({rows, 3, 3});
  g.opacities = call.out<float>({rows});
  g.viewmats = call.out_zeros<float>({views, 4, 4});
  g.starts = group_starts(call, in.view_ids, own.const_data_ptr<int32_t>(), in.rows, in.views, kAxesGroup, groups);
  g.poses = call.scratch<float>(views * 12 * groups);
  NSMG_CUDA_CHECK(nsmg::project_axes_backward(in, g, call.stream()));
}

ConditionInputs condition_inputs(Call& call) {
  const int points = call.count("means", "points"), views = call.count("view_times", "views");
  const int rows = call.count("point_ids", "rows");
  return {call.floats("means", {points, 3}),
          call.floats("times", {points}),
          call.floats("left", {points, 4}, 16),
          call.floats("motions", {points, 4}, 16),
          call.floats("scales", {points, 4}, 16),
          call.floats("opacities", {points}),
          call.floats("view_times", {views}),
          call.ints("view_ids", {rows}),
          call.ints("point_ids", {rows}),
          points,
          views,
          rows};
}

void condition(Call& call) {
  const ConditionInputs in = condition_inputs(call);
  const int64_t rows = in.rows;
  const ConditionOutputs out = {call.out<float>({rows, 3}), call.out<float>({rows, 3, 3}), call.out<float>({rows})};
  NSMG_CUDA_CHECK(nsmg::condition(in, out, call.stream()));
}

void condition_backward(Call& call) {
  const ConditionInputs in = condition_inputs(call);
  const int64_t rows = in.rows, points = in.points;
  const int groups = groups_of(in.points, kConditionGroup);
  ConditionGradients g = {};
  g.row_means = call.floats("v_row_means", {rows, 3});
  g.axes = call.floats("v_axes", {rows, 3, 3});
  g.row_opacities = call.floats("v_row_opacities", {rows});
  g.means = call.out<float>({points, 3});
  g.times = call.out<float>({points});
  g.left = call.out<float>({points, 4});
  g.motions = call.out<float>({points, 4});
  g.scales = call.out<float>({points, 4});
  g.opacities = call.out<float>({points});
  g.starts = group_starts(call, in.view_ids, in.point_ids, in.rows, in.views, kConditionGroup, groups);
  NSMG_CUDA_CHECK(nsmg::condition_backward(in, g, call.stream()));
}

ShInputs sh_inputs(Call& call) {
  const int64_t degree = call.integer("degree"), needed = (degree + 1) * (degree + 1) - 1;
  TORCH_CHECK_VALUE(degree >= 0 && degree <= 3, "degree must be 0, 1, 2 or 3, not ", degree, ".");
  const int points = call.count("means", "points"), views = call.count("camera_centers", "views");
  const int rows = call.count("point_ids", "rows");
  const at::Tensor rest = call.checked("sh_rest", {points, -1, 3}, at::kFloat);
  TORCH_CHECK_VALUE(rest.size(1) >= needed && rest.size(1) < (1 << 20), "sh_rest must hold at least ", needed,
                    " bases for degree ", degree, ", not ", rest.size(1), ".");
  return {call.floats("means", {points, 3}),
          call.floats("camera_centers", {views, 3}),
          call.floats("sh_dc", {points, 3}),
          rest.const_data_ptr<float>(),
          call.ints("view_ids", {rows}),
          call.ints("point_ids", {rows}),
          points,
          views,
          rows,
          static_cast<int>(rest.size(1)),
          static_cast<int>(degree)};
}

void sh_colors(Call& call) {
  const ShInputs in = sh_inputs(call);
  NSMG_CUDA_CHECK(nsmg::sh_colors(in, call.out<float>({in.rows, 3}), call.stream()));
}

void sh_colors_backward(Call& call) {
  const ShInputs in = sh_inputs(call);
  const int64_t points = in.points, views = in.views;
  const int groups = groups_of(in.points, kShGroup);
  ShGradients g = {};
  g.colors = call.floats("colors", {in.rows, 3});
  g.v_colors = call.floats("v_colors", {in.rows, 3});
  g.means = call.out<float>({points, 3});
  g.centers = call.out<float>({views, 3});
  g.dc = call.out<float>({points, 3});
  g.rest = call.out<float>({points, in.rest_bases, 3});
  g.starts = group_starts(call, in.view_ids, in.point_ids, in.rows, in.views, kShGroup, groups);
  g.partial_centers = call.scratch<float>(views * 3 * groups);
  NSMG_CUDA_CHECK(nsmg::sh_colors_backward(in, g, call.stream()));
}

SeriesInputs series_inputs(Call& call) {
  const int rows = call.count("point_ids", "rows"), points = call.count("base", "points");
  const int width = call.count("base", "numbers of a point", 1), terms = call.count("terms", "terms", 1);
  cuda_count(int64_t{rows} * width, "numbers of rows");
  return {call.floats("base", {points, width}),
          call.floats("terms", {points, terms, width}),
          call.floats("weights", {rows, terms}),
          call.ints("point_ids", {rows}),
          points,
          call.counted("views", "views"),
          rows,
          width,
          terms};
}

void series(Call& call) {
  const SeriesInputs in = series_inputs(call);
  call.ints("view_ids", {in.rows});
  NSMG_CUDA_CHECK(nsmg::series(in, call.out<float>({in.rows, in.width}), call.stream()));
}

void series_backward(Call& call) {
  const SeriesInputs in = series_inputs(call);
  const int groups = groups_of(in.points, kSeriesGroup);
  SeriesGradients g = {};
  g.rows = call.floats("v_rows", {in.rows, in.width});
  g.base = call.out<float>({in.points, in.width});
  g.terms = call.out<float>({in.points, in.count, in.width});
  g.weights = call.out<float>({in.rows, in.count});
  g.starts =
      group_starts(call, call.ints("view_ids", {in.rows}), in.point_ids, in.rows, in.views, kSeriesGroup, groups);
  NSMG_CUDA_CHECK(nsmg::series_backward(in, g, call.stream()));
}

}  // namespace project_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  namespace bind = nsmg::project_bind;
  m.impl("cull", nsmg::bound<bind::cull>());
  m.impl("project", nsmg::bound<bind::project>());
  m.impl("project_backward", nsmg::bound<bind::project_backward>());
  m.impl("project_axes", nsmg::bound<bind::project_axes>());
  m.impl("project_axes_backward", nsmg::bound<bind::project_axes_backward>());
  m.impl("condition", nsmg::bound<bind::condition>());
  m.impl("condition_backward", nsmg::bound<bind::condition_backward>());
  m.impl("sh_colors", nsmg::bound<bind::sh_colors>());
  m.impl("sh_colors_backward", nsmg::bound<bind::sh_colors_backward>());
  m.impl("series", nsmg::bound<bind::series>());
  m.impl("series_backward", nsmg::bound<bind::series_backward>());
}
