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
LossRectangle inner_rectangle(at::IntArrayRef inner, int64_t width, int64_t height) {
  TORCH_CHECK_VALUE(inner.size() == 4 && 0 <= inner[0] && inner[0] <= inner[2] && inner[2] <= width && 0 <= inner[1] &&
                        inner[1] <= inner[3] && inner[3] <= height,
                    "inner is (x0, y0, x1, y1) within the rectangle of ", width, "x", height, ", got ", inner);
  return {int(inner[0]), int(inner[1]), int(inner[2]), int(inner[3])};
}

// A photograph of floats or bytes.
at::Tensor photograph(Call& call, const at::Tensor& target, at::IntArrayRef shape) {
  const at::ScalarType type = target.scalar_type() == at::kByte ? at::kByte : at::kFloat;
  return call.hold(cuda_checked(target, "target", shape, type, call.like()));
}

struct Loss {
  LossImages images;
  LossRectangle inner;

  explicit Loss(Call& call) {
    const float* pred = call.read<const float*>("pred[H,W,3]");
    const int height = call.read<int>("H"), width = call.read<int>("W");
    call.read<int>("3W");
    const at::Tensor target = photograph(call, call.tensor("target"), {height, width, 3});
    images = {pred, target.const_data_ptr(), target.scalar_type() == at::kByte, height, width};
    inner = inner_rectangle(call.integers("inner"), width, height);
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

struct Pixels {
  const float *out, *alpha;
  int64_t count, first = 0;
};

// The view of a band, whose pixels lie behind those of the bands before it.
BandView band_view(Call& call, Pixels& pixels, const at::Tensor& target, at::IntArrayRef inner,
                   const float* background, const float* v_l1, const float* v_ssim) {
  const int64_t height = target.size(0), width = target.size(1), first = pixels.first;
  pixels.first += height * width;
  TORCH_CHECK_VALUE(pixels.first <= pixels.count, "out has ", pixels.count, " pixels, fewer than the targets.");
  const bool clamp = call.read<bool>("clamp");
  const float endless = std::numeric_limits<float>::infinity();
  return {pixels.out + 3 * first,
          pixels.alpha + first,
          background,
          target.const_data_ptr(),
          target.scalar_type() == at::kByte,
          int(width),
          int(height),
          inner_rectangle(inner, width, height),
          v_l1,
          v_ssim,
          clamp ? 0.0f : -endless,
          clamp ? 1.0f : endless};
}

Pixels blended_pixels(Call& call) {
  const int64_t count = call.tensor("alpha").numel();
  cuda_count(3 * count, "numbers in the image");
  return {call.floats("out", {count, 3}), call.floats("alpha", {count}), count};
}

void band_loss_into(Call& call) {
  const auto backgrounds = call.tensors("backgrounds"), targets = call.tensors("targets"), rgb = call.tensors("rgb");
  const auto v_l1 = call.tensors("v_l1"), v_ssim = call.tensors("v_ssim"), loss = call.tensors("loss");
  const at::IntArrayRef inners = call.integers("inners");
  const auto offsets = call.numbers("offsets");
  const float scale = call.read<float>("scale");
  Pixels pixels = blended_pixels(call);
  float* v_out = call.in_place<float>("v_out", {pixels.count, 3});
  float* v_alpha = call.in_place<float>("v_alpha", {pixels.count});
  call.set('P', pixels.count);
  int32_t* last = call.read<int32_t*>("last[P]");
  const auto one = [&](const at::Tensor& given, const char* name, at::IntArrayRef shape) {
    return call.hold(cuda_checked(given, name, shape, at::kFloat, call.like())).const_data_ptr<float>();
  };
  std::vector<Band> bands(targets.size());
  for (size_t k = 0; k < bands.size(); ++k) {
    const at::Tensor target = photograph(call, targets[k], {-1, -1, 3});
    TORCH_CHECK_VALUE(targets[k].scalar_type() == targets[0].scalar_type(), "targets are of several types.");
    const int64_t first = pixels.first;
    bands[k].view = band_view(call, pixels, target, inners.slice(4 * k, 4), one(backgrounds[k], "backgrounds", {3}),
                              one(v_l1[k], "v_l1", {}), one(v_ssim[k], "v_ssim", {}));
    bands[k].results = {call.written<float>(rgb[k], "rgb", {target.size(0), target.size(1), 3}),
                        v_out + 3 * first,
                        v_alpha + first,
                        last == nullptr ? nullptr : last + first,
                        call.written<float>(loss[k], "loss", {}),
                        float(offsets[k]),
                        scale};
  }
  for (size_t k = 0; k < bands.size(); k += kMostBands) {
    Band* some = bands.data() + k;
    const int count = int(std::min<size_t>(kMostBands, bands.size() - k));
    int64_t sums = 0;
    call.check(band_loss_plan(some, count, &sums));
    call.run(band_loss_launch, static_cast<const Band*>(some), count, call.scratch<double>(sums));
  }
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
  m.impl("band_loss_into", bound<band_loss_into>());
}
