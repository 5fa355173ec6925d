// ns_multigpu::splat_update on CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <vector>

#include "cuda/bind/splat_bind.h"
#include "cuda/project/splat_boxes.h"
#include "cuda/optim/splat_update.h"

namespace nsmg {
namespace splat_update_bind {

// A statistic of each point, or null where it is empty.
float* statistic(const at::Tensor& tensor, const char* name, const at::Tensor& means) {
  return tensor.numel() == 0 ? nullptr : in_place(tensor, name, {means.size(0)}, means);
}

void splat_update(at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                  const at::Tensor& scalars_, const at::Tensor& viewmats_, const at::Tensor& Ks_,
                  at::IntArrayRef sizes, const at::Tensor& view_ids_, const at::Tensor& point_ids_,
                  const at::Tensor& count_, const at::Tensor& conics_, const at::Tensor& features_,
                  const at::Tensor& radii_, at::TensorList row_gradients, const at::Tensor& grad2d,
                  const at::Tensor& seen, const at::Tensor& radii_max, int64_t degree, double eps2d, double near_plane,
                  double far_plane, bool antialiased, bool absgrad, double opacity_weight,
                  double scale_weight, const Optional& last, const Optional& table, const Optional& steps,
                  const Optional& witness, at::IntArrayRef witness_views, const Optional& boxes) {
  UpdateLaunch launch = {};
  put_parameters({params, exp_avgs, exp_avg_sqs}, launch);
  launch.lazy = lazy_state(last, table, steps, params[kMeans]);
  if (launch.lazy.last != nullptr) {
    TORCH_CHECK_VALUE(opacity_weight == 0.0 && scale_weight == 0.0,
                      "lazy steps are those of points without a gradient: not of regularised ones.");
  }
  const at::Tensor& means = params[kMeans];
  check_degree(degree, params[kShRest]);
  const at::Tensor scalars = cuda_floats(scalars_, "scalars", {kUpdateTensors, 8}, means);
  check_aligned(scalars, "scalars");
  launch.scalars = scalars.const_data_ptr<float>();

  const at::Tensor viewmats = cuda_floats(viewmats_, "viewmats", {-1, 4, 4}, means);
  const int64_t views = viewmats.size(0), rows = point_ids_.size(0);
  const at::Tensor Ks = cuda_floats(Ks_, "Ks", {views, 3, 3}, means);
  launch.views = make_views(viewmats, Ks, sizes, near_plane, far_plane);

  const at::Tensor view_ids = cuda_ints(view_ids_, "view_ids", {rows}, means);
  const at::Tensor point_ids = cuda_ints(point_ids_, "point_ids", {rows}, means);
  const at::Tensor radii = cuda_ints(radii_, "radii", {rows, 2}, means);
  const at::Tensor features = cuda_floats(features_, "features", {rows, -1}, means);
  TORCH_CHECK_VALUE(features.size(1) == 3 || features.size(1) == 4,
                    "features must hold colours [M, 3] or colours and depths [M, 4], not ", features.sizes(), ".");
  const bool counted = count_.numel() > 0;
  const at::Tensor count = counted ? cuda_checked(count_, "count", {-1}, at::kLong, means) : count_;
  const int64_t segments = counted ? count.numel() : 1;
  TORCH_CHECK_VALUE(views % segments == 0 && rows % segments == 0, "count holds ", segments,
                    " numbers: so many equal parts cannot be made of ", views, " views and ", rows, " rows.");
  const bool sized = radii_max.numel() > 0;
  const at::Tensor conics = sized ? cuda_floats(conics_, "conics", {rows, 3}, means) : conics_;
  launch.rows = {view_ids.const_data_ptr<int32_t>(),
                 point_ids.const_data_ptr<int32_t>(),
                 counted ? count.const_data_ptr<int64_t>() : nullptr,
                 sized ? conics.const_data_ptr<float>() : nullptr,
                 features.const_data_ptr<float>(),
                 radii.const_data_ptr<int32_t>(),
                 cuda_count(rows, "rows"),
                 static_cast<int>(features.size(1)),
                 static_cast<int>(segments)};

  std::vector<at::Tensor> given;
  if (row_gradients.size() == 1) {
    given = {cuda_floats(row_gradients[0], "row_gradients", {rows, 16}, means)};
    check_aligned(given[0], "row_gradients");
    launch.gradients.records = given[0].const_data_ptr<float>();
  } else {
    TORCH_CHECK_VALUE(row_gradients.size() == 5, "row_gradients must be one tensor of records, or those of means2d, "
                      "conics, opacities and features and the absolute ones of means2d, not ", row_gradients.size(),
                      " tensors.");
    given = {cuda_floats(row_gradients[0], "v_means2d", {rows, 2}, means),
             cuda_floats(row_gradients[1], "v_conics", {rows, 3}, means),
             cuda_floats(row_gradients[2], "v_opacities", {rows}, means),
             cuda_floats(row_gradients[3], "v_features", {rows, features.size(1)}, means),
             row_gradients[4].numel() > 0 || absgrad ? cuda_floats(row_gradients[4], "v_absolute", {rows, 2}, means)
                                                     : row_gradients[4]};
    launch.gradients = {nullptr,
                        given[0].const_data_ptr<float>(),
                        given[1].const_data_ptr<float>(),
                        given[2].const_data_ptr<float>(),
                        given[3].const_data_ptr<float>(),
                        given[4].numel() > 0 ? given[4].const_data_ptr<float>() : nullptr};
  }
  launch.statistics = {statistic(grad2d, "grad2d", means), statistic(seen, "seen", means),
                       statistic(radii_max, "radii_max", means)};
  if (witness.has_value()) {
    const bool all = witness_views.empty();
    TORCH_CHECK_VALUE(all || witness_views.size() == 2, "witness_views must be the first view and the end, or empty.");
    launch.witness = {in_place(*witness, "witness", {1}, means), all ? 0 : cuda_count(witness_views[0], "views"),
                      all ? launch.views.count : cuda_count(witness_views[1], "views")};
  }
  if (boxes.has_value()) launch.boxes = in_place(*boxes, "boxes", {box_groups(launch.points), kBoxFloats}, means);
  launch.settings = {static_cast<int>(degree), static_cast<float>(eps2d), antialiased, absgrad,
                     static_cast<float>(opacity_weight), static_cast<float>(scale_weight)};

  const c10::cuda::CUDAGuard guard(means.device());
  const at::Tensor starts =
      at::empty({views * (update_groups(launch.points) + 1)}, means.options().dtype(at::kInt));
  launch.starts = starts.mutable_data_ptr<int32_t>();
  NSMG_CUDA_CHECK(splat_update_launch(launch, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace splat_update_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) { m.impl("splat_update", &nsmg::splat_update_bind::splat_update); }
