// `band_loss` and `band_loss_into` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "cuda/loss/band_loss.h"
#include "cuda/bind/check.h"

namespace nsmg {
namespace band_loss_bind {

// The checked arguments; the tensors keep the memory that `view` points to.
struct Band {
  at::Tensor out, alpha, background, target, v_l1, v_ssim;
  BandView view;

  Band(const at::Tensor& out_, const at::Tensor& alpha_, const at::Tensor& background_, const at::Tensor& target_,
       at::IntArrayRef inner, const at::Tensor& v_l1_, const at::Tensor& v_ssim_) {
    const bool bytes = target_.scalar_type() == at::kByte;
    target = cuda_checked(target_, "target", {-1, -1, 3}, bytes ? at::kByte : at::kFloat, out_);
    const int64_t height = target.size(0), width = target.size(1), pixels = height * width;
    out = cuda_floats(out_, "out", {pixels, 3}, out_);
    alpha = cuda_floats(alpha_, "alpha", {pixels}, out_);
    background = cuda_floats(background_, "background", {3}, out_);
    v_l1 = cuda_floats(v_l1_, "v_l1", {}, out_);
    v_ssim = cuda_floats(v_ssim_, "v_ssim", {}, out_);
    cuda_count(3 * pixels, "numbers in the image");
    TORCH_CHECK_VALUE(inner.size() == 4 && 0 <= inner[0] && inner[0] <= inner[2] && inner[2] <= width &&
                          0 <= inner[1] && inner[1] <= inner[3] && inner[3] <= height,
                      "band_loss: inner is (x0, y0, x1, y1) within the rectangle of ", width, "x", height, ", got ",
                      inner);
    view = {out.const_data_ptr<float>(),
            alpha.const_data_ptr<float>(),
            background.const_data_ptr<float>(),
            target.const_data_ptr(),
            bytes,
            int(width),
            int(height),
            {int(inner[0]), int(inner[1]), int(inner[2]), int(inner[3])},
            v_l1.const_data_ptr<float>(),
            v_ssim.const_data_ptr<float>()};
  }

  void launch(const BandResults& results) const {
    BandPlan plan;
    NSMG_CUDA_CHECK(band_loss_plan(view, &plan));
    const at::Tensor workspace = at::empty({int64_t(band_loss_bytes(plan))}, out.options().dtype(at::kByte));
    NSMG_CUDA_CHECK(band_loss_launch(view, plan, workspace.mutable_data_ptr(), results,
                                     c10::cuda::getCurrentCUDAStream()));
  }
};

// Memory to write to, which must not be a copy.
template <typename T>
T* written(const at::Tensor& tensor, const char* name, at::IntArrayRef shape, at::ScalarType dtype,
           const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "band_loss_into: ", name, " is written in place and must be contiguous.");
  return cuda_checked(tensor, name, shape, dtype, like).mutable_data_ptr<T>();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> band_loss(
    const at::Tensor& out, const at::Tensor& alpha, const at::Tensor& background, const at::Tensor& target,
    at::IntArrayRef inner, const at::Tensor& v_l1, const at::Tensor& v_ssim) {
  const Band band(out, alpha, background, target, inner, v_l1, v_ssim);
  const c10::cuda::CUDAGuard guard(band.out.device());
  const at::TensorOptions floats = band.out.options();
  at::Tensor rgb = at::empty(band.target.sizes(), floats), l1 = at::empty({}, floats), ssim = at::empty({}, floats),
             v_out = at::empty(band.out.sizes(), floats), v_alpha = at::empty(band.alpha.sizes(), floats);
  band.launch({rgb.mutable_data_ptr<float>(), v_out.mutable_data_ptr<float>(), v_alpha.mutable_data_ptr<float>(),
               nullptr, l1.mutable_data_ptr<float>(), ssim.mutable_data_ptr<float>(), nullptr, 0, 0});
  return {rgb, l1, ssim, v_out, v_alpha};
}

void band_loss_into(const at::Tensor& out, const at::Tensor& alpha, const at::Tensor& background,
                    const at::Tensor& target, at::IntArrayRef inner, const at::Tensor& v_l1, const at::Tensor& v_ssim,
                    double offset, double scale, at::Tensor rgb, at::Tensor loss, at::Tensor v_out, at::Tensor v_alpha,
                    std::optional<at::Tensor> last) {
  const Band band(out, alpha, background, target, inner, v_l1, v_ssim);
  const c10::cuda::CUDAGuard guard(band.out.device());
  band.launch({written<float>(rgb, "rgb", band.target.sizes(), at::kFloat, band.out),
               written<float>(v_out, "v_out", band.out.sizes(), at::kFloat, band.out),
               written<float>(v_alpha, "v_alpha", band.alpha.sizes(), at::kFloat, band.out),
               last ? written<int32_t>(*last, "last", band.alpha.sizes(), at::kInt, band.out) : nullptr, nullptr,
               nullptr, written<float>(loss, "loss", {}, at::kFloat, band.out), float(offset), float(scale)});
}

}  // namespace band_loss_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("band_loss", &nsmg::band_loss_bind::band_loss);
  m.impl("band_loss_into", &nsmg::band_loss_bind::band_loss_into);
}
