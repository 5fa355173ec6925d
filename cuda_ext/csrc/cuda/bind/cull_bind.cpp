// ns_multigpu::cull on CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "cuda/bind/check.h"
#include "cuda/project/cull.h"

namespace nsmg {
namespace cull_bind {

// The marks of all points in all views and, for every part of them, the row at which its rows start.
struct Marks {
  at::Tensor masks, offsets;
  int points, views;
};

Marks mark(const at::Tensor& means_, const at::Tensor& scales_, const at::Tensor& opacities_,
           const at::Tensor& viewmats_, const at::Tensor& Ks_, at::IntArrayRef sizes, at::IntArrayRef rects,
           double eps2d, double near_plane, double far_plane) {
  const int points = cuda_count(means_.size(0), "points"), views = cuda_count(viewmats_.size(0), "views");
  const at::Tensor means = cuda_floats(means_, "means", {-1, 3}, means_);
  const at::Tensor scales = cuda_floats(scales_, "scales", {points, 3}, means);
  const at::Tensor opacities = cuda_floats(opacities_, "opacities", {points}, means);
  const at::Tensor viewmats = cuda_floats(viewmats_, "viewmats", {-1, 4, 4}, means);
  const at::Tensor Ks = cuda_floats(Ks_, "Ks", {views, 3, 3}, means);
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2LL * views, "sizes must hold 2 numbers a view.");
  TORCH_CHECK_VALUE(static_cast<int64_t>(rects.size()) == 4LL * views, "rects must hold 4 numbers a view.");

  const CullInputs in = {
      means.const_data_ptr<float>(), scales.const_data_ptr<float>(), opacities.const_data_ptr<float>(),
      {viewmats.const_data_ptr<float>(), Ks.const_data_ptr<float>(), static_cast<float>(near_plane),
       static_cast<float>(far_plane)},
      sizes.data(), rects.data(), points, views, static_cast<float>(eps2d)};
  const int64_t parts = static_cast<int64_t>(views) * groups_of(points, kCullPoints);
  const int count = cuda_count(parts + 1, "blocks of points");
  const auto options = means.options();
  const at::Tensor masks = at::empty({parts * kCullWords}, options.dtype(at::kInt));
  const at::Tensor counts = at::empty({count}, options.dtype(at::kLong));
  const at::Tensor offsets = at::empty_like(counts);
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  NSMG_CUDA_CHECK(cull_mark(in, reinterpret_cast<uint32_t*>(masks.mutable_data_ptr<int32_t>()),
                            counts.mutable_data_ptr<int64_t>(), stream));
  size_t bytes = 0;
  NSMG_CUDA_CHECK(exclusive_sum(nullptr, bytes, nullptr, nullptr, count, stream));
  const at::Tensor scratch = at::empty({static_cast<int64_t>(bytes)}, options.dtype(at::kByte));
  NSMG_CUDA_CHECK(exclusive_sum(scratch.mutable_data_ptr(), bytes, counts.const_data_ptr<int64_t>(),
                                offsets.mutable_data_ptr<int64_t>(), count, stream));
  return {masks, offsets, points, views};
}

std::tuple<at::Tensor, at::Tensor> cull(const at::Tensor& means, const at::Tensor& scales, const at::Tensor& opacities,
                                        const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes,
                                        at::IntArrayRef rects, double eps2d, double near_plane, double far_plane) {
  const c10::cuda::CUDAGuard guard(means.device());
  const Marks marks = mark(means, scales, opacities, viewmats, Ks, sizes, rects, eps2d, near_plane, far_plane);
  const at::Tensor count = marks.offsets.narrow(0, marks.offsets.numel() - 1, 1);
  const int rows = cuda_count(count.item<int64_t>(), "rows");  // waits for the device
  const auto options = marks.masks.options();
  const at::Tensor view_ids = at::empty({rows}, options), point_ids = at::empty({rows}, options);
  NSMG_CUDA_CHECK(cull_write(reinterpret_cast<const uint32_t*>(marks.masks.const_data_ptr<int32_t>()),
                             marks.offsets.const_data_ptr<int64_t>(), marks.points, marks.views,
                             view_ids.mutable_data_ptr<int32_t>(), point_ids.mutable_data_ptr<int32_t>(),
                             c10::cuda::getCurrentCUDAStream()));
  return {view_ids, point_ids};
}

}  // namespace cull_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("cull", &nsmg::cull_bind::cull);
}
