// `rasterize`, `rasterize_backward` and `rasterize_backward_into` on CUDA.

#include "cuda/bind/call.h"
#include "cuda/bind/patch_groups.h"
#include "cuda/raster/rasterize.h"

#include <cstdlib>
#include <limits>

namespace nsmg {
namespace rasterize_bind {

constexpr char kInputs[] =
    "means2d[M,2]@8 conics[M,3] row_opacities[M] features[M,C] tile_offsets[T+1] row_ids[I]";
constexpr char kGradients[] = "out[P,C] alpha[P] v_out[P,C] v_alpha[P] last[P]";
constexpr char kTarget[] = "- sinks[S] owners[M] slots[M] system_scope";

struct Inputs {
  Cut cut;
  RasterShape shape;
  RasterInputs in;

  explicit Inputs(Call& call) : cut(call.integers("patches"), call.integer("tile_size")) {
    call.set('T', cut.tiles);  // there is one offset more than the patches have tiles
    call.set('P', cut.pixels);
    in = call.read<RasterInputs>(kInputs);
    const int channels = call.read<int>("C");
    TORCH_CHECK_VALUE(channels >= 1, "features must be [M,D] with D >= 1, got ", call.tensor("features").sizes(), ".");
    shape = {call.size('M'), call.read<int>("I"), cut.tiles, channels, int(call.integer("tile_size"))};
  }
};

// Chooses which lists the forward pass splits. NS_MULTIGPU_SPLIT_ABOVE is for measuring: then it is the threshold,
// whatever the fair share; 2147483647 splits none.
void choose_split(Call& call, RasterPlan& plan) {
  const char* value = std::getenv("NS_MULTIGPU_SPLIT_ABOVE");
  if (value == nullptr || *value == '\0') {
    int processors = 0;
    call.check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, call.like().get_device()));
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
  choose_split(call, plan);
  const bool splits = shape.fast() && shape.rows > 0 && shape.intersections > plan.split_above;
  if (!splits) plan.split_above = std::numeric_limits<int>::max();
  plan.place(call.scratch<int32_t>(plan.place(nullptr, shape, splits)), shape, splits);
  call.run(launch_pack, inputs.in, shape, state, plan);
  for (const PatchGroup& group : inputs.cut.groups)
    call.run(launch_describe, group, inputs.in, shape, state, plan);
  if (shape.fast()) {
    call.run(launch_order, inputs.in, shape, state, plan);
    call.run(launch_forward, inputs.in, shape, state, plan, outputs);
  } else {
    call.run(launch_forward_generic, inputs.in, shape, state, outputs);
  }
}

// Adds the gradients of all rows to their records. `state` is that of rasterize with the same inputs.
void add_records(Call& call, const Inputs& inputs, const RecordTarget& target, float* v_features) {
  const RasterShape& shape = inputs.shape;
  RasterState state;
  const float* kept = call.floats("state", {state.place(nullptr, shape)});
  state.place(const_cast<float*>(kept), shape);  // the kernels read it only
  const auto gradients = call.read<RasterGradients>(kGradients);
  const bool absgrad = call.flag("absgrad");
  if (!shape.fast()) {
    call.run(launch_backward_generic, inputs.in, shape, state, gradients, target, v_features, absgrad);
  } else {
    call.run(launch_backward, inputs.in, shape, state, gradients, target, absgrad);
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
  float* v_features = call.out<float>({rows, channels}, apart);
  float* v_abs = call.out<float>({absgrad ? rows : 0, 2});
  add_records(call, inputs, {records.mutable_data_ptr<float>(), nullptr, nullptr, nullptr, false},
              apart ? v_features : nullptr);
  call.run(launch_unpack, records.const_data_ptr<float>(), rows, int(channels), v_means2d, v_conics, v_opacities,
           apart ? nullptr : v_features, absgrad ? v_abs : nullptr);
}

void rasterize_backward_into(Call& call) {
  const Inputs inputs(call);
  TORCH_CHECK_VALUE(inputs.shape.channels <= kFastChannels, "rasterize_backward_into: a record holds ", kFastChannels,
                    " channels, features has ", inputs.shape.channels, ".");
  const auto target = call.read<RecordTarget>(kTarget);
  if (inputs.shape.rows == 0) return;
  TORCH_CHECK_VALUE(call.size('S') > 0, "rasterize_backward_into: sinks is empty.");
  add_records(call, inputs, target, nullptr);
}

}  // namespace rasterize_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  using namespace nsmg::rasterize_bind;
  using nsmg::bound;
  m.impl("rasterize", bound<rasterize>());
  m.impl("rasterize_backward", bound<rasterize_backward>());
  m.impl("rasterize_backward_into", bound<rasterize_backward_into>());
}
