// Pixels that are drawn cell by cell, on CUDA: gathered, scattered, composited front to back, and the way back.

#include "cuda/bind/call.h"
#include "cuda/exchange/pieces.h"

#include <algorithm>

namespace nsmg {
namespace pieces_bind {

// Six numbers a piece, and the most pixels of any; `made` gets a piece's numbers.
template <typename Row, typename Make>
std::vector<Row> pieces_of(at::IntArrayRef numbers, int width, int* most, const Make& made) {
  TORCH_CHECK_VALUE(numbers.size() / 6 < 65536, "there are ", numbers.size() / 6,
                    " pieces; the CUDA operators take 65535.");
  std::vector<Row> rows;
  for (size_t k = 0; k < numbers.size(); k += 6) {
    const int64_t* n = numbers.data() + k;
    rows.push_back(made(n));
    *most = std::max(*most, cuda_count(n[width] * n[width + 1], "pixels"));
  }
  return rows;
}

struct Pieces {
  int most = 0;
  std::vector<PixelPiece> rows;

  // `place`: where among a piece's 6 numbers its row is.
  Pieces(Call& call, int place)
      : rows(pieces_of<PixelPiece>(call.integers("pieces"), 2, &most, [place](const int64_t* n) -> PixelPiece {
          return {int32_t(n[0]), int32_t(n[1]), int32_t(n[2]), int32_t(n[3]), int32_t(n[place])};
        })) {}
};

void gather_pieces(Call& call) {
  const auto *color = call.read<const float*>("color[P,C]"), *alpha = call.read<const float*>("alpha[P]");
  auto* out = call.read<float*>("out[?,C+1]");
  const Pieces pieces(call, 4);
  call.run(gather_pieces_launch, color, alpha, call.read<int>("C"), pieces.rows.data(), int(pieces.rows.size()),
           pieces.most, call.scratch_for(pieces.rows), out);
}

void scatter_pieces(Call& call) {
  auto *v_color = call.read<float*>("v_color[P,C]"), *v_alpha = call.read<float*>("v_alpha[P]");
  const auto* gradients = call.read<const float*>("gradients[?,C+1]");
  const Pieces pieces(call, 5);
  call.run(scatter_pieces_launch, gradients, call.read<int>("C"), pieces.rows.data(), int(pieces.rows.size()),
           pieces.most, call.scratch_for(pieces.rows), v_color, v_alpha);
}

// Layers by patch, and room for them on the device.
struct Layers {
  std::vector<PixelLayer> rows;
  std::vector<LayeredPatch> patches;
  const float* received;
  int count, channels, pixels = 0, most = 0;

  explicit Layers(Call& call) : received(call.read<const float*>("received[L,D]")) {
    const at::IntArrayRef numbers = call.integers("layers"), sizes = call.integers("sizes");
    count = call.read<int>("L");
    channels = call.read<int>("D") - 1;
    TORCH_CHECK_VALUE(channels == 3 || channels == 4, "on CUDA pixels have 3 or 4 features, not ", channels, ".");
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
    TORCH_CHECK_VALUE(patches.size() < 65536, "there are ", patches.size(), " patches; the CUDA operators take 65535.");
  }

  HostLayers host() const { return {rows.data(), patches.data(), int(rows.size()), int(patches.size()), most}; }
  DeviceLayers device(Call& call) const { return {call.scratch_for(rows), call.scratch_for(patches)}; }
};

void composite_pieces(Call& call) {
  const Layers layers(call);
  float* out = call.out<float>({layers.pixels, layers.channels});
  float* alpha = call.out<float>({layers.pixels});
  float* before = call.out<float>({layers.count});
  call.run(composite_pieces_launch, layers.received, layers.channels, layers.host(), layers.device(call), out, alpha,
           before);
}

void composite_pieces_backward(Call& call) {
  const Layers layers(call);
  const float* before = call.floats("before", {layers.count});
  const float* v_out = call.floats("v_out", {layers.pixels, layers.channels});
  const float* v_alpha = call.floats("v_alpha", {layers.pixels});
  float* gradients = call.out<float>({call.integer("count"), layers.channels + 1}, true);
  call.run(composite_pieces_backward_launch, layers.received, before, v_out, v_alpha, layers.channels, layers.host(),
           layers.device(call), gradients);
}

void live_boxes(Call& call) {
  const auto* before = call.read<const float*>("before[L]");
  const int slots = call.read<int>("#slots");
  int most = 0;
  const auto pieces =
      pieces_of<WatchedPiece>(call.integers("pieces"), 4, &most, [](const int64_t* n) -> WatchedPiece {
        return {int32_t(n[0]), int32_t(n[1]), int32_t(n[2]), int32_t(n[3]), int32_t(n[4]), int32_t(n[5])};
      });
  call.run(live_boxes_launch, before, pieces.data(), int(pieces.size()), most, call.scratch_for(pieces), slots,
           call.read<float>("least"), call.out<int64_t>({slots, 5}));
}

}  // namespace pieces_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  using namespace nsmg::pieces_bind;
  using nsmg::bound;
  m.impl("gather_pieces", bound<gather_pieces>());
  m.impl("scatter_pieces", bound<scatter_pieces>());
  m.impl("composite_pieces", bound<composite_pieces>());
  m.impl("composite_pieces_backward", bound<composite_pieces_backward>());
  m.impl("live_boxes", bound<live_boxes>());
}
