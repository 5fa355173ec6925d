// ns_multigpu::splat_boxes and ns_multigpu::box_views on CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda/bind/splat_bind.h"
#include "cuda/project/splat_boxes.h"

namespace nsmg {
namespace splat_boxes_bind {

void splat_boxes(const at::Tensor& means_, const at::Tensor& log_scales_, const at::Tensor& boxes) {
  const at::Tensor means = cuda_floats(means_, "means", {-1, 3}, means_);
  const int points = cuda_count(means.size(0), "points");
  const at::Tensor log_scales = cuda_floats(log_scales_, "log_scales", {points, 3}, means);
  float* const at = in_place(boxes, "boxes", {box_groups(points), kBoxFloats}, means);
  const c10::cuda::CUDAGuard guard(means.device());
  NSMG_CUDA_CHECK(splat_boxes_launch(means.const_data_ptr<float>(), log_scales.const_data_ptr<float>(), points, at,
                                     c10::cuda::getCurrentCUDAStream()));
}

at::Tensor box_views(const at::Tensor& boxes_, const at::Tensor& viewmats_, const at::Tensor& Ks_,
                     at::IntArrayRef sizes, double eps2d, double near_plane, double far_plane, const Optional& table_,
                     bool compact) {
  const at::Tensor boxes = cuda_floats(boxes_, "boxes", {-1, kBoxFloats}, boxes_);
  check_aligned(boxes, "boxes");
  const int groups = cuda_count(boxes.size(0), "boxes");
  const int64_t count = viewmats_.size(0);
  const at::Tensor viewmats = cuda_floats(viewmats_, "viewmats", {-1, 4, 4}, boxes);
  const at::Tensor Ks = cuda_floats(Ks_, "Ks", {count, 3, 3}, boxes);
  const Views views = make_views(viewmats, Ks, sizes, near_plane, far_plane);
  Optional table;
  if (table_.has_value()) {
    table = cuda_floats(*table_, "table", {kLazySteps + 1, kUpdateTensors, kLazyFloats}, boxes);
    check_aligned(*table, "table");
  }
  const c10::cuda::CUDAGuard guard(boxes.device());
  const at::Tensor shows = at::empty({count, groups}, boxes.options().dtype(at::kBool));
  NSMG_CUDA_CHECK(box_views_launch(boxes.const_data_ptr<float>(), groups, views, static_cast<float>(eps2d),
                                   table ? table->const_data_ptr<float>() : nullptr, compact,
                                   reinterpret_cast<uint8_t*>(shows.mutable_data_ptr<bool>()),
                                   c10::cuda::getCurrentCUDAStream()));
  return shows;
}

}  // namespace splat_boxes_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("splat_boxes", &nsmg::splat_boxes_bind::splat_boxes);
  m.impl("box_views", &nsmg::splat_boxes_bind::box_views);
}
