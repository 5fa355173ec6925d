// The fused operators of 3D Gaussians on CUDA: from parameters to splats, and from splats' gradients to Adam's step.

#include "cuda/bind/call.h"
#include "cuda/optim/splat_lazy.h"
#include "cuda/optim/splat_update.h"
#include "cuda/project/splat_boxes.h"
#include "cuda/project/splat_forward.h"

#include "common/lazy_adam.h"
#include "common/sh.h"

#include <algorithm>

namespace nsmg {
namespace splat_bind {

constexpr const char* kNames[kUpdateTensors] = {"means", "quats", "log_scales", "logits", "sh_dc", "sh_rest"};

constexpr char kRaw[] =
    "means[N,3] quats[N,4]!16 log_scales[N,3] logits[N] sh_dc[N,3] sh_rest[N,B,3] N 3B";
constexpr char kRows[] =
    ">view_ids[C] >point_ids[C] >count[1] >means2d[C,2] >conics[C,3] >opacities[C] >features[C,3] >depths[C] "
    ">radii[C,2] C";
constexpr char kLazy[] = "last[N] table[65,6,8]!16 steps[1]";
static_assert(kBoxFloats == 8 && kLazySteps + 1 == 65 && kUpdateTensors == 6 && kLazyFloats == 8, "the table above");

// The views of a batch.
Views batch_views(Call& call) {
  const int64_t count = call.count("viewmats", "views");
  Views views = {call.read<const float*>("viewmats[V,4,4]"), call.read<const float*>("Ks[V,L,3]"),
                 call.read<int>("L"), int(count), call.read<float>("near"), call.read<float>("far"), {}};
  const int most = views.intrinsics_rows == kLensNumbers / 3 ? kMaxLensViews : kMaxViews;
  TORCH_CHECK_VALUE(count <= most, "the fused operators take at most ", most, " views of this kind at once, not ",
                    count, ": split the batch, or use cull, project and sh_colors.");
  const auto* sizes = call.read<const int64_t*>("sizes[2V]");
  for (int64_t i = 0; i < 2 * count; ++i) views.size[i] = static_cast<int32_t>(sizes[i]);
  return views;
}

int checked_degree(Call& call, int64_t held) {
  const int64_t degree = call.integer("degree"), bases = (degree + 1) * (degree + 1) - 1;
  TORCH_CHECK_VALUE(degree >= kPlainColor && degree <= 3, "degree must be -1, 0, 1, 2 or 3, not ", degree, ".");
  TORCH_CHECK_VALUE(held >= bases && held <= 15, "sh_rest must hold ", bases, " to 15 bases for degree ", degree,
                    ", not ", held, ".");
  return static_cast<int>(degree);
}

// A moment that is written in place, of the type of them all.
void* moment(Call& call, const at::Tensor& tensor, const char* kind, const char* name, at::IntArrayRef shape,
             at::ScalarType dtype) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, kind, " of ", name, " is ", tensor.scalar_type(),
                   "; moments must all be Float, or all BFloat16 with parameters in Float.");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), kind, " of ", name, " must be contiguous: it is written in place.");
  check_aligned(tensor, kind);
  return cuda_checked(tensor, kind, shape, dtype, call.like()).mutable_data_ptr();
}

// Checks the parameters and moments, and puts their addresses and sizes into a launch that writes them.
template <typename Launch>
void put_parameters(Call& call, const std::vector<at::Tensor>& values, Launch& launch) {
  const std::vector<at::Tensor> first = call.tensors("exp_avgs"), second = call.tensors("exp_avg_sqs");
  TORCH_CHECK_VALUE(
      values.size() == kUpdateTensors && first.size() == kUpdateTensors && second.size() == kUpdateTensors,
      "params, exp_avgs and exp_avg_sqs must each be means, quats, log_scales, logits, sh_dc, sh_rest.");
  const int64_t points = values[kMeans].size(0), bases = values[kShRest].dim() == 3 ? values[kShRest].size(1) : -1;
  const std::vector<int64_t> shapes[kUpdateTensors] = {{points, 3}, {points, 4}, {points, 3},
                                                       {points},    {points, 3}, {points, bases, 3}};
  launch.compact = first[kMeans].scalar_type() == at::kBFloat16;
  const at::ScalarType type = launch.compact ? at::kBFloat16 : at::kFloat;
  for (int i = 0; i < kUpdateTensors; ++i) {
    launch.values[i] = call.written<float>(values[i], kNames[i], shapes[i]);
    check_aligned(values[i], kNames[i]);
    launch.moments1[i] = moment(call, first[i], "exp_avg", kNames[i], shapes[i], type);
    launch.moments2[i] = moment(call, second[i], "exp_avg_sq", kNames[i], shapes[i], type);
  }
  launch.points = cuda_count(points, "points");
  launch.rest_floats = static_cast<int>(3 * bases);
}

