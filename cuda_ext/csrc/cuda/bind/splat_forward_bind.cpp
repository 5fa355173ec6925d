// ns_multigpu::splat_forward on CUDA, whole and in parts.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "cuda/bind/splat_bind.h"
#include "cuda/project/splat_boxes.h"
#include "cuda/project/splat_forward.h"

namespace nsmg {
namespace splat_forward_bind {

using Rows = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                        at::Tensor>;

// The moments and the LazyAdam of steps that were put off, or none.
struct PutOff {
  at::TensorList exp_avgs, exp_avg_sqs;
  const Optional &last, &table, &steps;
};

// The inputs, checked, as the kernels take them; `held` are what they point to.
struct Inputs {
  std::vector<at::Tensor> held;
  Optional boxes;
  RawPoints raw;
  MissedSteps missed;
  Views views;
  SplatSettings settings;
};

Inputs checked_inputs(const at::Tensor& means_, const at::Tensor& quats_, const at::Tensor& log_scales_,
                      const at::Tensor& logits_, const at::Tensor& sh_dc_, const at::Tensor& sh_rest_,
                      const at::Tensor& viewmats_, const at::Tensor& Ks_, at::IntArrayRef sizes, int64_t degree,
                      double eps2d, double near_plane, double far_plane, bool antialiased, bool depth,
                      const PutOff& put_off, const Optional& boxes = {}) {
  const int64_t points = means_.size(0), views = viewmats_.size(0);
  const at::Tensor means = cuda_floats(means_, "means", {-1, 3}, means_);
  const at::Tensor quats = cuda_floats(quats_, "quats", {points, 4}, means_);
  const at::Tensor log_scales = cuda_floats(log_scales_, "log_scales", {points, 3}, means_);
  const at::Tensor logits = cuda_floats(logits_, "logits", {points}, means_);
  const at::Tensor sh_dc = cuda_floats(sh_dc_, "sh_dc", {points, 3}, means_);
  const at::Tensor sh_rest = cuda_floats(sh_rest_, "sh_rest", {points, -1, 3}, means_);
  const at::Tensor viewmats = cuda_floats(viewmats_, "viewmats", {-1, 4, 4}, means_);
  const at::Tensor Ks = cuda_floats(Ks_, "Ks", {views, 3, 3}, means_);
  check_degree(degree, sh_rest);
  check_aligned(quats, "quats");
  Inputs inputs = {};
  inputs.held = {means, quats, log_scales, logits, sh_dc, sh_rest, viewmats, Ks};
  inputs.raw = {means.const_data_ptr<float>(),      quats.const_data_ptr<float>(),
                log_scales.const_data_ptr<float>(), logits.const_data_ptr<float>(),
                sh_dc.const_data_ptr<float>(),      sh_rest.const_data_ptr<float>(),
                cuda_count(points, "points"),       static_cast<int>(3 * sh_rest.size(1))};
  const LazyState lazy = lazy_state(put_off.last, put_off.table, put_off.steps, means);
  if (lazy.last != nullptr) {
    inputs.missed.last = lazy.last;
    inputs.missed.table = lazy.table;
    FlushLaunch checked = {};  // those that are read here are written when steps are caught up with
    put_parameters({{means, quats, log_scales, logits, sh_dc, sh_rest}, put_off.exp_avgs, put_off.exp_avg_sqs},
                   checked);
    std::copy_n(checked.moments1, kUpdateTensors, inputs.missed.moments1);
    std::copy_n(checked.moments2, kUpdateTensors, inputs.missed.moments2);
    inputs.missed.compact = checked.compact;
  }
  if (boxes.has_value()) {
    inputs.boxes = cuda_floats(*boxes, "boxes", {box_groups(inputs.raw.count), kBoxFloats}, means);
    check_aligned(*inputs.boxes, "boxes");
  }
  inputs.views = make_views(viewmats, Ks, sizes, near_plane, far_plane);
  inputs.settings = {static_cast<int>(degree), static_cast<float>(eps2d), antialiased, depth};
  return inputs;
}

SplatRows addresses(const Rows& rows) {
  const auto& [view_ids, point_ids, count, means2d, conics, opacities, features, depths, radii] = rows;
  return {view_ids.mutable_data_ptr<int32_t>(), point_ids.mutable_data_ptr<int32_t>(),
          count.mutable_data_ptr<int64_t>(),    means2d.mutable_data_ptr<float>(),
          conics.mutable_data_ptr<float>(),     opacities.mutable_data_ptr<float>(),
          features.mutable_data_ptr<float>(),   depths.mutable_data_ptr<float>(),
          radii.mutable_data_ptr<int32_t>(),    cuda_count(view_ids.size(0), "rows")};
}

// Room for the rows, with the ids and the count that culling finds.
Rows culled(const Inputs& inputs, int64_t capacity) {
  const at::Tensor& means = inputs.held[0];
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const auto floats = means.options(), ints = floats.dtype(at::kInt), longs = floats.dtype(at::kLong);
  const at::Tensor view_ids = at::empty({capacity}, ints), point_ids = at::empty({capacity}, ints);
  const at::Tensor count = at::empty({1}, longs), radii = at::empty({capacity, 2}, ints);
  const at::Tensor means2d = at::empty({capacity, 2}, floats), conics = at::empty({capacity, 3}, floats);
  const at::Tensor opacities = at::empty({capacity}, floats), depths = at::empty({capacity}, floats);
  const at::Tensor features = at::empty({capacity, inputs.settings.depth ? 4 : 3}, floats);
  const Rows rows = {view_ids, point_ids, count, means2d, conics, opacities, features, depths, radii};

  const int64_t items = int64_t{cull_blocks(inputs.raw.count)} * inputs.views.count;
  size_t scan_bytes = 0;
  NSMG_CUDA_CHECK(cull_scan_bytes(items + 1, &scan_bytes, stream));
  const at::Tensor bits = at::empty({items * (kCullBlock / 32)}, ints), counts = at::empty({items + 1}, ints);
  const at::Tensor offsets = at::empty({items + 1}, longs);
  const at::Tensor scan = at::empty({static_cast<int64_t>(scan_bytes)}, floats.dtype(at::kByte));
  const int64_t shown = inputs.boxes ? int64_t{box_groups(inputs.raw.count)} * inputs.views.count : 0;
  const at::Tensor shows = at::empty({shown}, floats.dtype(at::kByte));
  const CullBuffers buffers = {reinterpret_cast<uint32_t*>(bits.mutable_data_ptr<int32_t>()),
                               counts.mutable_data_ptr<int32_t>(), offsets.mutable_data_ptr<int64_t>(),
                               scan.mutable_data_ptr(), scan_bytes,
                               inputs.boxes ? inputs.boxes->const_data_ptr<float>() : nullptr,
                               shows.mutable_data_ptr<uint8_t>()};
  NSMG_CUDA_CHECK(splat_cull_launch(inputs.raw, inputs.missed, inputs.views, inputs.settings.eps2d, buffers,
                                    addresses(rows), stream));
  return rows;
}

void fill_lines(const Inputs& inputs, const Rows& rows, int first, int end) {
  NSMG_CUDA_CHECK(splat_rows_launch(inputs.raw, inputs.missed, inputs.views, inputs.settings, addresses(rows), first,
                                    end, c10::cuda::getCurrentCUDAStream()));
}

Rows whole(const Inputs& inputs, int64_t capacity) {
  const c10::cuda::CUDAGuard guard(inputs.held[0].device());
  const Rows rows = culled(inputs, capacity);
  fill_lines(inputs, rows, 0, static_cast<int>(capacity));
  return rows;
}

Rows splat_forward(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& log_scales,
                   const at::Tensor& logits, const at::Tensor& sh_dc, const at::Tensor& sh_rest,
                   const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes, int64_t degree,
                   double eps2d, double near_plane, double far_plane, bool antialiased, bool depth, int64_t capacity,
                   const Optional& boxes) {
  const Inputs inputs =
      checked_inputs(means, quats, log_scales, logits, sh_dc, sh_rest, viewmats, Ks, sizes, degree, eps2d, near_plane,
                     far_plane, antialiased, depth, PutOff{{}, {}, {}, {}, {}}, boxes);
  return whole(inputs, capacity);
}

Rows splat_forward_lazy(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& log_scales,
                        const at::Tensor& logits, const at::Tensor& sh_dc, const at::Tensor& sh_rest,
                        const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes, int64_t degree,
                        double eps2d, double near_plane, double far_plane, bool antialiased, bool depth,
                        int64_t capacity, at::TensorList exp_avgs, at::TensorList exp_avg_sqs, const at::Tensor& last,
                        const at::Tensor& table, const at::Tensor& steps, const Optional& boxes) {
  const Inputs inputs = checked_inputs(means, quats, log_scales, logits, sh_dc, sh_rest, viewmats, Ks, sizes, degree,
                                       eps2d, near_plane, far_plane, antialiased, depth,
                                       PutOff{exp_avgs, exp_avg_sqs, last, table, steps}, boxes);
  return whole(inputs, capacity);
}

Rows splat_begin(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& log_scales,
                 const at::Tensor& logits, const at::Tensor& sh_dc, const at::Tensor& sh_rest,
                 const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes, int64_t degree, double eps2d,
                 double near_plane, double far_plane, bool antialiased, bool depth, int64_t capacity,
                 at::TensorList exp_avgs, at::TensorList exp_avg_sqs, const Optional& last, const Optional& table,
                 const Optional& steps, const Optional& boxes) {
  const Inputs inputs = checked_inputs(means, quats, log_scales, logits, sh_dc, sh_rest, viewmats, Ks, sizes, degree,
                                       eps2d, near_plane, far_plane, antialiased, depth,
                                       PutOff{exp_avgs, exp_avg_sqs, last, table, steps}, boxes);
  const c10::cuda::CUDAGuard guard(means.device());
  return culled(inputs, capacity);
}

void splat_lines(const at::Tensor& means, const at::Tensor& quats, const at::Tensor& log_scales,
                 const at::Tensor& logits, const at::Tensor& sh_dc, const at::Tensor& sh_rest,
                 const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes, int64_t degree, double eps2d,
                 double near_plane, double far_plane, bool antialiased, bool depth, int64_t capacity,
                 at::TensorList exp_avgs, at::TensorList exp_avg_sqs, const Optional& last, const Optional& table,
                 const Optional& steps, at::TensorList rows, int64_t first, int64_t end) {
  const Inputs inputs = checked_inputs(means, quats, log_scales, logits, sh_dc, sh_rest, viewmats, Ks, sizes, degree,
                                       eps2d, near_plane, far_plane, antialiased, depth,
                                       PutOff{exp_avgs, exp_avg_sqs, last, table, steps});
  TORCH_CHECK_VALUE(rows.size() == 9, "rows must be the 9 tensors of splat_begin, not ", rows.size(), ".");
  TORCH_CHECK_VALUE(0 <= first && first <= end && end <= capacity, "lines ", first, " to ", end,
                    ": need 0 <= first <= end <= ", capacity, ", which is all of them.");
  const std::vector<int64_t> shapes[9] = {{capacity}, {capacity}, {1}, {capacity, 2}, {capacity, 3}, {capacity},
                                          {capacity, depth ? 4 : 3}, {capacity}, {capacity, 2}};
  for (size_t k = 0; k < 9; ++k) {
    const at::ScalarType type = k == 2 ? at::kLong : k < 2 || k == 8 ? at::kInt : at::kFloat;
    const at::Tensor same = cuda_checked(rows[k], "rows", shapes[k], type, means);
    TORCH_CHECK_VALUE(same.is_same(rows[k]), "rows must be contiguous: they are written in place.");
  }
  const c10::cuda::CUDAGuard guard(means.device());
  fill_lines(inputs, {rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6], rows[7], rows[8]},
             static_cast<int>(first), static_cast<int>(end));
}

}  // namespace splat_forward_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("splat_forward", &nsmg::splat_forward_bind::splat_forward);
  m.impl("splat_forward_lazy", &nsmg::splat_forward_bind::splat_forward_lazy);
  m.impl("splat_begin", &nsmg::splat_forward_bind::splat_begin);
  m.impl("splat_lines", &nsmg::splat_forward_bind::splat_lines);
}
