// Cameras of views as operators on CPU take them: pinhole ones, or ones with a lens.
#pragma once

#include <ATen/core/Tensor.h>

#include "common/lens.h"

namespace nsmg {

// The rows of a view's intrinsics that are expected: with a lens if they are as many, otherwise a matrix alone.
inline int64_t intrinsics_rows(const at::Tensor& Ks) {
  return Ks.dim() == 3 && Ks.size(1) == kLensNumbers / 3 ? kLensNumbers / 3 : kPinholeNumbers / 3;
}

template <typename C>
struct CameraKind {
  using type = C;
};

// Calls f(CameraKind) with the type of these views' cameras. Ks: checked.
template <typename T, typename F>
void with_camera(const at::Tensor& Ks, const F& f) {
  if (Ks.size(1) == kLensNumbers / 3) return f(CameraKind<LensCamera<T>>());
  f(CameraKind<Camera<T>>());
}

}  // namespace nsmg
