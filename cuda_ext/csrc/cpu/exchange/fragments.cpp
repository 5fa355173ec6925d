// CPU twins of `gather_fragments`, `scatter_fragments`, `composite_fragments`, `composite_fragments_backward` and `live_boxes`:
// lines of rectangles, all layers of a line before the next one. Results do not depend on the number of threads.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <vector>

namespace nsmg::fragments_cpu {
namespace {

constexpr int64_t kLines = 8;  // a task: this many lines
constexpr int64_t kNowhere = -(int64_t{1} << 30);

// Lines of all rectangles, counted through.
struct Lines {
  std::vector<int64_t> first;  // of each rectangle, and the number of all

  void add(int64_t height) {
    if (first.empty()) first.push_back(0);
    first.push_back(first.back() + height);
  }
  int64_t count() const { return first.empty() ? 0 : first.back(); }
  int64_t rectangle(int64_t line) const {
    return std::upper_bound(first.begin(), first.end(), line) - first.begin() - 1;
  }
};

template <typename Work>
void for_lines(const Lines& lines, const Work& work) {
  at::parallel_for(0, lines.count(), kLines, [&](int64_t begin, int64_t end) {
    int64_t k = lines.count() > 0 ? lines.rectangle(begin) : 0;
    for (int64_t line = begin; line < end; ++line) {
      while (line >= lines.first[k + 1]) ++k;
      work(k, line - lines.first[k]);
    }
  });
}

Lines lines_of(at::IntArrayRef fragments) {
  TORCH_CHECK_VALUE(fragments.size() % 6 == 0, "fragments holds 6 integers a fragment, got ", fragments.size(), " in all.");
  Lines lines;
  for (size_t k = 0; k < fragments.size(); k += 6) lines.add(fragments[k + 3]);
  return lines;
}

void gather_fragments(const at::Tensor& color_, const at::Tensor& alpha_, at::IntArrayRef fragments, const at::Tensor& out) {
  const at::Tensor color = color_.contiguous(), alpha = alpha_.contiguous();
  const int64_t channels = color.size(1);
  const Lines lines = lines_of(fragments);
  AT_DISPATCH_FLOATING_TYPES(color.scalar_type(), "gather_fragments", [&] {
    const scalar_t *from = color.const_data_ptr<scalar_t>(), *covers = alpha.const_data_ptr<scalar_t>();
    scalar_t* const to = out.mutable_data_ptr<scalar_t>();
    for_lines(lines, [&](int64_t k, int64_t line) {
      const int64_t *n = fragments.data() + 6 * k, width = n[2], first = n[0] + line * n[1];
      scalar_t* row = to + (n[4] + line * width) * (channels + 1);
      for (int64_t x = 0; x < width; ++x, row += channels + 1) {
        for (int64_t c = 0; c < channels; ++c) row[c] = from[(first + x) * channels + c];
        row[channels] = covers[first + x];
      }
    });
  });
}

void scatter_fragments(const at::Tensor& gradients_, at::IntArrayRef fragments, const at::Tensor& v_color,
                    const at::Tensor& v_alpha) {
  const at::Tensor gradients = gradients_.contiguous();
  const int64_t channels = v_color.size(1);
  const Lines lines = lines_of(fragments);
  AT_DISPATCH_FLOATING_TYPES(gradients.scalar_type(), "scatter_fragments", [&] {
    const scalar_t* const from = gradients.const_data_ptr<scalar_t>();
    scalar_t *const to = v_color.mutable_data_ptr<scalar_t>(), *const covers = v_alpha.mutable_data_ptr<scalar_t>();
    for_lines(lines, [&](int64_t k, int64_t line) {
      const int64_t *n = fragments.data() + 6 * k, width = n[2], first = n[0] + line * n[1];
      if (n[5] < 0) return;
      const scalar_t* row = from + (n[5] + line * width) * (channels + 1);
      for (int64_t x = 0; x < width; ++x, row += channels + 1) {
        for (int64_t c = 0; c < channels; ++c) to[(first + x) * channels + c] = row[c];
        covers[first + x] = row[channels];
      }
    });
  });
}

// Patches, one's pixels behind the other's, and which of the layers are a patch's.
struct Patches {
  Lines lines;
  std::vector<int64_t> first_pixel, first_layer;
  at::IntArrayRef sizes, layers;
  int64_t pixels = 0;

