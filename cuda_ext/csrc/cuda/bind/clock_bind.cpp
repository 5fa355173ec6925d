// ns_multigpu::add_clock on CUDA.
#include "cuda/common/clock.h"

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda/bind/check.h"

namespace nsmg {
namespace clock_bind {

void add_clock(const at::Tensor& sum, int64_t sign) {
  cuda_checked(sum, "sum", {1}, at::kLong, sum);
  const c10::cuda::CUDAGuard guard(sum.device());
  NSMG_CUDA_CHECK(add_clock_launch(sum.mutable_data_ptr<int64_t>(), static_cast<int>(sign),
                                   c10::cuda::getCurrentCUDAStream()));
}

}  // namespace clock_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) { m.impl("add_clock", &nsmg::clock_bind::add_clock); }
