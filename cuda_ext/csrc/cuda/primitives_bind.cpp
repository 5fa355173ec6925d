// Projection and compositing of 2D Gaussians and convexes, and their gradients, on CUDA: once for all primitives.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "common/arguments.h"
#include "common/convex_pixel.h"
#include "common/surfel_pixel.h"
#include "cuda/check.h"
#include "cuda/patch_groups.h"
#include "cuda/primitive.h"

namespace nsmg {
namespace primitives_bind {

// Checked contiguous columns [count, ...], the next arguments.
template <typename Columns>
std::vector<at::Tensor> take_columns(Arguments& arguments, int64_t count, const at::Tensor* like = nullptr) {
  std::vector<at::Tensor> found;
  for (int c = 0; c < Columns::kCount; ++c) {
    const char* name = arguments.name();
    const at::Tensor tensor = arguments.tensor();
    found.push_back(cuda_floats(tensor, name, column_shape(count, Columns::width(c)),
                                like != nullptr ? *like : c > 0 ? found[0] : tensor));
    if (c == 0) count = found[0].size(0);
  }
  return found;
}

at::Tensor take_floats(Arguments& arguments, at::IntArrayRef shape, const at::Tensor& like) {
  const char* name = arguments.name();
  return cuda_floats(arguments.tensor(), name, shape, like);
}

at::Tensor take_ints(Arguments& arguments, at::IntArrayRef shape, const at::Tensor& like) {
  const char* name = arguments.name();
  return cuda_ints(arguments.tensor(), name, shape, like);
}

template <typename Columns>
std::vector<at::Tensor> made(int64_t count, const at::TensorOptions& options, bool zero) {
  std::vector<at::Tensor> found;
  for (int c = 0; c < Columns::kCount; ++c) {
    const auto shape = column_shape(count, Columns::width(c));
    found.push_back(zero ? at::zeros(shape, options) : at::empty(shape, options));
  }
  return found;
}

// The inputs of projection; they own what the raw pointers of `raw` point at.
template <typename Primitive>
struct Points {
  std::vector<at::Tensor> columns;
  at::Tensor viewmats, Ks, view_ids, point_ids;
  std::vector<int64_t> sizes;
  PrimitivePoints<Primitive> raw;

