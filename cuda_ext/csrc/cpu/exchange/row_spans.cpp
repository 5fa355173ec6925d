// ns_multigpu::row_spans on CPU: how many rows begin and end at each row of tiles of each layer.

#include <ATen/Dispatch.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <optional>

#include "cpu/common/rows.h"

namespace nsmg {
namespace {

constexpr int64_t kTile = 16;

// The pixels along one axis whose centres a box of this extent around a mean holds; NaN holds none.
template <typename T>
struct Reach {
  int64_t first = 0, end = 0;

  Reach(T mean, T extent, int64_t size) {
    const T low = std::ceil(mean - extent - T(0.5)), high = std::floor(mean + extent + T(0.5));
    if (!(low < T(size)) || !(high > T(0))) return;
    first = low > T(0) ? static_cast<int64_t>(low) : 0;
    end = high < T(size) ? static_cast<int64_t>(high) : size;
  }
};

at::Tensor row_spans(const at::Tensor& layers_, const at::Tensor& means2d_, const at::Tensor& radii_, int64_t width,
                     int64_t height, int64_t layer_count, const std::optional<at::Tensor>& count_,
                     const std::optional<at::Tensor>& cells_) {
  const auto dtype = means2d_.scalar_type();
  const int64_t rows = means2d_.size(0);
  const at::Tensor layers = checked(layers_, "layers", {rows}, at::kInt),
                   means2d = checked(means2d_, "means2d", {rows, 2}, dtype),
                   radii = checked(radii_, "radii", {rows, 2}, at::kInt);
  int64_t real = rows, parts = 1;
  if (count_.has_value()) {
    const at::Tensor count = checked(*count_, "count", {1}, at::kLong);
    real = std::min(std::max<int64_t>(count.const_data_ptr<int64_t>()[0], 0), rows);
  }
  at::Tensor cells;
  if (cells_.has_value()) {
    cells = checked(*cells_, "cells", {-1, rows}, at::kBool);
    parts = cells.size(0);
  }
  const int64_t lines = (height + kTile - 1) / kTile;
  const at::Tensor spans = at::zeros({layer_count * parts * 2 * lines}, means2d.options().dtype(at::kLong));
  int64_t* const out = spans.mutable_data_ptr<int64_t>();
  const bool* const reached = cells.defined() ? cells.const_data_ptr<bool>() : nullptr;
  const int32_t *layer = layers.const_data_ptr<int32_t>(), *radius = radii.const_data_ptr<int32_t>();
  AT_DISPATCH_FLOATING_TYPES(dtype, "row_spans", [&] {
    const scalar_t* means = means2d.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < real; ++i) {
      const int32_t *extent = radius + 2 * i;
      if (layer[i] < 0 || layer[i] >= layer_count || extent[0] <= 0 || extent[1] <= 0) continue;
      const Reach<scalar_t> x(means[2 * i], scalar_t(extent[0]), width), y(means[2 * i + 1], scalar_t(extent[1]), height);
      if (x.first >= x.end || y.first >= y.end) continue;
      int64_t* part = out + layer[i] * parts * 2 * lines;
      for (int64_t cell = 0; cell < parts; ++cell, part += 2 * lines) {
        if (reached != nullptr && !reached[cell * rows + i]) continue;
        ++part[y.first / kTile];
        ++part[lines + (y.end - 1) / kTile];
      }
    }
  });
  return spans;
}

}  // namespace
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) { m.impl("row_spans", &nsmg::row_spans); }
