// Rows on their way between ranks, on CUDA: which go where, as records into other GPUs' memory, or as columns of words
// that collectives carry; and the cells of space whose rows and windows the exchange asks for.

#include "cuda/bind/call.h"
#include "cuda/exchange/cells.h"
#include "cuda/exchange/row_exchange.h"
#include "cuda/exchange/row_footprint.h"
#include "cuda/exchange/row_wire.h"
#include "cuda/exchange/put_rows.h"

#include <algorithm>
#include <cstring>

namespace nsmg {
namespace exchange_bind {

int checked_ranks(int64_t ranks) {
  TORCH_CHECK_VALUE(ranks >= 1 && ranks <= kMostExchanging, "the exchange of rows takes 1 to ", kMostExchanging,
                    " ranks, not ", ranks, ".");
  return int(ranks);
}

void sort_by_view(std::vector<RankPatch>& patches) {
  std::stable_sort(patches.begin(), patches.end(),
                   [](const RankPatch& a, const RankPatch& b) { return a.view < b.view; });
}

RankPatch* capacity_for(Call& call, const std::vector<RankPatch>& patches) {
  return static_cast<RankPatch*>(call.scratch_bytes(int64_t(patches.size() * sizeof(RankPatch))));
}

// Six numbers a patch (rank, view, x0, y0, x1, y1), and its cell where there are any, ascending by view.
std::vector<RankPatch> rank_patches(at::IntArrayRef numbers, int ranks, at::IntArrayRef cells, int64_t cell_count) {
  TORCH_CHECK_VALUE(numbers.size() % 6 == 0, "patches holds 6 integers a patch (rank, view, x0, y0, x1, y1), got ",
                    numbers.size(), " in all.");
  TORCH_CHECK_VALUE(cell_count == 0 || cells.size() * 6 == numbers.size(), "cells must be one for each of ",
                    numbers.size() / 6, " patches, not ", cells.size(), ".");
  std::vector<RankPatch> patches;
  for (size_t k = 0; k < numbers.size(); k += 6) {
    const int64_t* n = numbers.data() + k;
    TORCH_CHECK_VALUE(n[0] >= 0 && n[0] < ranks && n[1] >= 0 && n[2] >= 0 && n[3] >= 0 && n[4] >= n[2] && n[5] >= n[3],
                      "patch ", k / 6, " is (rank, view, x0, y0, x1, y1) = (", n[0], ", ", n[1], ", ", n[2], ", ",
                      n[3], ", ", n[4], ", ", n[5], "): need 0 <= rank < ", ranks,
                      ", view, x0, y0 >= 0, x1 >= x0 and y1 >= y0.");
    const int64_t cell = cell_count == 0 ? 0 : cells[k / 6];
    TORCH_CHECK_VALUE(cell_count == 0 || (cell >= 0 && cell < cell_count), "patch ", k / 6, " is of cell ", cell,
                      " of ", cell_count, ".");
    patches.push_back({int32_t(n[1]), int32_t(n[0]), int32_t(n[2]), int32_t(n[3]), int32_t(n[4]), int32_t(n[5]),
                       int32_t(cell)});
  }
  sort_by_view(patches);
  return patches;
}

void check_lines(int64_t first, int64_t end, int rows) {
  TORCH_CHECK_VALUE(0 <= first && first <= end && end <= rows, "lines ", first, " to ", end,
                    ": need 0 <= first <= end <= ", rows, ", which is all of them.");
}

void route_lines(Call& call) {
  const int rows = call.count("means2d", "rows"), ranks = checked_ranks(call.integer("ranks"));
  const int64_t first = call.integer("first"), end = call.integer("end");
  check_lines(first, end, rows);
  const RouteRows lines{call.ints("view_ids", {rows}),
                        call.longs("count", {1}),
                        call.floats("means2d", {rows, 2}, 8),
                        call.ints("radii", {rows, 2}, 8),
                        rows,
                        int(first),
                        int(end),
                        call.in_or_null<bool>("in_cells", {-1, rows})};
  const int64_t cells = lines.in_cells == nullptr ? 0 : call.count("in_cells", "cells");
  const std::vector<RankPatch> patches =
      rank_patches(call.integers("patches"), ranks, call.integers("cells"), cells);
  int32_t* place = call.in_place<int32_t>("place", {ranks, rows});
  int64_t* counts = call.in_place<int64_t>("counts", {ranks});
  int32_t* block_counts = call.scratch<int32_t>(int64_t{ranks} * route_blocks(int(end - first)));
  NSMG_CUDA_CHECK(route_launch(lines, patches.data(), cuda_count(int64_t(patches.size()), "patches"),
                               capacity_for(call, patches), ranks, block_counts, place, counts, call.stream()));
}

// Lines first to end of the rows' columns.
PackRows pack_rows(Call& call, int64_t first, int64_t end) {
  const int rows = call.count("means2d", "rows");
  check_lines(first, end, rows);
  return {call.floats("means2d", {rows, 2}, 8),
          call.floats("conics", {rows, 3}),
          call.floats("opacities", {rows}),
          call.floats("features", {rows, 3}),
          call.floats("depths", {rows}),
          call.ints("radii", {rows, 2}, 8),
          call.ints("view_ids", {rows}),
          rows,
          int(first),
          int(end)};
}

void pack(Call& call) {
  const int rows = call.count("means2d", "rows"), ranks = checked_ranks(call.count("place", "ranks"));
  const PackRows lines = pack_rows(call, call.integer("first"), call.has("end") ? call.integer("end") : rows);
  NSMG_CUDA_CHECK(pack_launch(lines, call.ints("place", {ranks, rows}), call.longs("destinations", {ranks}), ranks,
                              call.counted("capacity", "lines of capacity"), call.stream()));
}

// Results [rows] in the schema's order: view_ids, means2d, conics, opacities, features, depths, radii, owners, slots.
UnpackedRows unpacked(Call& call, int64_t rows) {
  UnpackedRows lines = {};
  lines.view_ids = call.out<int32_t>({rows});
  lines.means2d = call.out<float>({rows, 2});
  lines.conics = call.out<float>({rows, 3});
  lines.opacities = call.out<float>({rows});
  lines.features = call.out<float>({rows, 3});
  lines.depths = call.out<float>({rows});
  lines.radii = call.out<int32_t>({rows, 2});
  lines.owners = call.out<int32_t>({rows});
  lines.slots = call.out<int32_t>({rows});
  return lines;
}

void unpack(Call& call) {
  const int ranks = checked_ranks(call.count("records", "ranks"));
  const int capacity = call.count("records", "lines of capacity", 1), views = call.counted("views", "views");
  const float* records = call.floats("records", {ranks, capacity, 16}, 16);
  const int64_t* counts = call.longs("counts", {ranks});
  TORCH_CHECK_VALUE(views >= 1, "unpack needs at least one view, not ", views, ".");
  const UnpackedRows lines = unpacked(call, cuda_count(int64_t(ranks) * capacity, "rows"));
  NSMG_CUDA_CHECK(unpack_launch(records, counts, ranks, capacity, views, lines, call.stream()));
}

void collect(Call& call) {
  const int ranks = checked_ranks(call.count("place", "ranks")), rows = call.count("place", "rows", 1);
  const int32_t* place = call.ints("place", {ranks, rows});
  const int64_t* count = call.longs("count", {1});
  const int64_t* sources = call.longs("sources", {ranks});
  NSMG_CUDA_CHECK(collect_launch(place, count, sources, ranks, call.counted("capacity", "lines of capacity"), rows,
                                 call.out<float>({rows, 16}), call.stream()));
}

void add_records(Call& call) {
  const int rows = call.count("records", "rows"), floats = call.count("records", "numbers of a record", 1);
  const int sinks = call.count("sinks", "sinks");
  NSMG_CUDA_CHECK(add_records_launch(call.floats("records", {rows, floats}), rows, floats,
                                     call.longs("sinks", {sinks}), sinks, call.ints("owners", {rows}),
                                     call.ints("slots", {rows}), call.flag("system_scope"), call.stream()));
}

void footprint_counts(Call& call) {
  const int rows = call.count("means2d", "rows");
  const RouteRows lines{call.ints("view_ids", {rows}), call.longs("count", {1}), call.floats("means2d", {rows, 2}),
                        call.ints("radii", {rows, 2}), rows, 0, rows};
  const at::IntArrayRef numbers = call.integers("patches");
  TORCH_CHECK_VALUE(numbers.size() % 5 == 0, "patches holds 5 integers a patch (view, x0, y0, x1, y1), got ",
                    numbers.size(), " in all.");
  std::vector<RankPatch> patches;
  for (size_t k = 0; k < numbers.size(); k += 5) {
    const int64_t* n = numbers.data() + k;
    patches.push_back({int32_t(n[0]), int32_t(k / 5), int32_t(n[1]), int32_t(n[2]), int32_t(n[3]), int32_t(n[4])});
  }
  sort_by_view(patches);
  const int count = cuda_count(int64_t(patches.size()), "patches");
  NSMG_CUDA_CHECK(footprint_launch(lines, patches.data(), count, capacity_for(call, patches), call.out<int64_t>({count}),
                               call.stream()));
}

// ---- columns of words ----

// Segments that lie within the wire, of `full` columns for this rank's own (0: it is not there) and `others` else.
WireSegments segments_of(Call& call, int full, int others) {
  const at::IntArrayRef starts = call.integers("starts"), capacities = call.integers("capacities");
  const int64_t ranks = static_cast<int64_t>(capacities.size()), rank = call.integer("rank");
  const int64_t held = call.tensor("wire").numel();
  TORCH_CHECK_VALUE(ranks >= 1 && ranks <= kMostSegments, "the wire takes 1 to ", kMostSegments, " ranks, not ", ranks,
                    ".");
  TORCH_CHECK_VALUE(static_cast<int64_t>(starts.size()) == ranks && rank >= 0 && rank < ranks, starts.size(),
                    " starts and ", ranks, " capacities of segments, rank ", rank, ".");
  WireSegments segments = {};
  segments.ranks = static_cast<int>(ranks);
  segments.rank = static_cast<int>(rank);
  segments.half = call.flag("half");
  int64_t lines = 0;
  for (int64_t k = 0; k < ranks; ++k) {
    const int words = k == rank ? full : others;
    const bool inside = starts[k] >= 0 && starts[k] + words * capacities[k] <= held;
    TORCH_CHECK_VALUE(capacities[k] >= 0 && (starts[k] == kStays || inside), "the segment of rank ", k, ", ",
                      capacities[k], " rows of ", words, " words from word ", starts[k], " on, leaves the ", held,
                      " words of the wire.");
    segments.starts[k] = starts[k];
    segments.capacities[k] = static_cast<int32_t>(cuda_count(capacities[k], "rows of a segment"));
    lines += capacities[k];
  }
  cuda_count(lines, "rows");
  return segments;
}

WireSegments row_segments(Call& call) {
  const bool slots = call.flag("slots");
  return segments_of(call, full_row_words(slots), call.flag("half") ? half_row_words(slots) : full_row_words(slots));
}

WireSegments gradient_segments(Call& call) {
  return segments_of(call, 0, gradient_words(call.flag("half"), call.flag("absgrad")));
}

int64_t lines_of(const WireSegments& segments) {
  int64_t lines = 0;
  for (int k = 0; k < segments.ranks; ++k) lines += segments.capacities[k];
  return lines;
}

// The words of a wire that is written in place.
uint32_t* wire_to_write(Call& call) { return reinterpret_cast<uint32_t*>(call.in_place<int32_t>("wire", {-1})); }
const uint32_t* wire_to_read(Call& call) { return reinterpret_cast<const uint32_t*>(call.ints("wire", {-1})); }

void pack_wire(Call& call) {
  const PackRows lines = pack_rows(call, call.integer("first"), call.integer("end"));
  const WireSegments to = row_segments(call);
  const int32_t* place = call.ints("place", {to.ranks, lines.count});
  NSMG_CUDA_CHECK(pack_wire_launch(lines, place, to, call.flag("slots"), wire_to_write(call), call.stream()));
}

void unpack_wire(Call& call) {
  const WireSegments come = row_segments(call);
  const uint32_t* wire = wire_to_read(call);
  const int64_t* counts = call.longs("counts", {come.ranks});
  const int64_t views = call.integer("views");
  TORCH_CHECK_VALUE(views >= 1 && views <= kMostViews, "rows are of 1 to ", kMostViews, " views on the wire, not of ",
                    views, ".");
  NSMG_CUDA_CHECK(unpack_wire_launch(wire, come, counts, call.flag("slots"), int(views),
                                     unpacked(call, lines_of(come)), call.stream()));
}

void keep_rows(Call& call) {
  const int64_t there = call.count("to_means2d", "lines that arrived");
  const int64_t start = call.integer("start"), capacity = call.integer("capacity");
  TORCH_CHECK_VALUE(0 <= start && 0 <= capacity && start + capacity <= there, "lines ", start, " to ",
                    start + capacity, " are to be kept, of ", there, " that arrived.");
  const PackRows lines = pack_rows(call, 0, call.count("means2d", "rows"));
  const int32_t* place = call.ints("place", {lines.count});
  const UnpackedRows to{call.in_place<float>("to_means2d", {there, 2}),
                        call.in_place<float>("to_conics", {there, 3}),
                        call.in_place<float>("to_opacities", {there}),
                        call.in_place<float>("to_features", {there, 3}),
                        call.in_place<float>("to_depths", {there}),
                        call.in_place<int32_t>("to_radii", {there, 2}),
                        call.in_place<int32_t>("to_view_ids", {there}),
                        nullptr,
                        call.in_place<int32_t>("to_slots", {there})};
  NSMG_CUDA_CHECK(keep_rows_launch(lines, place, to, start, cuda_count(capacity, "rows of a segment"),
                                   call.flag("slots"), call.stream()));
}

void pack_gradients(Call& call) {
  const WireSegments to = gradient_segments(call);
  const float* records = call.floats("records", {lines_of(to), 16}, 16);
  const int64_t* counts = call.longs("counts", {to.ranks});
  NSMG_CUDA_CHECK(
      pack_gradients_launch(records, counts, to, call.flag("absgrad"), wire_to_write(call), call.stream()));
}

void collect_wire(Call& call) {
  const WireSegments come = gradient_segments(call);
  const int rows = call.count("place", "rows", 1);
  const int32_t* place = call.ints("place", {come.ranks, rows});
  const int64_t* count = call.longs("count", {1});
  const uint32_t* wire = wire_to_read(call);
  const float* own = call.floats("own", {come.capacities[come.rank], 16}, 16);
  NSMG_CUDA_CHECK(collect_wire_launch(place, count, wire, come, own, call.flag("absgrad"), rows,
                                      call.out<float>({rows, 16}), call.stream()));
}

// ---- lines of several arrays ----

void put_rows(Call& call) {
  const std::vector<at::Tensor> arrays = call.tensors("arrays");
  const at::IntArrayRef taken = call.integers("taken");
  const int64_t gate_column = call.integer("gate_column"), offset = call.integer("offset");
  TORCH_CHECK_VALUE(!arrays.empty() && arrays.size() <= kMostPutArrays && arrays.size() == taken.size(),
                    "put_rows takes 1 to ", kMostPutArrays, " arrays and as many numbers, not ", arrays.size(), " and ",
                    taken.size(), ".");
  const int64_t lines = arrays[0].size(0);
  PutArrays put{};
  put.count = int(arrays.size());
  put.capacity = cuda_count(lines, "lines");
  for (size_t k = 0; k < arrays.size(); ++k) {
    const at::Tensor& array = arrays[k];
    TORCH_CHECK_TYPE(array.element_size() == 4 && array.device() == call.like().device(), "array ", k,
                     " must be of numbers of 4 bytes on ", call.like().device(), ".");
    TORCH_CHECK_VALUE(array.dim() >= 1 && array.size(0) == lines && array.is_contiguous(), "array ", k,
                      " must be contiguous and hold ", lines, " lines.");
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(array.const_data_ptr()) % 16 == 0, "array ", k,
                      " must begin at a multiple of 16 bytes.");
    const int width = lines == 0 ? 1 : int(array.numel() / lines);
    TORCH_CHECK_VALUE(taken[k] >= 0 && taken[k] <= width && (width % 4 == 0 || taken[k] % width == 0), "of array ", k,
                      " ", taken[k], " words a line are to be taken: need 0 to ", width,
                      ", and all of them or none where they are no multiple of 4.");
    put.arrays[k] = {static_cast<const int32_t*>(array.const_data_ptr()), width, int(taken[k])};
  }
  put.offset = int(offset);
  TORCH_CHECK_VALUE(offset == 0 || (arrays[0].scalar_type() == at::kInt && put.arrays[0].width % 4 != 0),
                    "an offset is for lines of int32, and not of a multiple of 4; array 0 is ", arrays[0].scalar_type(),
                    ", with ", put.arrays[0].width, " a line.");
  if (call.has("gate")) {
    put.gate_column = int(gate_column);
    put.gate_width = call.count("gate", "columns of the gate", 1);
    put.gate = call.floats("gate", {lines, put.gate_width});
    const PutArray& last = put.arrays[put.count - 1];
    TORCH_CHECK_VALUE(last.width % 4 == 0 && gate_column >= 0 && gate_column + put.gate_width <= last.width,
                      "the gate is of columns ", gate_column, " to ", gate_column + put.gate_width, " of lines of ",
                      last.width, ", which must be a multiple of 4.");
  }
  const int64_t* count = call.longs("count", {1});
  const int64_t* destinations = call.longs("destinations", {-1, put.count});
  NSMG_CUDA_CHECK(
      put_rows_launch(put, count, destinations, call.count("destinations", "ranks"), call.stream()));
}

// ---- cells ----

void cell_windows(Call& call) {
  const int views = call.count("viewmats", "views");
  const float* viewmats = call.floats("viewmats", {views, 4, 4});
  const float* Ks = call.floats("Ks", {views, 3, 3});
  const at::ArrayRef<double> planes = call.numbers("planes");
  const at::IntArrayRef axes = call.integers("axes"), paths = call.integers("paths"), order = call.integers("order"),
                        upward = call.integers("upward"), drawn = call.integers("drawn"),
                        patches = call.integers("patches");
  const int splits = cuda_count(int64_t(axes.size()), "planes");
  TORCH_CHECK_VALUE(views > 0 && order.size() > 0 && order.size() % size_t(views) == 0,
                    "order must hold the cells of each of ", views, " views.");
  const int cells = int(order.size()) / views, depth = int(paths.size()) / cells;
  TORCH_CHECK_VALUE(planes.size() == axes.size() && paths.size() == size_t(cells) * size_t(depth) &&
                        upward.size() == size_t(views) * size_t(splits) && drawn.size() % 6 == 0 &&
                        patches.size() % 6 == 0,
                    "cell_windows: tables of a length that is not theirs.");
  std::vector<uint32_t> words(2 * size_t(splits));
  if (splits > 0) std::memcpy(words.data(), planes.data(), 8 * size_t(splits));
  for (const at::IntArrayRef part : {axes, paths, order, upward, drawn}) {
    for (const int64_t number : part) words.push_back(uint32_t(int32_t(number)));
  }
  int64_t tiles = 0;
  for (size_t k = 0; k < patches.size(); k += 6) {
    const int64_t* n = patches.data() + k;
    words.push_back(uint32_t(int32_t(tiles)));
    for (int i = 0; i < 6; ++i) words.push_back(uint32_t(int32_t(n[i])));
    tiles += ((n[4] - n[2] + kCellTile - 1) / kCellTile) * ((n[5] - n[3] + kCellTile - 1) / kCellTile);
  }
  const CellTables sizes{splits, cells, depth, views, int(drawn.size() / 6), int(patches.size() / 6)};
  auto* table = reinterpret_cast<uint32_t*>(call.scratch<int32_t>(int64_t(words.size())));
  NSMG_CUDA_CHECK(cell_windows_launch(sizes, words.data(), table, viewmats, Ks, cuda_count(tiles, "tiles"),
                                      call.out<double>({tiles, 2}), call.stream()));
}

void cells_reached(Call& call) {
  const int rows = call.count("means2d", "rows"), views = call.count("viewmats", "views");
  const CellRows lines{call.ints("view_ids", {rows}), call.floats("means2d", {rows, 2}), call.ints("radii", {rows, 2}),
                       call.floats("depths", {rows}), rows};
  const float* viewmats = call.floats("viewmats", {views, 4, 4});
  const float* Ks = call.floats("Ks", {views, 3, 3});
  const at::ArrayRef<double> boxes = call.numbers("boxes");
  TORCH_CHECK_VALUE(views > 0 && boxes.size() % 6 == 0, "boxes must hold 6 numbers a cell, and there must be a view.");
  const int cells = int(boxes.size() / 6);
  double* table = call.scratch<double>(int64_t{cells} * 6);
  NSMG_CUDA_CHECK(cells_reached_launch(lines, viewmats, Ks, views, boxes.data(), cells, table,
                                       call.out<bool>({cells, rows}), call.stream()));
}

}  // namespace exchange_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  namespace bind = nsmg::exchange_bind;
  m.impl("route_lines", nsmg::bound<bind::route_lines>());
  m.impl("pack", nsmg::bound<bind::pack>());
  m.impl("unpack", nsmg::bound<bind::unpack>());
  m.impl("collect", nsmg::bound<bind::collect>());
  m.impl("add_records", nsmg::bound<bind::add_records>());
  m.impl("footprint_counts", nsmg::bound<bind::footprint_counts>());
  m.impl("pack_wire", nsmg::bound<bind::pack_wire>());
  m.impl("unpack_wire", nsmg::bound<bind::unpack_wire>());
  m.impl("keep_rows", nsmg::bound<bind::keep_rows>());
  m.impl("pack_gradients", nsmg::bound<bind::pack_gradients>());
  m.impl("collect_wire", nsmg::bound<bind::collect_wire>());
  m.impl("put_rows", nsmg::bound<bind::put_rows>());
  m.impl("cell_windows", nsmg::bound<bind::cell_windows>());
  m.impl("cells_reached", nsmg::bound<bind::cells_reached>());
}