// The three tensors of a LazyAdam, all of them or none.
LazyState lazy_state(Call& call, int64_t points) {
  const bool given = call.has("last");
  TORCH_CHECK_VALUE(given == call.has("table") && given == call.has("steps"),
                    "last, table and steps belong together: give all of them or none.");
  if (!given) return {};
  call.set('N', points);
  return call.read<LazyState>(kLazy);
}

// ---- forward ----

struct Inputs {
  RawPoints raw;
  MissedSteps missed = {};
  Views views;
  SplatSettings settings;
  int capacity;

  // `may_miss`: whether the operator applies deferred steps.
  Inputs(Call& call, bool may_miss) {
    raw = call.read<RawPoints>(kRaw);
    views = batch_views(call);
    settings = {checked_degree(call, call.size('B')), call.read<float>("eps2d"), call.flag("antialiased")};
    capacity = call.read<int>("#capacity");
    if (!may_miss) return;
    const LazyState lazy = lazy_state(call, raw.count);
    if (lazy.last == nullptr) return;
    missed.last = lazy.last;
    missed.table = lazy.table;
    FlushLaunch checked = {};  // those that are read here are written when steps are caught up with
    std::vector<at::Tensor> values;
    for (const char* name : kNames) values.push_back(call.tensor(name));
    put_parameters(call, values, checked);
    std::copy_n(checked.moments1, kUpdateTensors, missed.moments1);
    std::copy_n(checked.moments2, kUpdateTensors, missed.moments2);
    missed.compact = checked.compact;
  }
};

// Capacity for the rows, with the ids and the count that culling finds.
SplatRows culled(Call& call, const Inputs& in) {
  call.set('C', in.capacity);
  const auto rows = call.read<SplatRows>(kRows);
  const int64_t items = int64_t{cull_blocks(in.raw.count)} * in.views.count;
  CullBuffers buffers = {};
  call.run(cull_scan_bytes, items + 1, &buffers.scan_bytes);
  buffers.bits = call.scratch<uint32_t>(items * (kCullBlock / 32));
  buffers.counts = call.scratch<int32_t>(items + 1);
  buffers.offsets = call.scratch<int64_t>(items + 1);
  buffers.scan = call.scratch_bytes(static_cast<int64_t>(buffers.scan_bytes));
  call.set('G', box_groups(in.raw.count));
  buffers.boxes = call.read<const float*>("boxes[G,8]!16");
  const int64_t shown = buffers.boxes == nullptr ? 0 : int64_t{box_groups(in.raw.count)} * in.views.count;
  buffers.shows = call.scratch<uint8_t>(shown);
  call.run(splat_cull_launch, in.raw, in.missed, in.views, in.settings.eps2d, buffers, rows);
  return rows;
}

template <bool kMayMiss>
void splat_forward(Call& call) {
  const Inputs in(call, kMayMiss);
  const SplatRows rows = culled(call, in);
  call.run(splat_rows_launch, in.raw, in.missed, in.views, in.settings, rows);
}

// ---- update ----

// A statistic of each point, or null where it is empty.
float* statistic(Call& call, const char* name, int64_t points) {
  return call.tensor(name).numel() == 0 ? nullptr : call.in_place<float>(name, {points});
}