  explicit Points(Arguments& arguments) : columns(take_columns<typename Primitive::PointColumns>(arguments, -1)) {
    const at::Tensor& like = columns[0];
    viewmats = take_floats(arguments, {-1, 4, 4}, like);
    const int points = cuda_count(like.size(0), "points"), views = cuda_count(viewmats.size(0), "views");
    Ks = take_floats(arguments, {views, 3, 3}, like);
    sizes = arguments.integers();
    TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2LL * views, "sizes must hold 2 numbers a view.");
    view_ids = take_ints(arguments, {-1}, like);
    const int rows = cuda_count(view_ids.numel(), "rows");
    point_ids = take_ints(arguments, {rows}, like);
    const auto near_plane = static_cast<float>(arguments.number()), far_plane = static_cast<float>(arguments.number());
    raw = {const_pointers<typename Primitive::PointColumns, float>(columns),
           {viewmats.const_data_ptr<float>(), Ks.const_data_ptr<float>(), near_plane, far_plane},
           sizes.data(),
           view_ids.const_data_ptr<int32_t>(),
           point_ids.const_data_ptr<int32_t>(),
           points,
           views,
           rows};
  }
};

template <typename Primitive>
void project(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  using Projected = typename Primitive::ProjectedColumns;
  Arguments arguments(op, stack);
  const Points<Primitive> in(arguments);
  const c10::cuda::CUDAGuard guard(in.viewmats.device());
  const bool zero = in.raw.views == 0;  // then no kernel runs that writes
  const auto options = in.viewmats.options();
  std::vector<at::Tensor> found = made<Projected>(in.raw.rows, options, zero);
  found.push_back(made<Columns<2>>(in.raw.rows, options.dtype(at::kInt), zero)[0]);
  NSMG_CUDA_CHECK(project_primitives<Primitive>(
      in.raw, {pointers<Projected, float>(found), found.back().mutable_data_ptr<int32_t>()},
      c10::cuda::getCurrentCUDAStream()));
  arguments.give(found);
}

template <typename Primitive>
void project_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  using PointColumns = typename Primitive::PointColumns;
  Arguments arguments(op, stack);
  const Points<Primitive> in(arguments);
  const at::Tensor& like = in.viewmats;
  const c10::cuda::CUDAGuard guard(like.device());
  const int64_t rows = in.raw.rows, views = in.raw.views;
  const at::Tensor radii = take_ints(arguments, {rows, 2}, like);
  const std::vector<at::Tensor> given = take_columns<typename Primitive::ProjectedColumns>(arguments, rows, &like);
  std::vector<at::Tensor> found = made<PointColumns>(in.raw.points, like.options(), views == 0);
  found.push_back(at::zeros({views, 4, 4}, like.options()));
  const int groups = groups_of(in.raw.points, kPointGroup<Primitive>);
  cuda_count(views * groups, "blocks of points");
  const at::Tensor starts = at::empty({views * groups + 1}, like.options().dtype(at::kInt));
  const at::Tensor poses = at::empty({views, 12, groups}, like.options());
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  NSMG_CUDA_CHECK(find_group_starts(in.raw.view_ids, in.raw.point_ids, in.raw.rows, in.raw.views,
                                    kPointGroup<Primitive>, groups, starts.mutable_data_ptr<int32_t>(), stream));
  NSMG_CUDA_CHECK(project_primitives_backward<Primitive>(
      in.raw,
      {const_pointers<typename Primitive::ProjectedColumns, float>(given), radii.const_data_ptr<int32_t>(),
       pointers<PointColumns, float>(found), found.back().mutable_data_ptr<float>(), starts.const_data_ptr<int32_t>(),
       poses.mutable_data_ptr<float>()},
      stream));
  arguments.give(found);
}

// The inputs of compositing.
template <typename Primitive>
struct Rows {
  std::vector<at::Tensor> columns;
  at::Tensor tile_offsets, row_ids;
  Cut cut;
  RasterShape shape;
  RasterInputs lists = {};  // the lists alone

  explicit Rows(Arguments& arguments)
      : columns(take_columns<typename Primitive::RowColumns>(arguments, -1)),
        tile_offsets(take_ints(arguments, {-1}, columns[0])),
        row_ids(take_ints(arguments, {-1}, columns[0])),
        cut(arguments.integers(), kFastTile) {
    TORCH_CHECK_VALUE(arguments.integer() == kFastTile, "rasterize_", Primitive::kName, ": on CUDA tile_size must be ",
                      kFastTile, ".");
    TORCH_CHECK_VALUE(tile_offsets.size(0) == cut.tiles + 1, "tile_offsets must hold one number more than the patches "
                      "have tiles, ", cut.tiles + 1, ", not ", tile_offsets.size(0), ".");
    shape = primitive_shape<Primitive>(cuda_count(columns[0].size(0), "rows"),
                                       cuda_count(row_ids.size(0), "intersections"), cut.tiles);
    lists.tile_offsets = tile_offsets.const_data_ptr<int32_t>();
    lists.row_ids = row_ids.const_data_ptr<int32_t>();
  }
};

