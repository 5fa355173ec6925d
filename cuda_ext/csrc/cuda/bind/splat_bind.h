// Checks of arguments that the fused operators share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "common/lazy_adam.h"
#include "cuda/bind/check.h"
#include "cuda/optim/splat_lazy.h"
#include "cuda/common/splat_views.h"

namespace nsmg {

// The views of a batch; `viewmats` and `Ks` must be contiguous and outlive the launch.
inline Views make_views(const at::Tensor& viewmats, const at::Tensor& Ks, at::IntArrayRef sizes, double near_plane,
                        double far_plane) {
  const int64_t count = viewmats.size(0);
  TORCH_CHECK_VALUE(count <= kMaxViews, "the fused operators take at most ", kMaxViews, " views at once, not ", count,
                    ": split the batch, or use cull, project and sh_colors.");
  TORCH_CHECK_VALUE(static_cast<int64_t>(sizes.size()) == 2 * count, "sizes must hold 2 numbers a view.");
  Views views = {viewmats.const_data_ptr<float>(), Ks.const_data_ptr<float>(), static_cast<int>(count),
                 static_cast<float>(near_plane), static_cast<float>(far_plane), {}};
  for (int64_t i = 0; i < 2 * count; ++i) views.size[i] = static_cast<int32_t>(sizes[i]);
  return views;
}

// Whether vector loads of 16 bytes may start here.
inline void check_aligned(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0, name,
                    " must start at a multiple of 16 bytes: pass a tensor of its own, such as `.clone()`.");
}

inline void check_degree(int64_t degree, const at::Tensor& sh_rest) {
  TORCH_CHECK_VALUE(degree >= 0 && degree <= 3, "degree must be 0, 1, 2 or 3, not ", degree, ".");
  const int64_t bases = (degree + 1) * (degree + 1) - 1;
  TORCH_CHECK_VALUE(sh_rest.size(1) >= bases && sh_rest.size(1) <= 15, "sh_rest must hold ", bases,
                    " to 15 bases for degree ", degree, ", not ", sh_rest.size(1), ".");
}

inline constexpr const char* kNames[kUpdateTensors] = {"means", "quats", "log_scales", "logits", "sh_dc", "sh_rest"};

// The data of a tensor that is written in place.
inline float* in_place(const at::Tensor& tensor, const char* name, at::IntArrayRef shape, const at::Tensor& like) {
  const at::Tensor same = cuda_floats(tensor, name, shape, like);
  TORCH_CHECK_VALUE(same.is_same(tensor), name, " must be contiguous: it is written in place.");
  return tensor.mutable_data_ptr<float>();
}

struct Parameters {
  at::TensorList values, moments1, moments2;
};

// A moment that is written in place, of the type of them all.
inline void* moment_in_place(const at::Tensor& tensor, const char* kind, const char* name, at::IntArrayRef shape,
                             const at::Tensor& like, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, kind, " of ", name, " is ", tensor.scalar_type(),
                   "; moments must all be Float, or all BFloat16, beside parameters in Float.");
  const at::Tensor same = cuda_checked(tensor, kind, shape, dtype, like);
  TORCH_CHECK_VALUE(same.is_same(tensor), kind, " of ", name, " must be contiguous: it is written in place.");
  check_aligned(tensor, kind);
  return tensor.mutable_data_ptr();
}

// Checks the parameters and moments, and puts their addresses and sizes into a launch that writes them.
template <typename Launch>
void put_parameters(const Parameters& all, Launch& launch) {
  TORCH_CHECK_VALUE(all.values.size() == kUpdateTensors && all.moments1.size() == kUpdateTensors &&
                        all.moments2.size() == kUpdateTensors,
                    "params, exp_avgs and exp_avg_sqs must each be means, quats, log_scales, logits, sh_dc, sh_rest.");
  const at::Tensor& means = all.values[kMeans];
  const int64_t points = means.size(0), bases = all.values[kShRest].dim() == 3 ? all.values[kShRest].size(1) : -1;
  const std::vector<int64_t> shapes[kUpdateTensors] = {{points, 3}, {points, 4}, {points, 3},
                                                       {points},    {points, 3}, {points, bases, 3}};
  launch.compact = all.moments1[kMeans].scalar_type() == at::kBFloat16;
  const at::ScalarType type = launch.compact ? at::kBFloat16 : at::kFloat;
  for (int i = 0; i < kUpdateTensors; ++i) {
    launch.values[i] = in_place(all.values[i], kNames[i], shapes[i], means);
    check_aligned(all.values[i], kNames[i]);
    launch.moments1[i] = moment_in_place(all.moments1[i], "exp_avg", kNames[i], shapes[i], means, type);
    launch.moments2[i] = moment_in_place(all.moments2[i], "exp_avg_sq", kNames[i], shapes[i], means, type);
  }
  launch.points = cuda_count(points, "points");
  launch.rest_floats = static_cast<int>(3 * bases);
}

using Optional = std::optional<at::Tensor>;

// The three tensors of a LazyAdam, all of them or none.
inline LazyState lazy_state(const Optional& last, const Optional& table, const Optional& steps,
                            const at::Tensor& means) {
  TORCH_CHECK_VALUE(last.has_value() == table.has_value() && last.has_value() == steps.has_value(),
                    "last, table and steps belong together: give all of them or none.");
  if (!last.has_value()) return {};
  const at::Tensor there = cuda_checked(*last, "last", {means.size(0)}, at::kByte, means);
  const at::Tensor count = cuda_ints(*steps, "steps", {1}, means);
  TORCH_CHECK_VALUE(there.is_same(*last) && count.is_same(*steps), "last and steps must be contiguous.");
  check_aligned(*table, "table");
  return {last->mutable_data_ptr<uint8_t>(),
          in_place(*table, "table", {kLazySteps + 1, kUpdateTensors, kLazyFloats}, means),
          steps->mutable_data_ptr<int32_t>()};
}

}  // namespace nsmg
