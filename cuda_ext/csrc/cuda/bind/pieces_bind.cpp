// `gather_pieces`, `scatter_pieces`, `composite_pieces` and `composite_pieces_backward` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cuda/bind/check.h"
#include "cuda/exchange/pieces.h"

namespace nsmg {
namespace pieces_bind {

template <typename Row>
at::Tensor room_for(const std::vector<Row>& rows, const at::TensorOptions& options) {
  return at::empty({int64_t(rows.size() * sizeof(Row))}, options.dtype(at::kByte));
}

struct Pieces {
  std::vector<PixelPiece> rows;
  int most = 0;

  // `place`: which of a piece's 6 numbers is its row.
  Pieces(at::IntArrayRef numbers, int place) {
    TORCH_CHECK_VALUE(numbers.size() % 6 == 0, "pieces holds 6 integers a piece, got ", numbers.size(), " in all.");
    for (size_t k = 0; k < numbers.size(); k += 6) {
      const int64_t* n = numbers.data() + k;
      rows.push_back({int32_t(n[0]), int32_t(n[1]), int32_t(n[2]), int32_t(n[3]), int32_t(n[place])});
      most = std::max(most, cuda_count(n[2] * n[3], "pixels"));
    }
    TORCH_CHECK_VALUE(rows.size() < 65536, "there are ", rows.size(), " pieces; the CUDA operators take 65535.");
  }
};

void gather_pieces(const at::Tensor& color_, const at::Tensor& alpha_, at::IntArrayRef numbers,
                   const at::Tensor& out) {
  const int64_t pixels = color_.size(0), channels = color_.size(1);
  cuda_count(pixels, "pixels");
  const at::Tensor color = cuda_floats(color_, "color", {pixels, channels}, color_),
                   alpha = cuda_floats(alpha_, "alpha", {pixels}, color_);
  cuda_floats(out, "out", {-1, channels + 1}, color_);
  const Pieces pieces(numbers, 4);
  const c10::cuda::CUDAGuard guard(color.device());
  const at::Tensor table = room_for(pieces.rows, color.options());
  NSMG_CUDA_CHECK(gather_pieces_launch(color.const_data_ptr<float>(), alpha.const_data_ptr<float>(), int(channels),
                                       pieces.rows.data(), int(pieces.rows.size()), pieces.most,
                                       static_cast<PixelPiece*>(table.mutable_data_ptr()),
                                       out.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
}

void scatter_pieces(const at::Tensor& gradients_, at::IntArrayRef numbers, const at::Tensor& v_color,
                    const at::Tensor& v_alpha) {
  const int64_t pixels = v_color.size(0), channels = v_color.size(1);
  cuda_count(pixels, "pixels");
  const at::Tensor gradients = cuda_floats(gradients_, "gradients", {-1, channels + 1}, v_color);
  cuda_floats(v_color, "v_color", {pixels, channels}, v_color);
  cuda_floats(v_alpha, "v_alpha", {pixels}, v_color);
  const Pieces pieces(numbers, 5);
  const c10::cuda::CUDAGuard guard(v_color.device());
  const at::Tensor table = room_for(pieces.rows, v_color.options());
  NSMG_CUDA_CHECK(scatter_pieces_launch(gradients.const_data_ptr<float>(), int(channels), pieces.rows.data(),
                                        int(pieces.rows.size()), pieces.most,
                                        static_cast<PixelPiece*>(table.mutable_data_ptr()),
                                        v_color.mutable_data_ptr<float>(), v_alpha.mutable_data_ptr<float>(),
                                        c10::cuda::getCurrentCUDAStream()));
}

// Layers by patch, and room for them on the device.
struct Layers {
  at::Tensor received;
  std::vector<PixelLayer> rows;
  std::vector<LayeredPatch> patches;
  at::Tensor layer_table, patch_table;
  int channels, pixels = 0, most = 0;

  Layers(const at::Tensor& received_, at::IntArrayRef numbers, at::IntArrayRef sizes)
      : received(cuda_floats(received_, "received", {-1, -1}, received_)),
        channels(static_cast<int>(received.size(1)) - 1) {
    TORCH_CHECK_VALUE(channels == 3 || channels == 4, "on CUDA pixels have 3 or 4 features, not ", channels, ".");
    TORCH_CHECK_VALUE(numbers.size() % 7 == 0 && sizes.size() % 2 == 0, "layers holds 7 integers each and sizes 2.");
    cuda_count(received.size(0), "pixels of layers");
    for (size_t k = 0; k < numbers.size(); k += 7) {
      const int64_t* n = numbers.data() + k;
      rows.push_back({int32_t(n[1]), int32_t(n[2]), int32_t(n[3]), int32_t(n[4]), int32_t(n[5]), int32_t(n[6])});
    }
    size_t layer = 0;
    for (size_t k = 0; k < sizes.size(); k += 2) {
      const int first = int(layer), area = cuda_count(sizes[k] * sizes[k + 1], "pixels");
      while (layer < rows.size() && numbers[7 * layer] == int64_t(k / 2)) ++layer;
      patches.push_back({pixels, int32_t(sizes[k]), int32_t(sizes[k + 1]), first, int32_t(layer)});
      pixels = cuda_count(int64_t{pixels} + area, "pixels");
      most = std::max(most, area);
    }
    TORCH_CHECK_VALUE(layer == rows.size(), "layers must come by patch.");
    TORCH_CHECK_VALUE(patches.size() < 65536, "there are ", patches.size(), " patches; the CUDA operators take 65535.");
  }

  HostLayers host() const { return {rows.data(), patches.data(), int(rows.size()), int(patches.size()), most}; }

  DeviceLayers device() {
    layer_table = room_for(rows, received.options());
    patch_table = room_for(patches, received.options());
    return {static_cast<PixelLayer*>(layer_table.mutable_data_ptr()),
            static_cast<LayeredPatch*>(patch_table.mutable_data_ptr())};
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> composite_pieces(const at::Tensor& received, at::IntArrayRef numbers,
                                                                at::IntArrayRef sizes) {
  Layers layers(received, numbers, sizes);
  const c10::cuda::CUDAGuard guard(received.device());
  const at::TensorOptions options = received.options();
  at::Tensor out = at::empty({layers.pixels, layers.channels}, options), alpha = at::empty({layers.pixels}, options),
             before = at::empty({received.size(0)}, options);
  NSMG_CUDA_CHECK(composite_pieces_launch(layers.received.const_data_ptr<float>(), layers.channels, layers.host(),
                                          layers.device(), out.mutable_data_ptr<float>(),
                                          alpha.mutable_data_ptr<float>(), before.mutable_data_ptr<float>(),
                                          c10::cuda::getCurrentCUDAStream()));
  return {out, alpha, before};
}

at::Tensor composite_pieces_backward(const at::Tensor& received, const at::Tensor& before_, const at::Tensor& v_out_,
                                     const at::Tensor& v_alpha_, at::IntArrayRef numbers, at::IntArrayRef sizes,
                                     int64_t count) {
  Layers layers(received, numbers, sizes);
  const at::Tensor before = cuda_floats(before_, "before", {received.size(0)}, received),
                   v_out = cuda_floats(v_out_, "v_out", {layers.pixels, layers.channels}, received),
                   v_alpha = cuda_floats(v_alpha_, "v_alpha", {layers.pixels}, received);
  const c10::cuda::CUDAGuard guard(received.device());
  at::Tensor gradients = at::zeros({count, layers.channels + 1}, received.options());
  NSMG_CUDA_CHECK(composite_pieces_backward_launch(
      layers.received.const_data_ptr<float>(), before.const_data_ptr<float>(), v_out.const_data_ptr<float>(),
      v_alpha.const_data_ptr<float>(), layers.channels, layers.host(), layers.device(),
      gradients.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return gradients;
}

at::Tensor live_boxes(const at::Tensor& before_, at::IntArrayRef numbers, int64_t slots, double least) {
  const at::Tensor before = cuda_floats(before_, "before", {-1}, before_);
  cuda_count(before.size(0), "pixels of layers");
  TORCH_CHECK_VALUE(numbers.size() % 6 == 0, "pieces holds 6 integers a piece, got ", numbers.size(), " in all.");
  std::vector<WatchedPiece> pieces;
  int most = 0;
  for (size_t k = 0; k < numbers.size(); k += 6) {
    const int64_t* n = numbers.data() + k;
    pieces.push_back({int32_t(n[0]), int32_t(n[1]), int32_t(n[2]), int32_t(n[3]), int32_t(n[4]), int32_t(n[5])});
    most = std::max(most, cuda_count(n[4] * n[5], "pixels"));
  }
  TORCH_CHECK_VALUE(pieces.size() < 65536, "there are ", pieces.size(), " pieces; the CUDA operators take 65535.");
  const c10::cuda::CUDAGuard guard(before.device());
  const at::Tensor table = room_for(pieces, before.options());
  at::Tensor boxes = at::empty({slots, 5}, before.options().dtype(at::kLong));
  NSMG_CUDA_CHECK(live_boxes_launch(before.const_data_ptr<float>(), pieces.data(), int(pieces.size()), most,
                                    static_cast<WatchedPiece*>(table.mutable_data_ptr()), cuda_count(slots, "slots"),
                                    float(least), boxes.mutable_data_ptr<int64_t>(),
                                    c10::cuda::getCurrentCUDAStream()));
  return boxes;
}

}  // namespace pieces_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("gather_pieces", &nsmg::pieces_bind::gather_pieces);
  m.impl("scatter_pieces", &nsmg::pieces_bind::scatter_pieces);
  m.impl("composite_pieces", &nsmg::pieces_bind::composite_pieces);
  m.impl("composite_pieces_backward", &nsmg::pieces_bind::composite_pieces_backward);
  m.impl("live_boxes", &nsmg::pieces_bind::live_boxes);
}
