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

constexpr char kCull[] =
    "means[N,3] scales[N,3] opacities[N] viewmats[V,4,4] Ks[V,L,3] near far L sizes[2V] rects[4V] N V eps2d";
constexpr char kProject[] =
    "means[N,3] quats[N,4]@16 scales[N,3] opacities[N] viewmats[V,4,4] Ks[V,L,3] near far L sizes[2V] view_ids[M] "
    "point_ids[M] N V M eps2d antialiased";
// The kernels write every element of the results, but without views none runs.
constexpr char kProjected[] =
    ">means2d[M,2]=V >conics[M,3]=V >depths[M]=V >row_opacities[M]=V >radii[M,2]=V";
// The conics are recomputed with the rest of the footprint, which costs less than to read them.
constexpr char kProjectGradients[] =
    "v_means2d[M,2]@16 v_conics[M,3] v_depths[M] v_row_opacities[M] radii[M,2] "
    ">v_means[N,3]=V >v_quats[N,4]=V >v_scales[N,3]=V >v_opacities[N]=V >v_viewmats[V,4,4]=0 ~[VG+1] ~[12VG]";
constexpr char kAxes[] =
    "means[M,3] axes[M,3,3] opacities[M] viewmats[V,4,4] Ks[V,L,3] near far L sizes[2V] view_ids[M] V M eps2d "
    "antialiased";
constexpr char kAxesGradients[] =
    "v_means2d[M,2] v_conics[M,3] v_depths[M] v_row_opacities[M] radii[M,2] "
    ">v_means[M,3] >v_axes[M,3,3] >v_opacities[M] >v_viewmats[V,4,4]=0 ~[VG+1] ~[12VG]";
constexpr char kCondition[] =
    "means[N,3] times[N] left[N,4]@16 motions[N,4]@16 scales[N,4]@16 opacities[N] view_times[V] view_ids[M] "
    "point_ids[M] N V M";
constexpr char kConditioned[] = ">row_means[M,3] >axes[M,3,3] >row_opacities[M]";
constexpr char kConditionGradients[] =
    "v_row_means[M,3] v_axes[M,3,3] v_row_opacities[M] "
    ">v_means[N,3] >v_times[N] >v_left[N,4] >v_motions[N,4] >v_scales[N,4] >v_opacities[N] ~[VG+1]";
constexpr char kSh[] =
    "means[N,3] camera_centers[V,3] sh_dc[N,3] sh_rest[N,B,3] view_ids[M] point_ids[M] N V M B degree";
constexpr char kColors[] = ">colors[M,3]";
constexpr char kShGradients[] =
    "colors[M,3] v_colors[M,3] "
    ">v_means[N,3] >v_camera_centers[V,3] >v_sh_dc[N,3] >v_sh_rest[N,B,3] ~[VG+1] ~[3VG]";
constexpr char kSeries[] = "base[N,K] terms[N,C,K] weights[M,C] point_ids[M] N #views M K C";
constexpr char kSums[] = ">rows[M,K]";
constexpr char kSeriesGradients[] = "v_rows[M,K] >v_base[N,K] >v_terms[N,C,K] >v_weights[M,C] ~[VG+1]";

// Waits for the device: the number of rows is read back.
void cull(Call& call) {
  const auto in = call.read<CullInputs>(kCull);
  const int64_t parts = int64_t{in.views} * groups_of(in.points, kCullPoints);
  const int count = cuda_count(parts + 1, "blocks of points");
  auto* masks = call.scratch<uint32_t>(parts * kCullWords);
  int64_t* counts = call.scratch<int64_t>(count);
  const at::Tensor offsets = at::empty({count}, call.options(at::kLong));
  call.run(cull_mark, in, masks, counts);
  size_t bytes = 0;
  call.check(exclusive_sum(nullptr, bytes, nullptr, nullptr, count, call.stream()));
  void* temporary = call.scratch_bytes(int64_t(bytes));
  call.check(exclusive_sum(temporary, bytes, counts, offsets.mutable_data_ptr<int64_t>(), count, call.stream()));
  const int rows = cuda_count(offsets.narrow(0, count - 1, 1).item<int64_t>(), "rows");
  int32_t* view_ids = call.out<int32_t>({rows});
  int32_t* point_ids = call.out<int32_t>({rows});
  call.run(cull_write, masks, offsets.const_data_ptr<int64_t>(), in.points, in.views, view_ids, point_ids);
}

