// ns_multigpu::encode_grid and its backward on CPU.

#include "common/hash_grid.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "cpu/common/rows.h"

namespace nsmg::encode_grid_cpu {
namespace {

// The checked inputs that forward and backward share.
struct Grid {
  at::Tensor positions, table, scalings;
  int64_t count, levels, width, log2_size;

  template <typename T>
  Voxel<T> voxel(int64_t position, int64_t level) const {
    return {positions.const_data_ptr<T>() + 3 * position, scalings.const_data_ptr<T>()[level]};
  }

  // Calls f(position, voxel, level's first row) for each position of a level.
  template <typename T, typename F>
  void each(int64_t begin, int64_t end, int64_t level, const F& f) const {
    for (int64_t i = begin; i < end; ++i) f(i, voxel<T>(i, level), level << log2_size);
  }

  unsigned mask() const { return (1u << log2_size) - 1u; }
};

Grid checked_grid(const at::Tensor& positions, const at::Tensor& table, const at::Tensor& scalings, int64_t log2_size) {
  const auto dtype = positions.scalar_type();
  const int64_t levels = scalings.numel();
  TORCH_CHECK_VALUE(0 <= log2_size && log2_size < 32, "log2_size must be from 0 to 31, not ", log2_size, ".");
  return {checked(positions, "positions", {-1, 3}, dtype),
          checked(table, "table", {levels << log2_size, -1}, dtype),
          checked(scalings, "scalings", {levels}, dtype),
          positions.size(0), levels, table.size(1), log2_size};
}

at::Tensor encode_grid(const at::Tensor& positions, const at::Tensor& table, const at::Tensor& scalings,
                       int64_t log2_size) {
  const Grid grid = checked_grid(positions, table, scalings, log2_size);
  const int64_t row_width = grid.levels * grid.width;
  at::Tensor features = at::zeros({grid.count, row_width}, grid.positions.options());
  AT_DISPATCH_FLOATING_TYPES(positions.scalar_type(), "encode_grid", [&] {
    using T = scalar_t;
    const T* const rows = grid.table.const_data_ptr<T>();
    T* const out = features.mutable_data_ptr<T>();
    at::parallel_for(0, grid.count, kChunk, [&](int64_t begin, int64_t end) {
      // Level by level, so that a chunk's lookups share a part of the table that the cache may hold.
      for (int64_t level = 0; level < grid.levels; ++level) {
        grid.each<T>(begin, end, level, [&](int64_t i, const Voxel<T>& voxel, int64_t first) {
          T* const to = out + i * row_width + level * grid.width;
          for (int corner = 0; corner < 8; ++corner) {
            const T weight = voxel.weight(corner);
            const T* const row = rows + (first + voxel.row(corner, grid.mask())) * grid.width;
            for (int64_t f = 0; f < grid.width; ++f) to[f] += weight * row[f];
          }
        });
      }
    });
  });
  return features;
}

std::tuple<at::Tensor, at::Tensor> encode_grid_backward(const at::Tensor& positions, const at::Tensor& table,
                                                        const at::Tensor& scalings, int64_t log2_size,
                                                        const at::Tensor& v_features, bool moves) {
  const Grid grid = checked_grid(positions, table, scalings, log2_size);
  const int64_t row_width = grid.levels * grid.width;
  const at::Tensor v = checked(v_features, "v_features", {grid.count, row_width}, positions.scalar_type());
  at::Tensor v_positions = at::zeros({moves ? grid.count : 0, 3}, grid.positions.options());
  at::Tensor v_table = at::zeros(grid.table.sizes(), grid.table.options());
  AT_DISPATCH_FLOATING_TYPES(positions.scalar_type(), "encode_grid_backward", [&] {
    using T = scalar_t;
    const T* const rows = grid.table.const_data_ptr<T>();
    const T* const from = v.const_data_ptr<T>();
    T* const to = v_table.mutable_data_ptr<T>();
    // One thread adds to a level's rows, in the order of positions: sums do not depend on the number of threads.
    at::parallel_for(0, grid.levels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t level = begin; level < end; ++level) {
        grid.each<T>(0, grid.count, level, [&](int64_t i, const Voxel<T>& voxel, int64_t first) {
          const T* const by = from + i * row_width + level * grid.width;
          if (std::all_of(by, by + grid.width, [](T value) { return value == T(0); })) return;
          for (int corner = 0; corner < 8; ++corner) {
            const T weight = voxel.weight(corner);
            T* const row = to + (first + voxel.row(corner, grid.mask())) * grid.width;
            for (int64_t f = 0; f < grid.width; ++f) row[f] += weight * by[f];
          }
        });
      }
    });
    if (!moves) return;
    T* const moved = v_positions.mutable_data_ptr<T>();
    at::parallel_for(0, grid.count, kChunk, [&](int64_t begin, int64_t end) {
      for (int64_t level = 0; level < grid.levels; ++level) {
        const T scaling = grid.scalings.const_data_ptr<T>()[level];
        grid.each<T>(begin, end, level, [&](int64_t i, const Voxel<T>& voxel, int64_t first) {
          const T* const by = from + i * row_width + level * grid.width;
          T slope[3] = {};
          for (int corner = 0; corner < 8; ++corner) {
            const T* const row = rows + (first + voxel.row(corner, grid.mask())) * grid.width;
            T dot = 0;
            for (int64_t f = 0; f < grid.width; ++f) dot += by[f] * row[f];
            voxel.add_slope(corner, dot, slope);
          }
          for (int axis = 0; axis < 3; ++axis) moved[3 * i + axis] += slope[axis] * scaling;
        });
      }
    });
  });
  return {v_positions, v_table};
}

}  // namespace
}  // namespace nsmg::encode_grid_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("encode_grid", &nsmg::encode_grid_cpu::encode_grid);
  m.impl("encode_grid_backward", &nsmg::encode_grid_cpu::encode_grid_backward);
}
