// The photometric losses and the composition over a background on CUDA.

#include <limits>

#include "cuda/bind/call.h"
#include "cuda/loss/band_loss.h"
#include "cuda/loss/bilateral_map.h"
#include "cuda/loss/composite.h"
#include "cuda/loss/l1_ssim.h"

namespace nsmg {
namespace loss_bind {

constexpr char kComposite[] = "out[P,C] alpha[P] background[3] P C >rgb[P,3]";
constexpr char kCompositeBackward[] =
    "out[P,C] alpha[P] background[3] v_rgb[P,3] P C >v_out[P,C] >v_alpha[P]";
constexpr char kVariation[] = "grids[N,12,L,R,C] N L R C weight >v_grids[N,12,L,R,C]";
constexpr char kBandLoss[] = ">rgb[H,W,3] >v_out[P,3] >v_alpha[P] - >l1[] >ssim[] - - -";
constexpr char kBandLossInto[] = "rgb[H,W,3] v_out[P,3] v_alpha[P] last[P] - - loss[] offset scale";

template <auto kLaunch, const char* kItems>
void composited(Call& call) {
  const at::Tensor& out = call.tensor("out");
  TORCH_CHECK_VALUE(out.dim() == 2 && out.size(1) >= 3, "composite: out needs at least 3 channels, not ", out.sizes(),
                    ".");
  launched<kLaunch, kItems>(call);
}

BilateralGrid bilateral_grid(Call& call) { return call.read<BilateralGrid>("grid[12,L,G,C] L G C"); }

MappedColors mapped_colors(Call& call) {
  const float* rgb = call.read<const float*>("rgb[H,W,3]");
  const int height = call.read<int>("H"), width = call.read<int>("W");
  call.read<int>("3W");
  const at::IntArrayRef place = call.integers("place");
  return {rgb, height, width, int(place[0]), int(place[1]), int(place[2]), int(place[3])};
}

void bilateral_map(Call& call) {
  const BilateralGrid grid = bilateral_grid(call);
  const MappedColors colors = mapped_colors(call);
  call.run(bilateral_map_launch, grid, colors, call.read<float*>(">out[H,W,3]"));
}

void bilateral_map_backward(Call& call) {
  const BilateralGrid grid = bilateral_grid(call);
  const MappedColors colors = mapped_colors(call);
  const auto* v_out = call.read<const float*>("v_out[H,W,3]");
  auto* v_grid = call.read<float*>(">v_grid[12,L,G,C]=0");
  call.run(bilateral_map_backward_launch, grid, colors, v_out, v_grid, call.read<float*>(">v_rgb[H,W,3]"));
}

void variation_backward(Call& call) { launched<bilateral_variation_backward_launch, kVariation>(call); }

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

struct Loss {
  LossImages images;
  LossRectangle inner;

  explicit Loss(Call& call) {
    const float* pred = call.read<const float*>("pred[H,W,3]");
    const int height = call.read<int>("H"), width = call.read<int>("W");
    call.read<int>("3W");
    const at::Tensor target = photograph(call, {height, width, 3});
    images = {pred, target.const_data_ptr(), target.scalar_type() == at::kByte, height, width};
    inner = inner_rectangle(call, width, height);
  }
};

void l1_ssim(Call& call) {
  const Loss loss(call);
  float* l1_sum = call.out<float>({});
  float* ssim_sum = call.out<float>({});
  float* gradient = call.out<float>({loss.images.height, loss.images.width, 3});
  void* workspace = call.scratch_bytes(int64_t(l1_ssim_bytes(loss.images, loss.inner)));
  call.run(l1_ssim_launch, loss.images, loss.inner, workspace, l1_sum, ssim_sum, gradient);
}

void l1_ssim_backward(Call& call) {
  const Loss loss(call);
  const auto* gradient = call.read<const float*>("dssim_dpred[H,W,3]");
  const auto *v_l1 = call.read<const float*>("v_l1[]"), *v_ssim = call.read<const float*>("v_ssim[]");
  call.run(l1_ssim_backward_launch, loss.images, loss.inner, gradient, v_l1, v_ssim,
           call.read<float*>(">v_pred[H,W,3]"));
}

template <const char* kResults>
void band_loss(Call& call) {
  const at::Tensor target = photograph(call, {-1, -1, 3});
  const int64_t height = target.size(0), width = target.size(1), pixels = height * width;
  cuda_count(3 * pixels, "numbers in the image");
  call.set('H', height);
  call.set('W', width);
  call.set('P', pixels);
  const bool clamp = call.read<bool>("clamp");
  const float endless = std::numeric_limits<float>::infinity();
  const BandView view = {call.floats("out", {pixels, 3}),
                         call.floats("alpha", {pixels}),
                         call.floats("background", {3}),
                         target.const_data_ptr(),
                         target.scalar_type() == at::kByte,
                         int(width),
                         int(height),
                         inner_rectangle(call, width, height),
                         call.floats("v_l1", {}),
                         call.floats("v_ssim", {}),
                         clamp ? 0.0f : -endless,
                         clamp ? 1.0f : endless};
  const auto results = call.read<BandResults>(kResults);
  BandPlan plan;
  call.check(band_loss_plan(view, &plan));
  call.run(band_loss_launch, view, plan, call.scratch_bytes(int64_t(band_loss_bytes(plan))), results);
}

}  // namespace loss_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  using namespace nsmg::loss_bind;
  using nsmg::bound;
  m.impl("composite", bound<composited<nsmg::composite_launch, kComposite>>());
  m.impl("composite_backward", bound<composited<nsmg::composite_backward_launch, kCompositeBackward>>());
  m.impl("bilateral_map", bound<bilateral_map>());
  m.impl("bilateral_map_backward", bound<bilateral_map_backward>());
  m.impl("bilateral_variation_backward", bound<variation_backward>());
  m.impl("l1_ssim", bound<l1_ssim>());
  m.impl("l1_ssim_backward", bound<l1_ssim_backward>());
  m.impl("band_loss", bound<band_loss<kBandLoss>>());
  m.impl("band_loss_into", bound<band_loss<kBandLossInto>>());
}
