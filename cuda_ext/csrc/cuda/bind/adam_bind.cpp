// ns_multigpu::adam_step on CUDA.

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "cuda/optim/adam.h"
#include "cuda/bind/check.h"

namespace nsmg {
namespace adam_bind {

// The data of a tensor that the kernel writes: contiguous float32 of the shape and device of `like`.
float* written(const at::Tensor& tensor, const char* name, const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.sizes() == like.sizes(), name, " has the shape ", tensor.sizes(), " and its parameter ",
                    like.sizes(), ".");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " must be contiguous: it is written in place.");
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat && tensor.device() == like.device(), name, " is ",
                   tensor.scalar_type(), " on ", tensor.device(), "; it must be float32 on ", like.device(), ".");
  return tensor.mutable_data_ptr<float>();
}

void adam_step(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
               const at::Tensor& scalars_, bool set_grads_to_zero) {
  const size_t number = params.size();
  TORCH_CHECK_VALUE(grads.size() == number && exp_avgs.size() == number && exp_avg_sqs.size() == number,
                    "params, grads, exp_avgs and exp_avg_sqs must be equally many.");
  if (number == 0) return;
  const at::Tensor scalars = cuda_floats(scalars_, "scalars", {static_cast<int64_t>(number), 8}, params[0]);
  const c10::cuda::CUDAGuard guard(params[0].device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  std::vector<AdamTensor> tensors;
  for (size_t i = 0; i < number; ++i) {
    TORCH_CHECK_TYPE(params[i].device() == params[0].device(), "all parameters must lie on one device.");
    if (params[i].numel() > 0) {
      tensors.push_back({written(params[i], "a parameter", params[i]), written(grads[i], "a gradient", params[i]),
                         written(exp_avgs[i], "exp_avg", params[i]), written(exp_avg_sqs[i], "exp_avg_sq", params[i]),
                         scalars.const_data_ptr<float>() + 8 * i, params[i].numel()});
    }
  }
  for (size_t i = 0; i < tensors.size(); i += kAdamTensors) {
    const size_t some = std::min<size_t>(kAdamTensors, tensors.size() - i);
    NSMG_CUDA_CHECK(adam_step_launch(tensors.data() + i, static_cast<int>(some), set_grads_to_zero, stream));
  }
}

}  // namespace adam_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) { m.impl("adam_step", &nsmg::adam_bind::adam_step); }