// A gradient for each point, summed over its rows by blocks that own kGroup points: finds their first rows before.
template <auto kLaunch, int kGroup, const char* kInputs, const char* kGradients>
void grouped(Call& call) {
  using Values = typename Launch<kLaunch>::Values;
  const auto in = call.read<std::tuple_element_t<0, Values>>(kInputs);
  const bool own = !call.knows("point_ids");  // each row is a point of its own
  if (own) call.set('N', in.rows);
  const at::Tensor points = own ? call.hold(at::arange(in.rows, call.options(at::kInt)))
                                : call.checked("point_ids", {in.rows}, at::kInt);
  const int groups = groups_of(int(call.size('N')), kGroup);
  cuda_count(int64_t{in.views} * groups, "blocks of points");
  call.set('G', groups);
  call.set('V', in.views);
  const auto gradients = call.read<std::tuple_element_t<1, Values>>(kGradients);
  call.run(find_group_starts, call.in<int32_t>("view_ids", {in.rows}), static_cast<const int32_t*>(points.const_data_ptr()),
           in.rows, in.views, kGroup, groups, const_cast<int*>(gradients.starts));
  call.run(kLaunch, in, gradients);
}

template <void (*kBody)(Call&)>
void of_degree(Call& call) {
  const int64_t degree = call.integer("degree"), needed = (degree + 1) * (degree + 1) - 1;
  TORCH_CHECK_VALUE(degree >= 0 && degree <= 3, "degree must be 0, 1, 2 or 3, not ", degree, ".");
  const at::Tensor& rest = call.tensor("sh_rest");
  TORCH_CHECK_VALUE(rest.dim() == 3 && rest.size(1) >= needed && rest.size(1) < (1 << 20),
                    "sh_rest must hold at least ", needed, " bases for degree ", degree, ", not ", rest.sizes(), ".");
  kBody(call);
}

template <void (*kBody)(Call&)>
void of_series(Call& call) {
  cuda_count(call.tensor("point_ids").numel() * call.tensor("base").size(-1), "numbers of rows");
  call.in<int32_t>("view_ids", {call.tensor("point_ids").numel()});
  kBody(call);
}

template <void (*kBody)(Call&)>
void of_views(Call& call) {
  TORCH_CHECK_VALUE(call.tensor("viewmats").size(0) > 0 || call.tensor("means").size(0) == 0,
                    "there are rows and no view.");
  kBody(call);
}

}  // namespace project_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  using namespace nsmg::project_bind;
  using nsmg::bound;
  using nsmg::launched;
  m.impl("cull", bound<cull>());
  m.impl("project", bound<launched<nsmg::project, kProject, kProjected>>());
  m.impl("project_backward", bound<grouped<nsmg::project_backward, nsmg::kProjectGroup, kProject, kProjectGradients>>());
  m.impl("project_axes", bound<of_views<launched<nsmg::project_axes, kAxes, kProjected>>>());
  m.impl("project_axes_backward",
         bound<of_views<grouped<nsmg::project_axes_backward, nsmg::kAxesGroup, kAxes, kAxesGradients>>>());
  m.impl("condition", bound<launched<nsmg::condition, kCondition, kConditioned>>());
  m.impl("condition_backward",
         bound<grouped<nsmg::condition_backward, nsmg::kConditionGroup, kCondition, kConditionGradients>>());
  m.impl("sh_colors", bound<of_degree<launched<nsmg::sh_colors, kSh, kColors>>>());
  m.impl("sh_colors_backward",
         bound<of_degree<grouped<nsmg::sh_colors_backward, nsmg::kShGroup, kSh, kShGradients>>>());
  m.impl("series", bound<of_series<launched<nsmg::series, kSeries, kSums>>>());
  m.impl("series_backward",
         bound<of_series<grouped<nsmg::series_backward, nsmg::kSeriesGroup, kSeries, kSeriesGradients>>>());
}
