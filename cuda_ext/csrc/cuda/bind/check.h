// Checks of tensors and counts. The .cu files do not include this (torch's headers make nvcc
// slow): their launch functions return cudaError_t.
//
// Several *_bind.cpp files are compiled as one. So each has a namespace of its own name, and no two headers may give
// one name to two things.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>
#include <string_view>

namespace nsmg {

// A contiguous tensor of this shape and dtype on the device of `like`, or an error that names it. A size of -1 accepts
// any.
inline at::Tensor cuda_checked(const at::Tensor& tensor, const char* name, at::IntArrayRef shape, at::ScalarType dtype,
                               const at::Tensor& like) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = shape[i] < 0 || tensor.size(static_cast<int64_t>(i)) == shape[i];
  }
  TORCH_CHECK_VALUE(fits, name, " must have the shape ", shape, " (-1: any size), not ", tensor.sizes(), ".");
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " is ", tensor.scalar_type(), "; on CUDA it must be ", dtype,
                   dtype == at::kFloat ? " (the CUDA operators work in float32: convert with `.float()`)." : ".");
  TORCH_CHECK_TYPE(tensor.device() == like.device(), name, " is on ", tensor.device(), "; it must be on ",
                   like.device(), " like the rest.");
  return tensor.contiguous();
}

// The tensor, copied if it does not start at a multiple of so many bytes: a view into a larger buffer need not.
inline at::Tensor aligned(const at::Tensor& tensor, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0 ? tensor : tensor.clone();
}

inline void check_aligned(const at::Tensor& tensor, const char* name, uintptr_t bytes = 16) {
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0, name,
                    " must start at a multiple of ", bytes, " bytes: pass a tensor of its own, such as `.clone()`.");
}

// Counts of points, rows, tiles and intersections are held as int32 on the device; bytes and offsets are not.
inline int cuda_count(int64_t count, std::string_view what) {
  TORCH_CHECK_VALUE(count >= 0 && count < std::numeric_limits<int32_t>::max(), "there are ", count, " ", what,
                    "; the CUDA operators take fewer than 2^31.");
  return static_cast<int>(count);
}

}  // namespace nsmg
