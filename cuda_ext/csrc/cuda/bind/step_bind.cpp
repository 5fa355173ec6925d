// What stands around the kernels of a step on CUDA: Adam over many tensors, the step's message and gate, the input
// queue, the device's clock; and the hash grids of radiance fields.

#include "cuda/bind/call.h"
#include "cuda/common/clock.h"
#include "cuda/common/encode_grid.h"
#include "cuda/common/input_lines.h"
#include "cuda/optim/adam.h"
#include "cuda/optim/step_control.h"

#include <algorithm>

namespace nsmg {
namespace step_bind {

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
    NSMG_CUDA_CHECK(adam_step_launch(tensors.data() + i, static_cast<int>(some), clear, call.stream()));
  }
}

// ---- message and gate ----

// Three numbers a band (line, tile, count).
std::vector<MessageBand> message_bands(at::IntArrayRef numbers, int64_t lines, int64_t columns, int64_t tiles) {
  TORCH_CHECK_VALUE(numbers.size() % 3 == 0 && columns >= 1, "bands holds (line, tile, count) a band, of ", columns,
                    " columns; got ", numbers.size(), " integers.");
  std::vector<MessageBand> bands;
  for (size_t k = 0; k < numbers.size(); k += 3) {
    const int64_t line = numbers[k], tile = numbers[k + 1], count = numbers[k + 2];
    TORCH_CHECK_VALUE(line >= 0 && tile >= 0 && count >= 0 && line <= lines && count <= lines - line &&
                          tile <= tiles && count <= (tiles - tile) / columns,
                      "band (line, tile, count) = (", line, ", ", tile, ", ", count, ") leaves the ", lines,
                      " lines or the ", tiles, " tiles.");
    bands.push_back({int32_t(line), int32_t(tile), int32_t(count)});
  }
  return bands;
}

void step_message(Call& call) {
  const int ranks = call.count("segment_counts", "ranks"), offsets = call.count("tile_offsets", "tiles");
  const int lines = call.counted("lines", "rows of tiles"), columns = call.counted("columns", "columns");
  const int64_t rank = call.integer("rank");
  TORCH_CHECK_VALUE(rank >= 0 && rank < ranks, "a message is of one of the ", ranks,
                    " ranks that have a segment, not of rank ", rank, ".");
  const std::vector<MessageBand> bands = message_bands(call.integers("bands"), lines, columns, offsets - 1);
  const MessageCounts counts{call.longs("own_rows", {1}),
                             call.longs("segment_counts", {ranks}),
                             call.longs("segment_capacity", {ranks}),
                             call.in_place<int64_t>("segment_most", {ranks}),
                             call.longs("met", {1}),
                             static_cast<int>(rank),
                             ranks};
  const int32_t* tile_offsets = call.ints("tile_offsets", {offsets});
  NSMG_CUDA_CHECK(message_launch(counts, tile_offsets, columns, bands.data(),
                                 cuda_count(static_cast<int64_t>(bands.size()), "bands"), lines,
                                 call.out<int64_t>({int64_t{kMessageHead} + lines}), call.stream()));
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
  TORCH_CHECK_VALUE(num_limits >= 1 && num_limits <= kMostLimits && counts[0].numel() > 0, "counts must be 1 to ", kMostLimits,
                    " tensors [ranks], not ", num_limits, ".");
  TORCH_CHECK_VALUE(call.has("work") == call.has("totals"), "work and totals belong together: give both or neither.");
  GateLaunch launch = {};
  const int64_t ranks = counts[0].numel();
  for (int64_t k = 0; k < num_limits; ++k) launch.counts[k] = column_of(call, counts[k], "counts", ranks);
  launch.num_limits = static_cast<int>(num_limits);
  launch.ranks = cuda_count(ranks, "ranks");
  launch.limits = call.longs("limits", {num_limits});
  launch.status = call.in_place<int64_t>("status", {num_limits + 2 + (call.has("sent") ? 1 : 0)});
  launch.lazy_steps = call.in_or_null<int32_t>("lazy_steps", {1});
  launch.most_steps = call.counted("most_steps", "steps");
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
  NSMG_CUDA_CHECK(gate_launch(launch, call.stream()));
}

