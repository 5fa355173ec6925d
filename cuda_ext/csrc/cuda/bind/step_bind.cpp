// What stands around the kernels of a step on CUDA: Adam over many tensors, the step's message and gate, the input
// queue, the views' poses, the device's clock; and the hash grids of radiance fields.

#include "cuda/bind/call.h"
#include "cuda/common/clock.h"
#include "cuda/radiance/encode_grid.h"
#include "cuda/common/input_lines.h"
#include "cuda/optim/adam.h"
#include "cuda/optim/step_control.h"
#include "cuda/optim/view_poses.h"

#include <ATen/Context.h>

#include <algorithm>

namespace nsmg {
namespace step_bind {

constexpr char kMessage[] =
    "own_rows[1] segment_counts[R] segment_capacity[R] segment_most[R] met[1] rank R";
constexpr char kClock[] = "total[1] sign";
constexpr char kKeepLine[] = "line[W] table[L,W] L W at[1]";
constexpr char kGrid[] = "table[N,W]@16 scalings[L] L W log2_size";

void adam_step(Call& call) {
  const std::vector<at::Tensor> params = call.tensors("params"), grads = call.tensors("grads"),
                                first = call.tensors("exp_avgs"), second = call.tensors("exp_avg_sqs");
  const size_t number = params.size();
  TORCH_CHECK_VALUE(grads.size() == number && first.size() == number && second.size() == number,
                    "params, grads, exp_avgs and exp_avg_sqs must be equally many.");
  if (number == 0) return;
  const float* scalars = call.floats("scalars", {static_cast<int64_t>(number), 8});
  std::vector<AdamTensor> tensors;
  for (size_t i = 0; i < number; ++i) {
    const at::IntArrayRef shape = params[i].sizes();
    if (params[i].numel() == 0) continue;
    tensors.push_back({call.written<float>(params[i], "a parameter", shape),
                       call.written<float>(grads[i], "a gradient", shape),
                       call.written<float>(first[i], "exp_avg", shape),
                       call.written<float>(second[i], "exp_avg_sq", shape), scalars + 8 * i, params[i].numel()});
  }
  const bool clear = call.flag("set_grads_to_zero");
  for (size_t i = 0; i < tensors.size(); i += kAdamTensors) {
    const size_t some = std::min<size_t>(kAdamTensors, tensors.size() - i);
    call.run(adam_step_launch, tensors.data() + i, static_cast<int>(some), clear);
  }
}

// ---- poses ----

constexpr char kCorrections[] = "viewmats[B,4,4] corrections[N,6] indices[B] B N se3";

void correct_views(Call& call) {
  const auto in = call.read<PoseCorrections>(kCorrections);
  call.run(correct_views_launch, in, call.read<float*>("out[B,4,4]"));
}

void correction_gradients(Call& call) {
  const auto in = call.read<PoseCorrections>(kCorrections);
  const auto gradients = call.read<PoseGradients>("v_viewmats[R,B,4,4] R shift_penalty turn_penalty >gradients[N,6]");
  call.run(correction_gradients_launch, in, gradients);
}

// ---- message and gate ----

void step_message(Call& call) {
  const auto counts = call.read<MessageCounts>(kMessage);
  const auto* tile_offsets = call.read<const int32_t*>("tile_offsets[?]");
  const int lines = call.read<int>("#lines");
  const at::IntArrayRef numbers = call.integers("bands");  // (line, tile, count, columns) each
  std::vector<MessageBand> bands;
  for (size_t k = 0; k < numbers.size(); k += 4)
    bands.push_back({int32_t(numbers[k]), int32_t(numbers[k + 1]), int32_t(numbers[k + 2]), int32_t(numbers[k + 3])});
  call.run(message_launch, counts, tile_offsets, bands.data(), cuda_count(int64_t(bands.size()), "bands"), lines,
           call.out<int64_t>({int64_t{kMessageHead} + lines}));
}

// A tensor [count] of int64 (-1: any count), where it lies.
Column column_of(Call& call, const at::Tensor& tensor, const char* name, int64_t count) {
  const at::Device device = call.like().device();
  TORCH_CHECK_VALUE(tensor.dim() == 1 && (count < 0 || tensor.size(0) == count), name, " must have the shape [", count,
                    "] (-1: any size), not ", tensor.sizes(), ".");
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong && tensor.device() == device, name, " is ", tensor.scalar_type(),
                   " on ", tensor.device(), "; it must be Long on ", device, ".");
  return {tensor.const_data_ptr<int64_t>(), tensor.stride(0)};
}

// The rows of tiles whose work is added up over ranks.
void put_work(Call& call, int64_t ranks, GateLaunch& launch) {
  const at::Tensor &work = call.tensor("work"), &totals = call.tensor("totals");
  const at::Device device = call.like().device();
  const int64_t lines = totals.numel();
  launch.lines = cuda_count(lines, "rows of tiles");
  launch.totals = call.in_place<int64_t>("totals", totals.sizes());
  TORCH_CHECK_VALUE(work.dim() == 2 && work.size(0) == ranks && work.size(1) == lines &&
                        (lines <= 1 || work.stride(1) == 1),
                    "work must have the shape [", ranks, ", ", lines, "], its rows contiguous, not ", work.sizes(),
                    " with strides ", work.strides(), ".");
  TORCH_CHECK_TYPE(work.scalar_type() == at::kLong && work.device() == device, "work is ", work.scalar_type(), " on ",
                   work.device(), "; it must be Long on ", device, ".");
  launch.work = work.const_data_ptr<int64_t>();
  launch.work_stride = work.stride(0);
}

void step_gate(Call& call) {
  const std::vector<at::Tensor> counts = call.tensors("counts");
  const int64_t num_limits = static_cast<int64_t>(counts.size());
  TORCH_INTERNAL_ASSERT(num_limits >= 1 && num_limits <= kMostLimits);
  GateLaunch launch = {};
  const int64_t ranks = counts[0].numel();
  for (int64_t k = 0; k < num_limits; ++k) launch.counts[k] = column_of(call, counts[k], "counts", ranks);
  launch.num_limits = static_cast<int>(num_limits);
  launch.ranks = cuda_count(ranks, "ranks");
  launch.limits = call.in<int64_t>("limits", {num_limits});
  launch.status = call.in_place<int64_t>("status", {num_limits + 2 + (call.has("sent") ? 1 : 0)});
  launch.lazy_steps = call.read<const int32_t*>("lazy_steps[1]");
  launch.most_steps = call.read<int>("#most_steps");
  if (call.has("sent")) launch.sent = column_of(call, call.tensor("sent"), "sent", 1).first;
  const at::IntArrayRef scalars = call.tensor("scalars").sizes();
  launch.scalars = call.floats("scalars", scalars);
  launch.still = call.floats("still", scalars);
  launch.scalar_count = cuda_count(call.tensor("scalars").numel(), "scalars");
  const at::Tensor& row_counts = call.tensor("row_counts");
  launch.row_counts = column_of(call, row_counts, "row_counts", -1);
  launch.segments = cuda_count(row_counts.numel(), "segments");
  if (call.has("work")) put_work(call, ranks, launch);
  launch.gated_scalars = call.out<float>(scalars);
  launch.gated_counts = call.out<int64_t>(row_counts.sizes());
  call.run(gate_launch, launch);
}

// ---- the input queue ----

// Tables may lie in page-locked memory of the host.
void take_lines(Call& call) {
  const std::vector<at::Tensor> tables = call.tensors("tables"), into = call.tensors("into");
  TORCH_INTERNAL_ASSERT(tables.size() <= kMostTables && tables.size() == into.size());
  const auto* at = call.read<const int64_t*>("at[1]");
  const at::Device device = call.tensor("at").device();
  QueuedTables queued{};
  queued.count = int(tables.size());
  queued.lines = cuda_count(tables[0].size(0), "lines");
  for (size_t k = 0; k < tables.size(); ++k) {
    const at::Tensor &table = tables[k], &place = into[k];
    // Asked of CUDA, since another accelerator's page-locked memory is what `is_pinned` knows.
    const bool usable = table.is_cuda() ? table.device() == device
                                        : at::globalContext().isPinnedPtr(table.const_data_ptr(), at::kCUDA);
    TORCH_CHECK_TYPE(place.device() == device && usable,
                     "table ", k, " must be on ", device, " or in page-locked memory, and its place on ", device, ".");
    queued.tables[k] = {static_cast<const int32_t*>(table.const_data_ptr()),
                        static_cast<int32_t*>(place.mutable_data_ptr()), int(table.size(1))};
  }
  call.run(take_lines_launch, queued, at);
}

void show_patches(Call& call) {
  const at::Tensor &images = call.tensor("images"), &pictures = call.tensor("pictures");
  const at::IntArrayRef patches = call.integers("patches");
  const int64_t bytes = images.element_size(), height = images.size(1), width = images.size(2);
  const int64_t pixel = bytes * images.size(3), places = call.count("chosen", "images");
  const Shown shown{static_cast<const uint8_t*>(images.const_data_ptr()),
                    static_cast<uint8_t*>(pictures.mutable_data_ptr()),
                    call.in<int32_t>("chosen", {places}),
                    height * width * pixel,
                    width * pixel,
                    cuda_count(images.size(0), "images")};
  std::vector<ShownPatch> shown_patches;
  int64_t to = 0;
  for (size_t k = 0; k < patches.size(); k += 5) {
    const int64_t* n = patches.data() + k;
    const int64_t place = n[0], x0 = n[1], y0 = n[2], x1 = n[3], y1 = n[4];
    ShownPatch patch{(x1 - x0) * pixel, (y0 * width + x0) * pixel, to, int(y1 - y0), int(place)};
    to += patch.row_bytes * patch.rows;
    if (x0 == 0 && x1 == width) {  // one stretch
      patch.row_bytes *= patch.rows;
      patch.rows = patch.row_bytes > 0 ? 1 : 0;
    }
    shown_patches.push_back(patch);
  }
  call.run(show_patches_launch, shown, shown_patches.data(), int(shown_patches.size()));
}

// ---- hash grids ----

HashGrid hash_grid(Call& call) {
  const auto grid = call.read<HashGrid>(kGrid);
  TORCH_CHECK_VALUE(0 <= grid.log2_size && grid.log2_size < 32 &&
                        call.size('N') == int64_t{grid.levels} << grid.log2_size,
                    "encode_grid: table has ", call.size('N'), " rows; ", grid.levels, " levels of 2^", grid.log2_size,
                    " were expected.");
  TORCH_CHECK_VALUE(grid.width == 1 || grid.width == 2 || grid.width == 4 || grid.width == 8, "encode_grid: rows of ",
                    grid.width, " numbers; on CUDA 1, 2, 4 or 8 are possible.");
  TORCH_CHECK_VALUE(call.tensor("positions").size(0) < int64_t(1) << 38, "encode_grid: too many positions.");
  return grid;
}

void encode_grid(Call& call) {
  const HashGrid grid = hash_grid(call);
  const auto* positions = call.read<const float*>("positions[P,3]");
  call.run(encode_grid_launch, grid, positions, call.size('P'), call.read<float*>(">features[P,LW]"));
}

void encode_grid_backward(Call& call) {
  const HashGrid grid = hash_grid(call);
  const auto* positions = call.read<const float*>("positions[P,3]");
  const auto* v_features = call.read<const float*>("v_features[P,LW]");
  const bool moves = call.flag("moves");
  auto* v_positions = call.read<float*>(moves ? ">by_positions[P,3]=0" : ">by_positions[0,3]");
  auto* v_table = call.read<float*>(">v_table[N,W]=0");
  call.run(encode_grid_backward_launch, grid, positions, call.size('P'), v_features, moves ? v_positions : nullptr,
           v_table);
}

}  // namespace step_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  using namespace nsmg::step_bind;
  using nsmg::bound;
  m.impl("adam_step", bound<adam_step>());
  m.impl("correct_views", bound<correct_views>());
  m.impl("correction_gradients", bound<correction_gradients>());
  m.impl("step_message", bound<step_message>());
  m.impl("step_gate", bound<step_gate>());
  m.impl("take_lines", bound<take_lines>());
  m.impl("keep_line", bound<nsmg::launched<nsmg::keep_line_launch, kKeepLine>>());
  m.impl("show_patches", bound<show_patches>());
  m.impl("add_clock", bound<nsmg::launched<nsmg::add_clock_launch, kClock>>());
  m.impl("encode_grid", bound<encode_grid>());
  m.impl("encode_grid_backward", bound<encode_grid_backward>());
}
