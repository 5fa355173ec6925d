// `rasterize`, `rasterize_backward` and `rasterize_backward_into` on CUDA.

#include "cuda/bind/call.h"
#include "cuda/bind/patch_groups.h"
#include "cuda/raster/rasterize.h"

#include <cstdlib>
#include <limits>

namespace nsmg {
namespace rasterize_bind {

struct Inputs {
  Cut cut;
  RasterShape shape;
  RasterInputs in;

  explicit Inputs(Call& call) : cut(call.integers("patches"), call.integer("tile_size")) {
    const int64_t rows = call.count("means2d", "rows"), intersections = call.count("row_ids", "intersections");
    const int channels = call.count("features", "channels", 1);
    TORCH_CHECK_VALUE(channels >= 1, "features must be [M,D] with D >= 1, got ", call.tensor("features").sizes(), ".");
    shape = {rows, int(intersections), cut.tiles, channels, int(call.integer("tile_size"))};
    in = {call.floats("means2d", {rows, 2}, 8),
          call.floats("conics", {rows, 3}),
          call.floats("row_opacities", {rows}),
          call.floats("features", {rows, channels}),
          call.ints("tile_offsets", {cut.tiles + 1}),  // one number more than the patches have tiles
          call.ints("row_ids", {intersections})};
  }
};

// Chooses which lists the forward pass splits. NS_MULTIGPU_SPLIT_ABOVE is for measuring: then it is the threshold,
// whatever the fair share; 2147483647 splits none.
void choose_split(RasterPlan& plan, int device) {
  const char* value = std::getenv("NS_MULTIGPU_SPLIT_ABOVE");
  if (value == nullptr || *value == '\0') {
    int processors = 0;
    NSMG_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    plan.split_above = 2 * kSegment;
    plan.blocks_at_once = kForwardBlocks * processors;
    return;
  }
  char* end = nullptr;
  const int64_t asked = std::strtoll(value, &end, 10);
  TORCH_CHECK_VALUE(*end == '\0' && asked >= 2 * kSegment && asked <= std::numeric_limits<int>::max(),
                    "NS_MULTIGPU_SPLIT_ABOVE is '", value, "'; it must be a number of splats, ", 2 * kSegment,
                    " at least.");
  plan.split_above = int(asked);
}

void rasterize(Call& call) {
  const Inputs inputs(call);
  const RasterShape& shape = inputs.shape;
  const int64_t pixels = inputs.cut.pixels;
  const RasterOutputs outputs{call.out<float>({pixels, shape.channels}), call.out<float>({pixels}),
                              call.out<int32_t>({pixels}), call.flag("mark_stops")};
  RasterState state;
  state.place(call.out<float>({state.place(nullptr, shape)}), shape);
  RasterPlan plan;
  choose_split(plan, call.like().get_device());
  const bool splits = shape.fast() && shape.rows > 0 && shape.intersections > plan.split_above;
  if (!splits) plan.split_above = std::numeric_limits<int>::max();
  plan.place(call.scratch<int32_t>(plan.place(nullptr, shape, splits)), shape, splits);
  NSMG_CUDA_CHECK(launch_pack(inputs.in, shape, state, plan, call.stream()));
  for (const PatchGroup& group : inputs.cut.groups)
    NSMG_CUDA_CHECK(launch_describe(group, inputs.in, shape, state, plan, call.stream()));
  if (shape.fast()) {
    NSMG_CUDA_CHECK(launch_order(inputs.in, shape, state, plan, call.stream()));
    NSMG_CUDA_CHECK(launch_forward(inputs.in, shape, state, plan, outputs, call.stream()));
  } else {
    NSMG_CUDA_CHECK(launch_forward_generic(inputs.in, shape, state, outputs, call.stream()));
  }
}

// Adds the gradients of all rows to their records. `state` is that of rasterize with the same inputs.
void add_records(Call& call, const Inputs& inputs, const RecordTarget& target, float* v_features) {
  const RasterShape& shape = inputs.shape;
  const int64_t pixels = inputs.cut.pixels;
  RasterState state;
  const float* kept = call.floats("state", {state.place(nullptr, shape)});
  state.place(const_cast<float*>(kept), shape);  // the kernels read it only
  const RasterGradients gradients{call.floats("out", {pixels, shape.channels}), call.floats("alpha", {pixels}),
                                  call.floats("v_out", {pixels, shape.channels}), call.floats("v_alpha", {pixels}),
                                  call.ints("last", {pixels})};
  const bool absgrad = call.flag("absgrad");
  if (!shape.fast()) {
    NSMG_CUDA_CHECK(
        launch_backward_generic(inputs.in, shape, state, gradients, target, v_features, absgrad, call.stream()));
  } else {
    NSMG_CUDA_CHECK(launch_backward(inputs.in, shape, state, gradients, target, absgrad, call.stream()));
  }
}

void rasterize_backward(Call& call) {
  const Inputs inputs(call);
  const int64_t rows = inputs.shape.rows, channels = inputs.shape.channels;
  const bool apart = channels > kFastChannels;  // the features' gradients, which then fit no record
  const bool absgrad = call.flag("absgrad");
  const at::Tensor records = at::zeros({rows, kRecordFloats}, call.options(at::kFloat));
  float* v_means2d = call.out<float>({rows, 2});
  float* v_conics = call.out<float>({rows, 3});
  float* v_opacities = call.out<float>({rows});
  float* v_features = apart ? call.out_zeros<float>({rows, channels}) : call.out<float>({rows, channels});
  float* v_abs = call.out<float>({absgrad ? rows : 0, 2});
  add_records(call, inputs, {records.mutable_data_ptr<float>(), nullptr, nullptr, nullptr, false},
              apart ? v_features : nullptr);
  NSMG_CUDA_CHECK(launch_unpack(records.const_data_ptr<float>(), rows, int(channels), v_means2d, v_conics, v_opacities,
                                apart ? nullptr : v_features, absgrad ? v_abs : nullptr, call.stream()));
}

void rasterize_backward_into(Call& call) {
  const Inputs inputs(call);
  const int64_t rows = inputs.shape.rows, sinks = call.count("sinks", "sinks");
  TORCH_CHECK_VALUE(inputs.shape.channels <= kFastChannels, "rasterize_backward_into: a record holds ", kFastChannels,
                    " channels, features has ", inputs.shape.channels, ".");
  const RecordTarget target{nullptr, call.longs("sinks", {sinks}), call.ints("owners", {rows}),
                            call.ints("slots", {rows}), call.flag("system_scope")};
  if (rows == 0) return;
  TORCH_CHECK_VALUE(sinks > 0, "rasterize_backward_into: sinks is empty.");
  add_records(call, inputs, target, nullptr);
}

}  // namespace rasterize_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  namespace bind = nsmg::rasterize_bind;
  m.impl("rasterize", nsmg::bound<bind::rasterize>());
  m.impl("rasterize_backward", nsmg::bound<bind::rasterize_backward>());
  m.impl("rasterize_backward_into", nsmg::bound<bind::rasterize_backward_into>());
}