// ---- the input queue ----

// Tables may lie in page-locked memory of the host.
void take_lines(Call& call) {
  const std::vector<at::Tensor> tables = call.tensors("tables"), into = call.tensors("into");
  TORCH_CHECK_VALUE(!tables.empty() && tables.size() <= kMostTables && tables.size() == into.size(),
                    "take_lines takes 1 to ", kMostTables, " tables and as many places, not ", tables.size(), " and ",
                    into.size(), ".");
  const int64_t* at = call.longs("at", {1});
  const at::Device device = call.tensor("at").device();
  QueuedTables queued{};
  queued.count = int(tables.size());
  queued.lines = cuda_count(tables[0].size(0), "lines");
  for (size_t k = 0; k < tables.size(); ++k) {
    const at::Tensor &table = tables[k], &place = into[k];
    TORCH_CHECK_TYPE(table.element_size() == 4 && table.scalar_type() == place.scalar_type(), "table ", k,
                     " and its place must be of one kind of numbers of 4 bytes.");
    TORCH_CHECK_VALUE(table.dim() == 2 && table.size(0) == queued.lines && place.numel() == table.size(1) &&
                          table.is_contiguous() && place.is_contiguous(),
                      "table ", k, " must be [", queued.lines, ", ", place.numel(),
                      "], and it and its place contiguous.");
    TORCH_CHECK_TYPE(place.device() == device && (table.is_cuda() ? table.device() == device : table.is_pinned()),
                     "table ", k, " must be on ", device, " or in page-locked memory, and its place on ", device, ".");
    queued.tables[k] = {static_cast<const int32_t*>(table.const_data_ptr()),
                        static_cast<int32_t*>(place.mutable_data_ptr()), int(table.size(1))};
  }
  NSMG_CUDA_CHECK(take_lines_launch(queued, at, call.stream()));
}

void keep_line(Call& call) {
  const int width = call.count("line", "numbers of a line"), lines = call.count("table", "lines");
  const float* line = call.floats("line", {width});
  float* table = call.in_place<float>("table", {lines, width});
  NSMG_CUDA_CHECK(
      keep_line_launch(line, table, lines, width, call.in_place<int64_t>("at", {1}), call.stream()));
}

void show_patches(Call& call) {
  const at::Tensor &images = call.tensor("images"), &pictures = call.tensor("pictures");
  const at::IntArrayRef patches = call.integers("patches");
  TORCH_CHECK_VALUE(images.dim() == 4 && images.is_contiguous() && pictures.dim() == 1 && pictures.is_contiguous() &&
                        patches.size() % 5 == 0,
                    "need contiguous images [V, H, W, C] and pictures [n], and 5 numbers a patch.");
  TORCH_CHECK_TYPE(images.scalar_type() == pictures.scalar_type() && images.device() == pictures.device(),
                   "images and pictures must be of one dtype on one device.");
  const int64_t bytes = images.element_size(), height = images.size(1), width = images.size(2);
  const int64_t pixel = bytes * images.size(3), places = call.count("chosen", "images");
  const Shown shown{static_cast<const uint8_t*>(images.const_data_ptr()),
                    static_cast<uint8_t*>(pictures.mutable_data_ptr()),
                    call.ints("chosen", {places}),
                    height * width * pixel,
                    width * pixel,
                    cuda_count(images.size(0), "images")};
  std::vector<ShownPatch> shown_patches;
  int64_t to = 0;
  for (size_t k = 0; k < patches.size(); k += 5) {
    const int64_t* n = patches.data() + k;
    const int64_t place = n[0], x0 = n[1], y0 = n[2], x1 = n[3], y1 = n[4];
    TORCH_CHECK_VALUE(place >= 0 && place < places && 0 <= x0 && x0 <= x1 && x1 <= width && 0 <= y0 && y0 <= y1 &&
                          y1 <= height,
                      "patch ", k / 5, " does not lie in one of ", places, " images of ", width, "x", height, ".");
    ShownPatch patch{(x1 - x0) * pixel, (y0 * width + x0) * pixel, to, int(y1 - y0), int(place)};
    to += patch.row_bytes * patch.rows;
    if (x0 == 0 && x1 == width) {  // one stretch
      patch.row_bytes *= patch.rows;
      patch.rows = patch.row_bytes > 0 ? 1 : 0;
    }
    shown_patches.push_back(patch);
  }
  TORCH_CHECK_VALUE(to <= pictures.numel() * bytes, "the patches have ", to / bytes, " numbers, pictures ",
                    pictures.numel(), ".");
  NSMG_CUDA_CHECK(show_patches_launch(shown, shown_patches.data(), int(shown_patches.size()), call.stream()));
}