  Patches(at::IntArrayRef layers_, at::IntArrayRef sizes_) : sizes(sizes_), layers(layers_) {
    TORCH_CHECK_VALUE(layers.size() % 7 == 0 && sizes.size() % 2 == 0, "layers holds 7 integers each and sizes 2.");
    size_t layer = 0;
    for (size_t k = 0; k < sizes.size() / 2; ++k) {
      first_layer.push_back(int64_t(layer));
      while (7 * layer < layers.size() && layers[7 * layer] == int64_t(k)) ++layer;
      lines.add(sizes[2 * k + 1]);
      first_pixel.push_back(pixels);
      pixels += sizes[2 * k] * sizes[2 * k + 1];
    }
    first_layer.push_back(int64_t(layer));
    TORCH_CHECK_VALUE(7 * layer == layers.size(), "layers must come by patch.");
  }

  // The layer's first row of a line, and how many pixels of that line it has; 0 where it does not overlap the line.
  struct Span {
    int64_t x0, row, back, count;
  };
  Span span(int64_t layer, int64_t y) const {
    const int64_t* n = layers.data() + 7 * layer;
    const int64_t width = n[3] - n[1], before = (y - n[2]) * width;
    if (y < n[2] || y >= n[4]) return {0, 0, 0, 0};
    return {n[1], n[5] + before, n[6] < 0 ? -1 : n[6] + before, width};
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> composite_fragments(const at::Tensor& received_, at::IntArrayRef layers,
                                                                at::IntArrayRef sizes) {
  const at::Tensor received = received_.contiguous();
  const int64_t channels = received.size(1) - 1;
  const Patches patches(layers, sizes);
  const at::TensorOptions options = received.options();
  at::Tensor out = at::zeros({patches.pixels, channels}, options), alpha = at::empty({patches.pixels}, options),
             before = at::empty({received.size(0)}, options);
  AT_DISPATCH_FLOATING_TYPES(received.scalar_type(), "composite_fragments", [&] {
    const scalar_t* const from = received.const_data_ptr<scalar_t>();
    scalar_t *const colors = out.mutable_data_ptr<scalar_t>(), *const covered = alpha.mutable_data_ptr<scalar_t>(),
                    *const lights = before.mutable_data_ptr<scalar_t>();
    for_lines(patches.lines, [&](int64_t k, int64_t y) {
      const int64_t width = sizes[2 * k], first = patches.first_pixel[k] + y * width;
      std::vector<scalar_t> through(width, scalar_t(1)), left(width, scalar_t(1));
      for (int64_t l = patches.first_layer[k]; l < patches.first_layer[k + 1]; ++l) {
        const Patches::Span span = patches.span(l, y);
        for (int64_t i = 0; i < span.count; ++i) {
          const scalar_t* const pixel = from + (span.row + i) * (channels + 1);
          const int64_t x = span.x0 + i;
          const scalar_t light = through[x], covers = pixel[channels];
          lights[span.row + i] = light;
          for (int64_t c = 0; c < channels; ++c) colors[(first + x) * channels + c] += light * pixel[c];
          if (light > scalar_t(0)) left[x] = light * (scalar_t(1) - std::abs(covers));
          through[x] = covers < scalar_t(0) ? scalar_t(0) : light * (scalar_t(1) - covers);
        }
      }
      for (int64_t x = 0; x < width; ++x) covered[first + x] = scalar_t(1) - left[x];
    });
  });
  return {out, alpha, before};
}

at::Tensor composite_fragments_backward(const at::Tensor& received_, const at::Tensor& before_, const at::Tensor& v_out_,
                                     const at::Tensor& v_alpha_, at::IntArrayRef layers, at::IntArrayRef sizes,
                                     int64_t count) {
  const at::Tensor received = received_.contiguous(), before = before_.contiguous(), v_out = v_out_.contiguous(),
                   v_alpha = v_alpha_.contiguous();
  const int64_t channels = received.size(1) - 1;
  const Patches patches(layers, sizes);
  at::Tensor gradients = at::zeros({count, channels + 1}, received.options());
  AT_DISPATCH_FLOATING_TYPES(received.scalar_type(), "composite_fragments_backward", [&] {
    const scalar_t *const from = received.const_data_ptr<scalar_t>(), *const lights = before.const_data_ptr<scalar_t>(),
                   *const v_colors = v_out.const_data_ptr<scalar_t>(), *const v_covered = v_alpha.const_data_ptr<scalar_t>();
    scalar_t* const to = gradients.mutable_data_ptr<scalar_t>();
    for_lines(patches.lines, [&](int64_t k, int64_t y) {
      const int64_t width = sizes[2 * k], first = patches.first_pixel[k] + y * width;
      std::vector<scalar_t> behind(width * channels, scalar_t(0)), rest(width, scalar_t(1));
      for (int64_t l = patches.first_layer[k + 1] - 1; l >= patches.first_layer[k]; --l) {
        const Patches::Span span = patches.span(l, y);
        for (int64_t i = 0; i < span.count; ++i) {
          const scalar_t* const pixel = from + (span.row + i) * (channels + 1);
          const int64_t x = span.x0 + i;
          const scalar_t* const v = v_colors + (first + x) * channels;
          scalar_t* const color = behind.data() + x * channels;
          const scalar_t covers = pixel[channels], light = lights[span.row + i];
          if (covers < scalar_t(0)) {  // drawing stopped here: nothing behind counts
            rest[x] = scalar_t(1);
            std::fill(color, color + channels, scalar_t(0));
          }
          if (span.back >= 0) {
            scalar_t* const gradient = to + (span.back + i) * (channels + 1);
            scalar_t along = scalar_t(0);
            for (int64_t c = 0; c < channels; ++c) {
              gradient[c] = light * v[c];
              along += v[c] * color[c];
            }
            const scalar_t by_covered = light * (v_covered[first + x] * rest[x] - along);
            gradient[channels] = covers < scalar_t(0) ? -by_covered : by_covered;
          }
          const scalar_t through = scalar_t(1) - std::abs(covers);
          for (int64_t c = 0; c < channels; ++c) color[c] = pixel[c] + through * color[c];
          rest[x] *= through;
        }
      }
    });
  });
  return gradients;
}

at::Tensor live_boxes(const at::Tensor& before_, at::IntArrayRef fragments, int64_t slots, double least) {
  const at::Tensor before = before_.contiguous();
  TORCH_CHECK_VALUE(fragments.size() % 6 == 0, "fragments holds 6 integers a fragment, got ", fragments.size(), " in all.");
  at::Tensor boxes = at::full({slots, 5}, kNowhere, before.options().dtype(at::kLong));
  int64_t* const all = boxes.mutable_data_ptr<int64_t>();
  for (int64_t slot = 0; slot < slots; ++slot) all[5 * slot + 4] = 0;
  AT_DISPATCH_FLOATING_TYPES(before.scalar_type(), "live_boxes", [&] {
    const scalar_t* const lights = before.const_data_ptr<scalar_t>();
    for (size_t k = 0; k < fragments.size(); k += 6) {
      const int64_t *n = fragments.data() + k, x0 = n[2], y0 = n[3], width = n[4];
      int64_t* const box = all + 5 * n[0];
      for (int64_t y = 0; y < n[5]; ++y) {
        const scalar_t* const line = lights + n[1] + y * width;
        int64_t first = width, last = -1, many = 0;
        for (int64_t x = 0; x < width; ++x) {
          if (!(line[x] >= scalar_t(least))) continue;
          first = std::min(first, x);
          last = x;
          ++many;
        }
        if (many == 0) continue;
        box[0] = std::max(box[0], -(x0 + first));
        box[1] = std::max(box[1], -(y0 + y));
        box[2] = std::max(box[2], x0 + last + 1);
        box[3] = std::max(box[3], y0 + y + 1);
        box[4] += many;
      }
    }
  });
  return boxes;
}

}  // namespace
}  // namespace nsmg::fragments_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("gather_fragments", &nsmg::fragments_cpu::gather_fragments);
  m.impl("scatter_fragments", &nsmg::fragments_cpu::scatter_fragments);
  m.impl("composite_fragments", &nsmg::fragments_cpu::composite_fragments);
  m.impl("composite_fragments_backward", &nsmg::fragments_cpu::composite_fragments_backward);
  m.impl("live_boxes", &nsmg::fragments_cpu::live_boxes);
}
