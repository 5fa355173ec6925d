// `tell_lines` on CUDA.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>

#include "cuda/bind/check.h"
#include "cuda/exchange/told_lines.h"

namespace nsmg {
namespace told_lines_bind {

void tell_lines(at::TensorList arrays, at::IntArrayRef taken, const at::Tensor& count_, const at::Tensor& destinations_,
                const std::optional<at::Tensor>& gate_, int64_t gate_column, int64_t offset) {
  TORCH_CHECK_VALUE(!arrays.empty() && arrays.size() <= kMostTold && arrays.size() == taken.size(),
                    "tell_lines takes 1 to ", kMostTold, " arrays and as many numbers, not ", arrays.size(), " and ",
                    taken.size(), ".");
  const int64_t lines = arrays[0].size(0), told_count = int64_t(arrays.size());
  const at::Tensor count = cuda_checked(count_, "count", {1}, at::kLong, arrays[0]),
                   destinations = cuda_checked(destinations_, "destinations", {-1, told_count}, at::kLong, arrays[0]);
  Told told{};
  told.count = int(told_count);
  told.capacity = cuda_count(lines, "lines");
  for (size_t k = 0; k < arrays.size(); ++k) {
    const at::Tensor& array = arrays[k];
    TORCH_CHECK_TYPE(array.element_size() == 4 && array.device() == arrays[0].device(), "array ", k,
                     " must be of numbers of 4 bytes on ", arrays[0].device(), ".");
    TORCH_CHECK_VALUE(array.dim() >= 1 && array.size(0) == lines && array.is_contiguous(), "array ", k,
                      " must be contiguous and hold ", lines, " lines.");
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(array.const_data_ptr()) % 16 == 0, "array ", k,
                      " must begin at a multiple of 16 bytes.");
    const int width = lines == 0 ? 1 : int(array.numel() / lines);
    TORCH_CHECK_VALUE(taken[k] >= 0 && taken[k] <= width && (width % 4 == 0 || taken[k] % width == 0), "of array ", k,
                      " ", taken[k], " words a line are to be taken: need 0 to ", width,
                      ", and all of them or none where they are no multiple of 4.");
    told.arrays[k] = {static_cast<const int32_t*>(array.const_data_ptr()), width, int(taken[k])};
  }
  told.offset = int(offset);
  TORCH_CHECK_VALUE(offset == 0 || (arrays[0].scalar_type() == at::kInt && told.arrays[0].width % 4 != 0),
                    "an offset is for lines of int32, and not of a multiple of 4; array 0 is ", arrays[0].scalar_type(),
                    ", with ", told.arrays[0].width, " a line.");
  at::Tensor gate;
  if (gate_) {
    gate = cuda_floats(*gate_, "gate", {lines, -1}, arrays[0]);
    told.gate = gate.const_data_ptr<float>();
    told.gate_column = int(gate_column);
    told.gate_width = int(gate.size(1));
    const ToldArray& last = told.arrays[told.count - 1];
    TORCH_CHECK_VALUE(last.width % 4 == 0 && gate_column >= 0 && gate_column + gate.size(1) <= last.width,
                      "the gate is of columns ", gate_column, " to ", gate_column + gate.size(1),
                      " of lines of ", last.width, ", which must be a multiple of 4.");
  }
  const c10::cuda::CUDAGuard guard(arrays[0].device());
  NSMG_CUDA_CHECK(tell_lines_launch(told, count.const_data_ptr<int64_t>(), destinations.const_data_ptr<int64_t>(),
                                    cuda_count(destinations.size(0), "ranks"), c10::cuda::getCurrentCUDAStream()));
}

}  // namespace told_lines_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) { m.impl("tell_lines", &nsmg::told_lines_bind::tell_lines); }
