// The photometric losses and the composition over a background on CUDA.

#include "cuda/bind/call.h"
#include "cuda/loss/band_loss.h"
#include "cuda/loss/composite.h"
#include "cuda/loss/l1_ssim.h"

namespace nsmg {
namespace loss_bind {

// A rectangle (x0, y0, x1, y1) of an image.
LossRectangle inner_rectangle(Call& call, int64_t width, int64_t height) {
  const at::IntArrayRef inner = call.integers("inner");
  TORCH_CHECK_VALUE(inner.size() == 4 && 0 <= inner[0] && inner[0] <= inner[2] && inner[2] <= width && 0 <= inner[1] &&
                        inner[1] <= inner[3] && inner[3] <= height,
                    "inner is (x0, y0, x1, y1) within the rectangle of ", width, "x", height, ", got ", inner);
  return {int(inner[0]), int(inner[1]), int(inner[2]), int(inner[3])};
}

// A photograph of floats or bytes.
at::Tensor photograph(Call& call, at::IntArrayRef shape) {
  return call.checked("target", shape, call.tensor("target").scalar_type() == at::kByte ? at::kByte : at::kFloat);
}

struct Blended {
  const float *out, *alpha, *background;
  int64_t pixels;
  int channels;

  explicit Blended(Call& call)
      : out(call.floats("out", {-1, -1})),
        pixels(call.tensor("out").size(0)),
        channels(int(call.tensor("out").size(1))) {
    alpha = call.floats("alpha", {pixels});
    background = call.floats("background", {3});
    TORCH_CHECK_VALUE(channels >= 3, "composite: out needs at least 3 channels, not ", channels, ".");
  }
};

void composite(Call& call) {
  const Blended b(call);
  NSMG_CUDA_CHECK(composite_launch(b.out, b.alpha, b.background, b.pixels, b.channels, call.out<float>({b.pixels, 3}),
                                   call.stream()));
}

void composite_backward(Call& call) {
  const Blended b(call);
  const float* v_rgb = call.floats("v_rgb", {b.pixels, 3});
  float* v_out = call.out<float>({b.pixels, b.channels});
  float* v_alpha = call.out<float>({b.pixels});
  NSMG_CUDA_CHECK(composite_backward_launch(b.out, b.alpha, b.background, v_rgb, b.pixels, b.channels, v_out, v_alpha,
                                            call.stream()));
}

struct Loss {
  LossImages images;
  LossRectangle inner;

  explicit Loss(Call& call) {
    const int height = call.count("pred", "rows of pixels"), width = call.count("pred", "pixels of a row", 1);
    cuda_count(int64_t{3} * width, "numbers in a row of pixels");
    const at::Tensor target = photograph(call, {height, width, 3});
    images = {call.floats("pred", {height, width, 3}), target.const_data_ptr(), target.scalar_type() == at::kByte,
              height, width};
    inner = inner_rectangle(call, width, height);
  }
};

void l1_ssim(Call& call) {
  const Loss loss(call);
  float* l1_sum = call.out<float>({});
  float* ssim_sum = call.out<float>({});
  float* gradient = call.out<float>({loss.images.height, loss.images.width, 3});
  void* workspace = call.scratch_bytes(int64_t(l1_ssim_bytes(loss.images, loss.inner)));
  NSMG_CUDA_CHECK(
      l1_ssim_launch(loss.images, loss.inner, workspace, l1_sum, ssim_sum, gradient, call.stream()));
}

void l1_ssim_backward(Call& call) {
  const Loss loss(call);
  const int64_t height = loss.images.height, width = loss.images.width;
  const float* dssim_dpred = call.floats("dssim_dpred", {height, width, 3});
  const float* v_l1 = call.floats("v_l1", {});
  const float* v_ssim = call.floats("v_ssim", {});
  NSMG_CUDA_CHECK(l1_ssim_backward_launch(loss.images, loss.inner, dssim_dpred, v_l1, v_ssim,
                                          call.out<float>({height, width, 3}), call.stream()));
}

struct Band {
  BandView view;
  int64_t height, width, pixels;

  explicit Band(Call& call) {
    const at::Tensor target = photograph(call, {-1, -1, 3});
    height = target.size(0), width = target.size(1), pixels = height * width;
    cuda_count(3 * pixels, "numbers in the image");
    view = {call.floats("out", {pixels, 3}),
            call.floats("alpha", {pixels}),
            call.floats("background", {3}),
            target.const_data_ptr(),
            target.scalar_type() == at::kByte,
            int(width),
            int(height),
            inner_rectangle(call, width, height),
            call.floats("v_l1", {}),
            call.floats("v_ssim", {})};
  }

  void launch(Call& call, const BandResults& results) const {
    BandPlan plan;
    NSMG_CUDA_CHECK(band_loss_plan(view, &plan));
    void* workspace = call.scratch_bytes(int64_t(band_loss_bytes(plan)));
    NSMG_CUDA_CHECK(band_loss_launch(view, plan, workspace, results, call.stream()));
  }
};

void band_loss(Call& call) {
  const Band band(call);
  BandResults results = {};
  results.rgb = call.out<float>({band.height, band.width, 3});
  results.l1 = call.out<float>({});
  results.ssim = call.out<float>({});
  results.v_out = call.out<float>({band.pixels, 3});
  results.v_alpha = call.out<float>({band.pixels});
  band.launch(call, results);
}

void band_loss_into(Call& call) {
  const Band band(call);
  BandResults results = {};
  results.offset = call.number("offset");
  results.scale = call.number("scale");
  results.rgb = call.in_place<float>("rgb", {band.height, band.width, 3});
  results.loss = call.in_place<float>("loss", {});
  results.v_out = call.in_place<float>("v_out", {band.pixels, 3});
  results.v_alpha = call.in_place<float>("v_alpha", {band.pixels});
  if (call.has("last")) results.last = call.in_place<int32_t>("last", {band.pixels});
  band.launch(call, results);
}

}  // namespace loss_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  namespace bind = nsmg::loss_bind;
  m.impl("composite", nsmg::bound<bind::composite>());
  m.impl("composite_backward", nsmg::bound<bind::composite_backward>());
  m.impl("l1_ssim", nsmg::bound<bind::l1_ssim>());
  m.impl("l1_ssim_backward", nsmg::bound<bind::l1_ssim_backward>());
  m.impl("band_loss", nsmg::bound<bind::band_loss>());
  m.impl("band_loss_into", nsmg::bound<bind::band_loss_into>());
}
