// `composite` and `composite_backward` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "cuda/bind/check.h"
#include "cuda/loss/composite.h"

namespace nsmg {
namespace composite_bind {

struct Blended {
  at::Tensor out, alpha, background;
  int64_t pixels;
  int channels;

  Blended(const at::Tensor& out_, const at::Tensor& alpha_, const at::Tensor& background_)
      : out(cuda_floats(out_, "out", {-1, -1}, out_)),
        alpha(cuda_floats(alpha_, "alpha", {out_.size(0)}, out_)),
        background(cuda_floats(background_, "background", {3}, out_)),
        pixels(out.size(0)),
        channels(static_cast<int>(out.size(1))) {
    TORCH_CHECK_VALUE(channels >= 3, "composite: out needs at least 3 channels, not ", channels, ".");
  }
};

at::Tensor composite(const at::Tensor& out, const at::Tensor& alpha, const at::Tensor& background) {
  const Blended b(out, alpha, background);
  const c10::cuda::CUDAGuard guard(b.out.device());
  at::Tensor rgb = at::empty({b.pixels, 3}, b.out.options());
  NSMG_CUDA_CHECK(composite_launch(b.out.const_data_ptr<float>(), b.alpha.const_data_ptr<float>(),
                                   b.background.const_data_ptr<float>(), b.pixels, b.channels,
                                   rgb.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return rgb;
}

std::tuple<at::Tensor, at::Tensor> composite_backward(const at::Tensor& out, const at::Tensor& alpha,
                                                      const at::Tensor& background, const at::Tensor& v_rgb_) {
  const Blended b(out, alpha, background);
  const at::Tensor v_rgb = cuda_floats(v_rgb_, "v_rgb", {b.pixels, 3}, b.out);
  const c10::cuda::CUDAGuard guard(b.out.device());
  at::Tensor v_out = at::empty(b.out.sizes(), b.out.options()), v_alpha = at::empty({b.pixels}, b.out.options());
  NSMG_CUDA_CHECK(composite_backward_launch(
      b.out.const_data_ptr<float>(), b.alpha.const_data_ptr<float>(), b.background.const_data_ptr<float>(),
      v_rgb.const_data_ptr<float>(), b.pixels, b.channels, v_out.mutable_data_ptr<float>(),
      v_alpha.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return {v_out, v_alpha};
}

}  // namespace composite_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("composite", &nsmg::composite_bind::composite);
  m.impl("composite_backward", &nsmg::composite_bind::composite_backward);
}
