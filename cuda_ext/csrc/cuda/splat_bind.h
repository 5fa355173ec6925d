// Checks of arguments that the fused operators share.
#pragma once

#include <ATen/core/Tensor.h>

#include "cuda/check.h"
#include "cuda/splat_views.h"

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

}  // namespace nsmg
