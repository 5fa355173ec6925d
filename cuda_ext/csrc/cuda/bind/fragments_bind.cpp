// Pixels that are drawn cell by cell, on CUDA: gathered, scattered, composited front to back, and the way back.

#include "cuda/bind/call.h"
#include "cuda/exchange/fragments.h"

#include <algorithm>

namespace nsmg {
namespace fragments_bind {

template <typename Row>
Row* capacity_for(Call& call, const std::vector<Row>& rows) {
  return static_cast<Row*>(call.scratch_bytes(int64_t(rows.size() * sizeof(Row))));
}

// Six numbers a piece, and the most pixels of any; `made` gets a piece's numbers.
template <typename Row, typename Make>
std::vector<Row> fragments_of(at::IntArrayRef numbers, int width, int* most, const Make& made) {
  TORCH_CHECK_VALUE(numbers.size() % 6 == 0, "fragments holds 6 integers a fragment, got ", numbers.size(), " in all.");
  TORCH_CHECK_VALUE(numbers.size() / 6 < 65536, "there are ", numbers.size() / 6,
                    " fragments; the CUDA operators take 65535.");
  std::vector<Row> rows;
  for (size_t k = 0; k < numbers.size(); k += 6) {
    const int64_t* n = numbers.data() + k;
    rows.push_back(made(n));
    *most = std::max(*most, cuda_count(n[width] * n[width + 1], "pixels"));
  }
  return rows;
}

struct Fragments {
  int most = 0;
  std::vector<PixelPiece> rows;

  // `place`: where among a piece's 6 numbers its row is.
  Fragments(Call& call, int place)
      : rows(fragments_of<PixelPiece>(call.integers("fragments"), 2, &most, [place](const int64_t* n) -> PixelPiece {
          return {int32_t(n[0]), int32_t(n[1]), int32_t(n[2]), int32_t(n[3]), int32_t(n[place])};
        })) {}
};

void gather_fragments(Call& call) {
  const int pixels = call.count("color", "pixels"), channels = call.count("color", "channels", 1);
  const float* color = call.floats("color", {pixels, channels});
  const float* alpha = call.floats("alpha", {pixels});
  float* out = call.in_place<float>("out", {-1, channels + 1});
  const Fragments fragments(call, 4);
  NSMG_CUDA_CHECK(gather_fragments_launch(color, alpha, channels, fragments.rows.data(), int(fragments.rows.size()),
                                       fragments.most, capacity_for(call, fragments.rows), out, call.stream()));
}

void scatter_fragments(Call& call) {
  const int pixels = call.count("v_color", "pixels"), channels = call.count("v_color", "channels", 1);
  const float* gradients = call.floats("gradients", {-1, channels + 1});
  float* v_color = call.in_place<float>("v_color", {pixels, channels});
  float* v_alpha = call.in_place<float>("v_alpha", {pixels});
  const Fragments fragments(call, 5);
  NSMG_CUDA_CHECK(scatter_fragments_launch(gradients, channels, fragments.rows.data(), int(fragments.rows.size()), fragments.most,
                                        capacity_for(call, fragments.rows), v_color, v_alpha, call.stream()));
}

// Layers by patch, and device memory for them.
struct Layers {
  std::vector<PixelLayer> rows;
  std::vector<LayeredPatch> patches;
  const float* received;
  int count, channels, pixels = 0, most = 0;

  explicit Layers(Call& call)
      : count(call.count("received", "pixels of layers")), channels(call.count("received", "channels", 1) - 1) {
    const at::IntArrayRef numbers = call.integers("layers"), sizes = call.integers("sizes");
    received = call.floats("received", {count, channels + 1});
    TORCH_CHECK_VALUE(channels == 3 || channels == 4, "on CUDA pixels have 3 or 4 features, not ", channels, ".");
    TORCH_CHECK_VALUE(numbers.size() % 7 == 0 && sizes.size() % 2 == 0, "layers holds 7 integers each and sizes 2.");
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
  DeviceLayers device(Call& call) const { return {capacity_for(call, rows), capacity_for(call, patches)}; }
};

void composite_fragments(Call& call) {
  const Layers layers(call);
  float* out = call.out<float>({layers.pixels, layers.channels});
  float* alpha = call.out<float>({layers.pixels});
  float* before = call.out<float>({layers.count});
  NSMG_CUDA_CHECK(composite_fragments_launch(layers.received, layers.channels, layers.host(), layers.device(call), out,
                                          alpha, before, call.stream()));
}

void composite_fragments_backward(Call& call) {
  const Layers layers(call);
  const float* before = call.floats("before", {layers.count});
  const float* v_out = call.floats("v_out", {layers.pixels, layers.channels});
  const float* v_alpha = call.floats("v_alpha", {layers.pixels});
  float* gradients = call.out_zeros<float>({call.integer("count"), layers.channels + 1});
  NSMG_CUDA_CHECK(composite_fragments_backward_launch(layers.received, before, v_out, v_alpha, layers.channels,
                                                   layers.host(), layers.device(call), gradients, call.stream()));
}

void live_boxes(Call& call) {
  const int pixels = call.count("before", "pixels of layers"), slots = call.counted("slots", "slots");
  const float* before = call.floats("before", {pixels});
  int most = 0;
  const auto fragments =
      fragments_of<WatchedPiece>(call.integers("fragments"), 4, &most, [](const int64_t* n) -> WatchedPiece {
        return {int32_t(n[0]), int32_t(n[1]), int32_t(n[2]), int32_t(n[3]), int32_t(n[4]), int32_t(n[5])};
      });
  NSMG_CUDA_CHECK(live_boxes_launch(before, fragments.data(), int(fragments.size()), most, capacity_for(call, fragments), slots,
                                    call.number("least"), call.out<int64_t>({slots, 5}), call.stream()));
}

}  // namespace fragments_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  namespace bind = nsmg::fragments_bind;
  m.impl("gather_fragments", nsmg::bound<bind::gather_fragments>());
  m.impl("scatter_fragments", nsmg::bound<bind::scatter_fragments>());
  m.impl("composite_fragments", nsmg::bound<bind::composite_fragments>());
  m.impl("composite_fragments_backward", nsmg::bound<bind::composite_fragments_backward>());
  m.impl("live_boxes", nsmg::bound<bind::live_boxes>());
}