void add_clock(Call& call) {
  NSMG_CUDA_CHECK(add_clock_launch(call.in_place<int64_t>("total", {1}), static_cast<int>(call.integer("sign")),
                                   call.stream()));
}

// ---- hash grids ----

struct Encoded {
  HashGrid grid;
  const float* positions;
  int64_t count, rows;

  explicit Encoded(Call& call) : count(call.tensor("positions").size(0)), rows(call.tensor("table").size(0)) {
    const int levels = call.count("scalings", "levels"), width = call.count("table", "numbers of a row", 1);
    const int64_t log2_size = call.integer("log2_size");
    positions = call.floats("positions", {count, 3});
    grid = {call.floats("table", {rows, width}, 16), call.floats("scalings", {levels}), levels, width,
            static_cast<int>(log2_size)};
    TORCH_CHECK_VALUE(0 <= log2_size && log2_size < 32 && rows == int64_t{levels} << log2_size,
                      "encode_grid: table has ", rows, " rows; ", levels, " levels of 2^", log2_size,
                      " were expected.");
    TORCH_CHECK_VALUE(width == 1 || width == 2 || width == 4 || width == 8, "encode_grid: rows of ", width,
                      " numbers; on CUDA 1, 2, 4 or 8 are possible.");
    TORCH_CHECK_VALUE(count < int64_t(1) << 38, "encode_grid: too many positions.");
  }
};

void encode_grid(Call& call) {
  const Encoded e(call);
  NSMG_CUDA_CHECK(encode_grid_launch(e.grid, e.positions, e.count,
                                     call.out<float>({e.count, int64_t(e.grid.levels) * e.grid.width}),
                                     call.stream()));
}

void encode_grid_backward(Call& call) {
  const Encoded e(call);
  const bool moves = call.flag("moves");
  const float* v_features = call.floats("v_features", {e.count, int64_t(e.grid.levels) * e.grid.width});
  float* v_positions = call.out_zeros<float>({moves ? e.count : 0, 3});
  float* v_table = call.out_zeros<float>({e.rows, e.grid.width});
  NSMG_CUDA_CHECK(encode_grid_backward_launch(e.grid, e.positions, e.count, v_features, moves ? v_positions : nullptr,
                                              v_table, call.stream()));
}

}  // namespace step_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  namespace bind = nsmg::step_bind;
  m.impl("adam_step", nsmg::bound<bind::adam_step>());
  m.impl("step_message", nsmg::bound<bind::step_message>());
  m.impl("step_gate", nsmg::bound<bind::step_gate>());
  m.impl("take_lines", nsmg::bound<bind::take_lines>());
  m.impl("keep_line", nsmg::bound<bind::keep_line>());
  m.impl("show_patches", nsmg::bound<bind::show_patches>());
  m.impl("add_clock", nsmg::bound<bind::add_clock>());
  m.impl("encode_grid", nsmg::bound<bind::encode_grid>());
  m.impl("encode_grid_backward", nsmg::bound<bind::encode_grid_backward>());
}
