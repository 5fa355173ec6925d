// ns_multigpu::splat_flush on CUDA.

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda/bind/splat_bind.h"
#include "cuda/optim/splat_lazy.h"

namespace nsmg {
namespace splat_lazy_bind {

void splat_flush(at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs, const at::Tensor& last,
                 const at::Tensor& table, const at::Tensor& steps) {
  FlushLaunch launch = {};
  put_parameters({params, exp_avgs, exp_avg_sqs}, launch);
  launch.lazy = lazy_state(last, table, steps, params[kMeans]);
  const c10::cuda::CUDAGuard guard(params[kMeans].device());
  NSMG_CUDA_CHECK(splat_flush_launch(launch, c10::cuda::getCurrentCUDAStream()));
}

}  // namespace splat_lazy_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) { m.impl("splat_flush", &nsmg::splat_lazy_bind::splat_flush); }
