// `l1_ssim` and `l1_ssim_backward` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "cuda/bind/check.h"
#include "cuda/loss/l1_ssim.h"

namespace nsmg {
namespace l1_ssim_bind {

// The checked arguments; the tensors keep the memory that `images` points to.
struct Loss {
  at::Tensor pred, target;
  LossImages images;
  LossRectangle inner;

  Loss(const at::Tensor& pred_, const at::Tensor& target_, at::IntArrayRef inner_)
      : pred(cuda_floats(pred_, "pred", {-1, -1, 3}, pred_)) {
    const bool bytes = target_.scalar_type() == at::kByte;
    target = cuda_checked(target_, "target", pred.sizes(), bytes ? at::kByte : at::kFloat, pred);
    const int height = cuda_count(pred.size(0), "rows of pixels");
    const int width = cuda_count(pred.size(1) * 3, "numbers in a row of pixels") / 3;
    images = {pred.const_data_ptr<float>(), target.const_data_ptr(), bytes, height, width};
    TORCH_CHECK_VALUE(inner_.size() == 4 && 0 <= inner_[0] && inner_[0] <= inner_[2] && inner_[2] <= width &&
                          0 <= inner_[1] && inner_[1] <= inner_[3] && inner_[3] <= height,
                      "l1_ssim: inner is (x0, y0, x1, y1) within the patch of ", width, "x", height, ", got ", inner_);
    inner = {int(inner_[0]), int(inner_[1]), int(inner_[2]), int(inner_[3])};
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> l1_ssim(const at::Tensor& pred, const at::Tensor& target,
                                                       at::IntArrayRef inner) {
  const Loss loss(pred, target, inner);
  const c10::cuda::CUDAGuard guard(loss.pred.device());
  const at::TensorOptions floats = loss.pred.options();
  at::Tensor l1_sum = at::empty({}, floats), ssim_sum = at::empty({}, floats),
             gradient = at::empty(loss.pred.sizes(), floats);
  const at::Tensor workspace =
      at::empty({int64_t(l1_ssim_bytes(loss.images, loss.inner))}, floats.dtype(at::kByte));
  NSMG_CUDA_CHECK(l1_ssim_launch(loss.images, loss.inner, workspace.mutable_data_ptr(),
                                 l1_sum.mutable_data_ptr<float>(), ssim_sum.mutable_data_ptr<float>(),
                                 gradient.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return {l1_sum, ssim_sum, gradient};
}

at::Tensor l1_ssim_backward(const at::Tensor& pred, const at::Tensor& target, const at::Tensor& dssim_dpred_,
                            at::IntArrayRef inner, const at::Tensor& v_l1_, const at::Tensor& v_ssim_) {
  const Loss loss(pred, target, inner);
  const at::Tensor dssim_dpred = cuda_floats(dssim_dpred_, "dssim_dpred", loss.pred.sizes(), loss.pred),
                   v_l1 = cuda_floats(v_l1_, "v_l1", {}, loss.pred),
                   v_ssim = cuda_floats(v_ssim_, "v_ssim", {}, loss.pred);
  const c10::cuda::CUDAGuard guard(loss.pred.device());
  at::Tensor v_pred = at::empty(loss.pred.sizes(), loss.pred.options());
  NSMG_CUDA_CHECK(l1_ssim_backward_launch(loss.images, loss.inner, dssim_dpred.const_data_ptr<float>(),
                                          v_l1.const_data_ptr<float>(), v_ssim.const_data_ptr<float>(),
                                          v_pred.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return v_pred;
}

}  // namespace l1_ssim_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("l1_ssim", &nsmg::l1_ssim_bind::l1_ssim);
  m.impl("l1_ssim_backward", &nsmg::l1_ssim_bind::l1_ssim_backward);
}
