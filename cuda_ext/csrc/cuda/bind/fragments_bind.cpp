// Pixels that are drawn cell by cell, on CUDA: gathered, scattered, composited front to back, and the way back.

#include "cuda/bind/call.h"
#include "cuda/exchange/fragments.h"

#include <algorithm>

namespace nsmg {
namespace fragments_bind {

// Six numbers a piece, and the most pixels of any; `made` gets a piece's numbers.
template <typename Row, typename Make>
std::vector<Row> fragments_of(at::IntArrayRef numbers, int width, int* most, const Make& made) {
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
  const auto *color = call.read<const float*>("color[P,C]"), *alpha = call.read<const float*>("alpha[P]");
  auto* out = call.read<float*>("out[?,C+1]");
  const Fragments fragments(call, 4);
  call.run(gather_fragments_launch, color, alpha, call.read<int>("C"), fragments.rows.data(), int(fragments.rows.size()),
           fragments.most, call.scratch_for(fragments.rows), out);
}

void scatter_fragments(Call& call) {
  auto *v_color = call.read<float*>("v_color[P,C]"), *v_alpha = call.read<float*>("v_alpha[P]");
  const auto* gradients = call.read<const float*>("gradients[?,C+1]");
  const Fragments fragments(call, 5);
  call.run(scatter_fragments_launch, gradients, call.read<int>("C"), fragments.rows.data(), int(fragments.rows.size()),
           fragments.most, call.scratch_for(fragments.rows), v_color, v_alpha);
}

// Layers by patch, and device memory for them.
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

void composite_fragments(Call& call) {
  const Layers layers(call);
  float* out = call.out<float>({layers.pixels, layers.channels});
  float* alpha = call.out<float>({layers.pixels});
  float* before = call.out<float>({layers.count});
  call.run(composite_fragments_launch, layers.received, layers.channels, layers.host(), layers.device(call), out, alpha,
           before);
}

void composite_fragments_backward(Call& call) {
  const Layers layers(call);
  const float* before = call.floats("before", {layers.count});
  const float* v_out = call.floats("v_out", {layers.pixels, layers.channels});
  const float* v_alpha = call.floats("v_alpha", {layers.pixels});
  float* gradients = call.out<float>({call.integer("count"), layers.channels + 1}, true);
  call.run(composite_fragments_backward_launch, layers.received, before, v_out, v_alpha, layers.channels, layers.host(),
           layers.device(call), gradients);
}

void live_boxes(Call& call) {
  const auto* before = call.read<const float*>("before[L]");
  const int slots = call.read<int>("#slots");
  int most = 0;
  const auto fragments =
      fragments_of<WatchedPiece>(call.integers("fragments"), 4, &most, [](const int64_t* n) -> WatchedPiece {
        return {int32_t(n[0]), int32_t(n[1]), int32_t(n[2]), int32_t(n[3]), int32_t(n[4]), int32_t(n[5])};
      });
  call.run(live_boxes_launch, before, fragments.data(), int(fragments.size()), most, call.scratch_for(fragments), slots,
           call.read<float>("least"), call.out<int64_t>({slots, 5}));
}

}  // namespace fragments_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  using namespace nsmg::fragments_bind;
  using nsmg::bound;
  m.impl("gather_fragments", bound<gather_fragments>());
  m.impl("scatter_fragments", bound<scatter_fragments>());
  m.impl("composite_fragments", bound<composite_fragments>());
  m.impl("composite_fragments_backward", bound<composite_fragments_backward>());
  m.impl("live_boxes", bound<live_boxes>());
}
