// Does what rasterize_bind.cpp does, for pointers.
#include <cstdint>
#include <vector>

#include "cuda/raster/rasterize.h"

using namespace nsmg;

extern "C" {

struct Arguments {
  int64_t rows, intersections, tiles, pixels;
  int32_t channels, patches, split_above, blocks_at_once, mark_stops, absgrad;
  const float *means2d, *conics, *opacities, *features;
  const int32_t *tile_offsets, *row_ids;
  const int32_t* entries;  // [patches, 8] as PatchEntry, at most kPatchGroup of them
  float* state;
  float *out, *alpha;
  int32_t* last;
  const float *v_out, *v_alpha;
  float *v_means2d, *v_conics, *v_opacities, *v_features, *v_abs;
};

int64_t state_floats(const Arguments* a) {
  RasterState state;
  return state.place(nullptr, {a->rows, a->intersections, a->tiles, a->channels, kFastTile});
}

// 0, or what went wrong.
const char* forward(const Arguments* a) {
  const RasterShape shape{a->rows, a->intersections, a->tiles, a->channels, kFastTile};
  const RasterInputs in{a->means2d, a->conics, a->opacities, a->features, a->tile_offsets, a->row_ids};
  RasterState state;
  state.place(a->state, shape);
  RasterPlan plan;
  const bool splits = shape.rows > 0 && shape.intersections > a->split_above;
  if (splits) {
    plan.split_above = a->split_above;
    plan.blocks_at_once = a->blocks_at_once;
  }
  const int64_t ints = plan.place(nullptr, shape, splits);
  constexpr int32_t kUntouched = 0x7f7f7f7f;
  std::vector<int32_t> scratch(ints + 64, kUntouched);
  plan.place(scratch.data(), shape, splits);
  PatchGroup group{a->patches, 0, int(a->tiles), 0, {}};
  for (int k = 0; k < a->patches; ++k) {
    const int32_t* e = a->entries + 8 * k;
    group.entries[k] = {e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7]};
  }
  launch_pack(in, shape, state, plan, nullptr);
  launch_describe(group, in, shape, state, plan, nullptr);
  launch_order(in, shape, state, plan, nullptr);
  launch_forward(in, shape, state, plan, {a->out, a->alpha, a->last, a->mark_stops != 0}, nullptr);
  for (size_t k = ints; k < scratch.size(); ++k)
    if (scratch[k] != kUntouched) return "a kernel has written behind the plan";
  return nullptr;
}

void backward(const Arguments* a) {
  const RasterShape shape{a->rows, a->intersections, a->tiles, a->channels, kFastTile};
  const RasterInputs in{a->means2d, a->conics, a->opacities, a->features, a->tile_offsets, a->row_ids};
  RasterState state;
  state.place(a->state, shape);
  std::vector<float> memory(kRecordFloats * a->rows + 4);
  float* records = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
  const RasterGradients pixels{a->out, a->alpha, a->v_out, a->v_alpha, a->last};
  const RecordTarget target{records, nullptr, nullptr, nullptr, false};
  launch_backward(in, shape, state, pixels, target, a->absgrad != 0, nullptr);
  launch_unpack(records, a->rows, a->channels, a->v_means2d, a->v_conics, a->v_opacities, a->v_features, a->v_abs,
                nullptr);
}

}  // extern "C"
