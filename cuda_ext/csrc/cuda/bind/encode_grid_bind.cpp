// `encode_grid` and `encode_grid_backward` on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "cuda/bind/check.h"
#include "cuda/common/encode_grid.h"

namespace nsmg {
namespace encode_grid_bind {

struct Encoded {
  at::Tensor positions, table, scalings;
  HashGrid grid;

  Encoded(const at::Tensor& positions_, const at::Tensor& table_, const at::Tensor& scalings_, int64_t log2_size)
      : positions(cuda_floats(positions_, "positions", {-1, 3}, table_)),
        table(aligned(cuda_floats(table_, "table", {-1, -1}, table_))),
        scalings(cuda_floats(scalings_, "scalings", {-1}, table_)),
        grid{table.const_data_ptr<float>(), scalings.const_data_ptr<float>(), static_cast<int>(scalings.size(0)),
             static_cast<int>(table.size(1)), static_cast<int>(log2_size)} {
    TORCH_CHECK_VALUE(0 <= log2_size && log2_size < 32 && table.size(0) == scalings.size(0) << log2_size,
                      "encode_grid: table has ", table.size(0), " rows; ", scalings.size(0), " levels of 2^", log2_size,
                      " were expected.");
    TORCH_CHECK_VALUE(grid.width == 1 || grid.width == 2 || grid.width == 4 || grid.width == 8,
                      "encode_grid: rows of ", grid.width, " numbers; on CUDA 1, 2, 4 or 8 are possible.");
    TORCH_CHECK_VALUE(positions.size(0) < int64_t(1) << 38, "encode_grid: too many positions.");
  }
};

at::Tensor encode_grid(const at::Tensor& positions, const at::Tensor& table, const at::Tensor& scalings,
                       int64_t log2_size) {
  const Encoded e(positions, table, scalings, log2_size);
  const c10::cuda::CUDAGuard guard(e.table.device());
  at::Tensor features = at::empty({e.positions.size(0), int64_t(e.grid.levels) * e.grid.width}, e.table.options());
  NSMG_CUDA_CHECK(encode_grid_launch(e.grid, e.positions.const_data_ptr<float>(), e.positions.size(0),
                                     features.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return features;
}

std::tuple<at::Tensor, at::Tensor> encode_grid_backward(const at::Tensor& positions, const at::Tensor& table,
                                                        const at::Tensor& scalings, int64_t log2_size,
                                                        const at::Tensor& v_features_, bool moves) {
  const Encoded e(positions, table, scalings, log2_size);
  const at::Tensor v_features = cuda_floats(
      v_features_, "v_features", {e.positions.size(0), int64_t(e.grid.levels) * e.grid.width}, e.table);
  const c10::cuda::CUDAGuard guard(e.table.device());
  at::Tensor v_table = at::zeros(e.table.sizes(), e.table.options());
  at::Tensor v_positions = at::zeros({moves ? e.positions.size(0) : 0, 3}, e.table.options());
  NSMG_CUDA_CHECK(encode_grid_backward_launch(e.grid, e.positions.const_data_ptr<float>(), e.positions.size(0),
                                              v_features.const_data_ptr<float>(),
                                              moves ? v_positions.mutable_data_ptr<float>() : nullptr,
                                              v_table.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return {v_positions, v_table};
}

}  // namespace encode_grid_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("encode_grid", &nsmg::encode_grid_bind::encode_grid);
  m.impl("encode_grid_backward", &nsmg::encode_grid_bind::encode_grid_backward);
}