UpdateRows update_rows(Call& call, int64_t views) {
  const int64_t rows = call.count("point_ids", "rows");
  const int64_t counts = call.tensor("count").numel(), segments = counts > 0 ? counts : 1;
  TORCH_CHECK_VALUE(views % segments == 0 && rows % segments == 0, "count holds ", segments,
                    " numbers: so many equal parts cannot be made of ", views, " views and ", rows, " rows.");
  const bool sized = call.tensor("radii_max").numel() > 0;
  call.set('M', rows);
  return {call.in<int32_t>("view_ids", {rows}),
          call.in<int32_t>("point_ids", {rows}),
          counts > 0 ? call.in<int64_t>("count", {-1}) : nullptr,
          sized ? call.floats("conics", {rows, 3}) : nullptr,
          call.floats("features", {rows, 3}),
          call.in<int32_t>("radii", {rows, 2}),
          call.read<const float*>("records[M,16]!16"),
          static_cast<int>(rows),
          static_cast<int>(segments),
          call.flag("depth")};
}

UpdateFiniteFlag update_finite_flag(Call& call, int views) {
  if (!call.has("finite_flag")) return {};
  const at::IntArrayRef shown = call.integers("finite_flag_views");
  const bool all = shown.empty();
  TORCH_CHECK_VALUE(all || shown.size() == 2, "finite_flag_views must be the first view and the end, or empty.");
  return {call.in_place<float>("finite_flag", {1}), all ? 0 : cuda_count(shown[0], "views"),
          all ? views : cuda_count(shown[1], "views")};
}

void splat_update(Call& call) {
  UpdateLaunch launch = {};
  const std::vector<at::Tensor> params = call.tensors("params");
  put_parameters(call, params, launch);
  launch.lazy = lazy_state(call, launch.points);
  launch.scalars = call.read<const float*>("scalars[6,8]!16");
  launch.views = batch_views(call);
  launch.rows = update_rows(call, launch.views.count);
  launch.settings = {checked_degree(call, params[kShRest].size(1)), call.read<float>("eps2d"), call.flag("antialiased"),
                     call.flag("absgrad"), call.read<float>("opacity_weight"), call.read<float>("scale_weight"),
                     call.read<float>("max_ratio"), call.read<float>("whole_step_scale")};
  launch.statistics = {statistic(call, "grad2d", launch.points), statistic(call, "seen", launch.points),
                       statistic(call, "radii_max", launch.points)};
  launch.finite_flag = update_finite_flag(call, launch.views.count);
  call.set('G', box_groups(launch.points));
  launch.boxes = call.read<float*>("boxes[G,8]");
  launch.starts = call.scratch<int32_t>(int64_t{launch.views.count} * (update_groups(launch.points) + 1));
  if (call.has("v_viewmats")) {
    launch.viewmats = call.in_place<float>("v_viewmats", {launch.views.count, 4, 4});
    launch.poses = call.scratch<float>(int64_t{launch.views.count} * kPose * kPoseBlocks);
  }
  launch.needles = call.read<const float*>("needles[1]");
  call.run(splat_update_launch, launch);
}

void splat_flush(Call& call) {
  FlushLaunch launch = {};
  put_parameters(call, call.tensors("params"), launch);
  launch.lazy = lazy_state(call, launch.points);
  call.run(splat_flush_launch, launch);
}

// ---- boxes of groups ----

void splat_boxes(Call& call) {
  const auto *means = call.read<const float*>("means[N,3]"), *log_scales = call.read<const float*>("log_scales[N,3]");
  const int points = call.read<int>("N");
  call.set('G', box_groups(points));
  call.run(splat_boxes_launch, means, log_scales, points, call.read<float*>("boxes[G,8]"));
}

void box_views(Call& call) {
  const auto* boxes = call.read<const float*>("boxes[G,8]!16");
  const Views views = batch_views(call);
  const auto* table = call.read<const float*>("table[65,6,8]!16");
  auto* shows = reinterpret_cast<uint8_t*>(call.out<bool>({views.count, call.size('G')}));
  call.run(box_views_launch, boxes, call.read<int>("G"), views, call.read<float>("eps2d"), table, call.flag("compact"),
           shows);
}

}  // namespace splat_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  using namespace nsmg::splat_bind;
  using nsmg::bound;
  m.impl("splat_forward", bound<splat_forward<false>>());
  m.impl("splat_forward_lazy", bound<splat_forward<true>>());
  m.impl("splat_update", bound<splat_update>());
  m.impl("splat_flush", bound<splat_flush>());
  m.impl("splat_boxes", bound<splat_boxes>());
  m.impl("box_views", bound<box_views>());
}
