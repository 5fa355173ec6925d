// ns_multigpu::rasterize, rasterize_backward and rasterize_backward_into on CUDA.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/bind/check.h"
#include "cuda/bind/patch_groups.h"
#include "cuda/raster/rasterize.h"

namespace nsmg {
namespace rasterize_bind {

// The inputs, checked and contiguous; alive as long as this.
struct Inputs {
  at::Tensor means2d, conics, opacities, features, tile_offsets, row_ids;
  RasterShape shape;
  RasterInputs in;

  Inputs(const at::Tensor& means2d_, const at::Tensor& conics_, const at::Tensor& opacities_,
         const at::Tensor& features_, const at::Tensor& tile_offsets_, const at::Tensor& row_ids_, const Cut& cut,
         int64_t tile_size)
      : means2d(aligned_pairs(cuda_floats(means2d_, "means2d", {-1, 2}, means2d_))) {
    const int64_t rows = cuda_count(means2d.size(0), "rows");
    conics = cuda_floats(conics_, "conics", {rows, 3}, means2d);
    opacities = cuda_floats(opacities_, "row_opacities", {rows}, means2d);
    features = cuda_floats(features_, "features", {rows, -1}, means2d);
    TORCH_CHECK_VALUE(features.size(1) >= 1, "features must be [M,D] with D >= 1, got ", features.sizes(), ".");
    tile_offsets = cuda_ints(tile_offsets_, "tile_offsets (one number more than the patches have tiles)",
                             {cut.tiles + 1}, means2d);
    row_ids = cuda_ints(row_ids_, "row_ids", {-1}, means2d);
    shape = {rows, cuda_count(row_ids.size(0), "intersections"), cut.tiles, cuda_count(features.size(1), "channels"),
             int(tile_size)};
    in = {means2d.const_data_ptr<float>(),   conics.const_data_ptr<float>(),       opacities.const_data_ptr<float>(),
          features.const_data_ptr<float>(),  tile_offsets.const_data_ptr<int32_t>(), row_ids.const_data_ptr<int32_t>()};
  }
};

// The longest list that one block of the forward pass walks alone; the same forward and backward. NS_MULTIGPU_SPLIT_ABOVE
// is for measuring: 2147483647 splits none.
int split_above() {
  const char* value = std::getenv("NS_MULTIGPU_SPLIT_ABOVE");
  if (value == nullptr || *value == '\0') return 2 * kSegment;
  char* end = nullptr;
  const int64_t asked = std::strtoll(value, &end, 10);
  TORCH_CHECK_VALUE(*end == '\0' && asked >= 2 * kSegment && asked <= std::numeric_limits<int>::max(),
                    "NS_MULTIGPU_SPLIT_ABOVE is '", value, "'; it must be a number of splats, ", 2 * kSegment,
                    " at least.");
  return int(asked);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> rasterize(
    const at::Tensor& means2d, const at::Tensor& conics, const at::Tensor& row_opacities, const at::Tensor& features,
    const at::Tensor& tile_offsets, const at::Tensor& row_ids, at::IntArrayRef patches, int64_t tile_size,
    const std::optional<at::Tensor>& /* absgrad_probe: for autograd alone */, bool mark_stops) {
  const Cut cut(patches, tile_size);
  const Inputs inputs(means2d, conics, row_opacities, features, tile_offsets, row_ids, cut, tile_size);
  const RasterShape& shape = inputs.shape;
  const c10::cuda::CUDAGuard guard(means2d.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::TensorOptions floats = inputs.means2d.options();
  at::Tensor out = at::empty({cut.pixels, shape.channels}, floats), alpha = at::empty({cut.pixels}, floats);
  at::Tensor last = at::empty({cut.pixels}, floats.dtype(at::kInt));
  RasterState state;
  at::Tensor kept = at::empty({state.place(nullptr, shape)}, floats);
  state.place(kept.mutable_data_ptr<float>(), shape);
  state.split_above = split_above();
  const bool splits = shape.fast() && shape.rows > 0 && shape.intersections > state.split_above;
  if (!splits) state.split_above = std::numeric_limits<int>::max();
  RasterPlan plan;
  at::Tensor scratch = at::empty({plan.place(nullptr, shape, splits)}, floats.dtype(at::kInt));
  plan.place(scratch.mutable_data_ptr<int32_t>(), shape, splits);

  NSMG_CUDA_CHECK(launch_pack(inputs.in, shape, state, plan, stream));
  for (const PatchGroup& group : cut.groups)
    NSMG_CUDA_CHECK(launch_describe(group, inputs.in, shape, state, plan, stream));
  const RasterOutputs outputs{out.mutable_data_ptr<float>(), alpha.mutable_data_ptr<float>(),
                              last.mutable_data_ptr<int32_t>(), mark_stops};
  if (shape.fast()) {
    NSMG_CUDA_CHECK(launch_order(inputs.in, shape, state, plan, stream));
    NSMG_CUDA_CHECK(launch_forward(inputs.in, shape, state, plan, outputs, stream));
  } else {
    NSMG_CUDA_CHECK(launch_forward_generic(inputs.in, shape, state, outputs, stream));
  }
  return {out, alpha, last, kept};
}

// Adds the gradients of all rows to their records.
void add_records(const Inputs& inputs, const Cut& cut, const at::Tensor& alpha_, const at::Tensor& last_,
                 const at::Tensor& kept, const at::Tensor& out_, const at::Tensor& v_out_, const at::Tensor& v_alpha_,
                 bool absgrad, const RecordTarget& target, float* v_features, cudaStream_t stream) {
  const at::Tensor& like = inputs.means2d;
  const RasterShape& shape = inputs.shape;
  const at::Tensor alpha = cuda_floats(alpha_, "alpha", {cut.pixels}, like),
                   last = cuda_ints(last_, "last", {cut.pixels}, like),
                   out = cuda_floats(out_, "out", {cut.pixels, shape.channels}, like),
                   v_out = cuda_floats(v_out_, "v_out", {cut.pixels, shape.channels}, like),
                   v_alpha = cuda_floats(v_alpha_, "v_alpha", {cut.pixels}, like);
  RasterState state;
  const at::Tensor held = cuda_floats(kept, "state (of rasterize with the same inputs)",
                                      {state.place(nullptr, shape)}, like);
  state.place(const_cast<float*>(held.const_data_ptr<float>()), shape);  // the kernels read it only
  state.split_above = split_above();
  const RasterGradients pixels{out.const_data_ptr<float>(), alpha.const_data_ptr<float>(),
                               v_out.const_data_ptr<float>(), v_alpha.const_data_ptr<float>(),
                               last.const_data_ptr<int32_t>()};
  if (!shape.fast()) {
    NSMG_CUDA_CHECK(launch_backward_generic(inputs.in, shape, state, pixels, target, v_features, absgrad, stream));
  } else {
    NSMG_CUDA_CHECK(launch_backward(inputs.in, shape, state, pixels, target, absgrad, stream));
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> rasterize_backward(
    const at::Tensor& means2d, const at::Tensor& conics, const at::Tensor& row_opacities, const at::Tensor& features,
    const at::Tensor& tile_offsets, const at::Tensor& row_ids, at::IntArrayRef patches, int64_t tile_size,
    const at::Tensor& alpha, const at::Tensor& last, const at::Tensor& state, const at::Tensor& out,
    const at::Tensor& v_out, const at::Tensor& v_alpha, bool absgrad) {
  const Cut cut(patches, tile_size);
  const Inputs inputs(means2d, conics, row_opacities, features, tile_offsets, row_ids, cut, tile_size);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::TensorOptions floats = inputs.means2d.options();
  const int64_t rows = inputs.shape.rows, channels = inputs.shape.channels;
  const bool apart = channels > kFastChannels;  // the features' gradients, which then fit no record
  at::Tensor records = at::zeros({rows, kRecordFloats}, floats);
  at::Tensor v_means2d = at::empty({rows, 2}, floats), v_conics = at::empty({rows, 3}, floats),
             v_opacities = at::empty({rows}, floats), v_abs = at::empty({absgrad ? rows : 0, 2}, floats);
  at::Tensor v_features = apart ? at::zeros({rows, channels}, floats) : at::empty({rows, channels}, floats);
  float* features_to = v_features.mutable_data_ptr<float>();
  const RecordTarget target{records.mutable_data_ptr<float>(), nullptr, nullptr, nullptr, false};
  add_records(inputs, cut, alpha, last, state, out, v_out, v_alpha, absgrad, target, apart ? features_to : nullptr,
              stream);
  NSMG_CUDA_CHECK(launch_unpack(records.const_data_ptr<float>(), rows, int(channels),
                                v_means2d.mutable_data_ptr<float>(), v_conics.mutable_data_ptr<float>(),
                                v_opacities.mutable_data_ptr<float>(), apart ? nullptr : features_to,
                                absgrad ? v_abs.mutable_data_ptr<float>() : nullptr, stream));
  return {v_means2d, v_conics, v_opacities, v_features, v_abs};
}

void rasterize_backward_into(const at::Tensor& means2d, const at::Tensor& conics, const at::Tensor& row_opacities,
                             const at::Tensor& features, const at::Tensor& tile_offsets, const at::Tensor& row_ids,
                             at::IntArrayRef patches, int64_t tile_size, const at::Tensor& alpha,
                             const at::Tensor& last, const at::Tensor& state, const at::Tensor& out,
                             const at::Tensor& v_out, const at::Tensor& v_alpha, bool absgrad,
                             const at::Tensor& sinks_, const at::Tensor& owners_, const at::Tensor& slots_,
                             bool system_scope) {
  const Cut cut(patches, tile_size);
  const Inputs inputs(means2d, conics, row_opacities, features, tile_offsets, row_ids, cut, tile_size);
  const c10::cuda::CUDAGuard guard(means2d.device());
  const int64_t rows = inputs.shape.rows;
  TORCH_CHECK_VALUE(inputs.shape.channels <= kFastChannels, "rasterize_backward_into: a record holds ", kFastChannels,
                    " channels, features has ", inputs.shape.channels, ".");
  const at::Tensor sinks = cuda_checked(sinks_, "sinks", {-1}, at::kLong, inputs.means2d),
                   owners = cuda_ints(owners_, "owners", {rows}, inputs.means2d),
                   slots = cuda_ints(slots_, "slots", {rows}, inputs.means2d);
  if (rows == 0) return;
  TORCH_CHECK_VALUE(sinks.size(0) > 0, "rasterize_backward_into: sinks is empty.");
  const RecordTarget target{nullptr, sinks.const_data_ptr<int64_t>(), owners.const_data_ptr<int32_t>(),
                            slots.const_data_ptr<int32_t>(), system_scope};
  add_records(inputs, cut, alpha, last, state, out, v_out, v_alpha, absgrad, target, nullptr,
              c10::cuda::getCurrentCUDAStream());
}

}  // namespace rasterize_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  m.impl("rasterize", &nsmg::rasterize_bind::rasterize);
  m.impl("rasterize_backward", &nsmg::rasterize_bind::rasterize_backward);
  m.impl("rasterize_backward_into", &nsmg::rasterize_bind::rasterize_backward_into);
}