template <typename Primitive>
void rasterize(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Arguments arguments(op, stack);
  const Rows<Primitive> rows(arguments);
  const c10::cuda::CUDAGuard guard(rows.columns[0].device());
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  const at::TensorOptions floats = rows.columns[0].options();
  at::Tensor out = at::empty({rows.cut.pixels, 3}, floats), alpha = at::empty({rows.cut.pixels}, floats);
  at::Tensor extra = at::empty(column_shape(rows.cut.pixels, Primitive::kExtra), floats);
  at::Tensor last = at::empty({rows.cut.pixels}, floats.dtype(at::kInt));
  RasterState state;
  at::Tensor kept = at::empty({state.place(nullptr, rows.shape)}, floats);
  state.place(kept.mutable_data_ptr<float>(), rows.shape);
  RasterPlan plan;
  at::Tensor scratch = at::empty({plan.place(nullptr, rows.shape, false)}, floats.dtype(at::kInt));
  plan.place(scratch.mutable_data_ptr<int32_t>(), rows.shape, false);
  NSMG_CUDA_CHECK(pack_primitives<Primitive>(const_pointers<typename Primitive::RowColumns, float>(rows.columns),
                                             rows.shape, state, plan, stream));
  for (const PatchGroup& group : rows.cut.groups)
    NSMG_CUDA_CHECK(launch_describe(group, rows.lists, rows.shape, state, plan, stream));
  NSMG_CUDA_CHECK(launch_order(rows.lists, rows.shape, state, plan, stream));
  PrimitiveOutputs outputs;
  outputs.out = out.mutable_data_ptr<float>();
  outputs.extra = extra.mutable_data_ptr<float>();
  outputs.alpha = alpha.mutable_data_ptr<float>();
  outputs.last = last.mutable_data_ptr<int32_t>();
  outputs.mark_stops = true;
  NSMG_CUDA_CHECK(draw_primitives<Primitive>(rows.lists.row_ids, rows.shape, state, plan, outputs, stream));
  arguments.give({out, extra, alpha, last, kept});
}

template <typename Primitive>
void rasterize_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Arguments arguments(op, stack);
  const Rows<Primitive> rows(arguments);
  const at::Tensor& like = rows.columns[0];
  const c10::cuda::CUDAGuard guard(like.device());
  const int64_t pixels = rows.cut.pixels;
  const auto extra_shape = column_shape(pixels, Primitive::kExtra);
  RasterState state;
  const at::Tensor out = take_floats(arguments, {pixels, 3}, like), extra = take_floats(arguments, extra_shape, like),
                   alpha = take_floats(arguments, {pixels}, like), last = take_ints(arguments, {pixels}, like),
                   kept = take_floats(arguments, {state.place(nullptr, rows.shape)}, like),
                   v_out = take_floats(arguments, {pixels, 3}, like),
                   v_extra = take_floats(arguments, extra_shape, like),
                   v_alpha = take_floats(arguments, {pixels}, like);
  state.place(const_cast<float*>(kept.const_data_ptr<float>()), rows.shape);  // the kernels read it only
  at::Tensor records = at::zeros({rows.shape.rows, 4 * kSumQuads<Primitive>}, like.options());
  std::vector<at::Tensor> found = made<typename Primitive::RowColumns>(rows.shape.rows, like.options(), false);
  PrimitivePixelGradients given;
  given.out = out.const_data_ptr<float>();
  given.extra = extra.const_data_ptr<float>();
  given.alpha = alpha.const_data_ptr<float>();
  given.last = last.const_data_ptr<int32_t>();
  given.v_out = v_out.const_data_ptr<float>();
  given.v_extra = v_extra.const_data_ptr<float>();
  given.v_alpha = v_alpha.const_data_ptr<float>();
  NSMG_CUDA_CHECK(draw_primitives_backward<Primitive>(
      rows.lists.row_ids, rows.shape, state, given, records.mutable_data_ptr<float>(),
      pointers<typename Primitive::RowColumns, float>(found), c10::cuda::getCurrentCUDAStream()));
  arguments.give(found);
}

template <typename Primitive>
void bind(torch::Library& m) {
  const std::string name = Primitive::kName;
  using torch::CppFunction;
  m.impl(("project_" + name).c_str(), CppFunction::makeFromBoxedFunction<&project<Primitive>>());
  m.impl(("project_" + name + "_backward").c_str(), CppFunction::makeFromBoxedFunction<&project_backward<Primitive>>());
  m.impl(("rasterize_" + name).c_str(), CppFunction::makeFromBoxedFunction<&rasterize<Primitive>>());
  m.impl(("rasterize_" + name + "_backward").c_str(),
         CppFunction::makeFromBoxedFunction<&rasterize_backward<Primitive>>());
}

}  // namespace primitives_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  nsmg::primitives_bind::bind<nsmg::SurfelTraits>(m);
  nsmg::primitives_bind::bind<nsmg::ConvexTraits>(m);
}
