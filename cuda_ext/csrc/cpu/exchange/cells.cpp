// ns_multigpu::cells_reached on CPU: which rows may lie in a cell's window of a tile.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

#include "cpu/common/rows.h"

namespace nsmg::cells_cpu {
namespace {

constexpr double kTile = 16.0;

// Along one of the world's axes: where a view's camera is, and what a ray goes for each unit of depth at pixel (0, 0), and
// more for each pixel to the right and down.
struct Ray {
  double start, corner, right, down;
};

template <typename T>
std::vector<Ray> rays_of(const T* viewmats, const T* Ks, int64_t views) {
  std::vector<Ray> rays(3 * views);
  for (int64_t v = 0; v < views; ++v) {
    const T *m = viewmats + 16 * v, *K = Ks + 9 * v;
    for (int64_t axis = 0; axis < 3; ++axis) {
      const double x = m[axis], y = m[4 + axis], z = m[8 + axis];
      Ray& ray = rays[3 * v + axis];
      ray.right = x / double(K[0]);
      ray.down = y / double(K[4]);
      ray.corner = z - double(K[2]) * ray.right - double(K[5]) * ray.down;
      ray.start = -(x * double(m[3]) + y * double(m[7]) + z * double(m[11]));
    }
  }
  return rays;
}

double tile_middle(double pixel) { return std::floor(pixel / kTile) * kTile + kTile / 2; }

at::Tensor cells_reached(const at::Tensor& view_ids_, const at::Tensor& means2d_, const at::Tensor& radii_,
                         const at::Tensor& depths_, const at::Tensor& viewmats_, const at::Tensor& Ks_,
                         at::ArrayRef<double> boxes) {
  const auto dtype = means2d_.scalar_type();
  const int64_t rows = means2d_.size(0), views = viewmats_.size(0);
  const at::Tensor view_ids = checked(view_ids_, "view_ids", {rows}, at::kInt),
                   means2d = checked(means2d_, "means2d", {rows, 2}, dtype),
                   radii = checked(radii_, "radii", {rows, 2}, at::kInt),
                   depths = checked(depths_, "depths", {rows}, dtype),
                   viewmats = checked(viewmats_, "viewmats", {views, 4, 4}, dtype),
                   Ks = checked(Ks_, "Ks", {views, 3, 3}, dtype);
  TORCH_CHECK_VALUE(views > 0 && boxes.size() % 6 == 0, "boxes must hold 6 numbers a cell, and there must be a view.");
  const int64_t cells = static_cast<int64_t>(boxes.size() / 6);
  const at::Tensor in_cells = at::empty({cells, rows}, view_ids.options().dtype(at::kBool));
  bool* const out = in_cells.mutable_data_ptr<bool>();
  AT_DISPATCH_FLOATING_TYPES(dtype, "cells_reached", [&] {
    const auto rays = rays_of(viewmats.const_data_ptr<scalar_t>(), Ks.const_data_ptr<scalar_t>(), views);
    const scalar_t *means = means2d.const_data_ptr<scalar_t>(), *depth = depths.const_data_ptr<scalar_t>();
    const int32_t *of_view = view_ids.const_data_ptr<int32_t>(), *radius = radii.const_data_ptr<int32_t>();
    at::parallel_for(0, rows, kChunk, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        double centre[2], half[2];
        for (int64_t k = 0; k < 2; ++k) {
          const double mean = means[2 * i + k], extent = radius[2 * i + k];
          const double first = tile_middle(mean - extent), last = tile_middle(mean + extent);
          centre[k] = (first + last) / 2;
          half[k] = (last - first) / 2;
        }
        const Ray* ray = rays.data() + 3 * std::min<int64_t>(std::max<int64_t>(of_view[i], 0), views - 1);
        double low[3], high[3];
        for (int64_t axis = 0; axis < 3; ++axis) {
          const Ray& of = ray[axis];
          const double along = of.corner + of.right * centre[0] + of.down * centre[1];
          const double spread = std::abs(of.right) * half[0] + std::abs(of.down) * half[1];
          const double at = of.start + double(depth[i]) * along;
          const double width = double(depth[i]) * spread * (1 + 1e-6) + 1e-9 * std::abs(at);  // depths are rounded
          low[axis] = at - width;
          high[axis] = at + width;
        }
        for (int64_t cell = 0; cell < cells; ++cell) {
          const double* box = boxes.data() + 6 * cell;
          bool inside = true;
          for (int64_t axis = 0; axis < 3; ++axis) {
            inside &= std::isinf(box[axis]) || high[axis] >= box[axis];
            inside &= std::isinf(box[3 + axis]) || low[axis] <= box[3 + axis];
          }
          out[cell * rows + i] = inside;
        }
      }
    });
  });
  return in_cells;
}

}  // namespace
}  // namespace nsmg::cells_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) { m.impl("cells_reached", &nsmg::cells_cpu::cells_reached); }
