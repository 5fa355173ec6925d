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

constexpr char kRoutedRows[] = "view_ids[M] count[1] means2d[M,2]@8 radii[M,2]@8 M in_cells[?,M]";
constexpr char kCountedRows[] = "view_ids[M] count[1] means2d[M,2] radii[M,2] M -";
constexpr char kAddRecords[] = "records[M,F] M F sinks[S] S owners[M] slots[M] system_scope";
constexpr char kCellRows[] = "view_ids[M] means2d[M,2] radii[M,2] depths[M] M";

void sort_by_view(std::vector<RankPatch>& patches) {
  std::stable_sort(patches.begin(), patches.end(),
                   [](const RankPatch& a, const RankPatch& b) { return a.view < b.view; });
}

// Six numbers a patch (rank, view, x0, y0, x1, y1), and its cell where there are any, ascending by view.
std::vector<RankPatch> rank_patches(at::IntArrayRef numbers, at::IntArrayRef cells) {
  std::vector<RankPatch> patches;
  for (size_t k = 0; k < numbers.size(); k += 6) {
    const int64_t* n = numbers.data() + k;
    patches.push_back({int32_t(n[1]), int32_t(n[0]), int32_t(n[2]), int32_t(n[3]), int32_t(n[4]), int32_t(n[5]),
                       cells.empty() ? 0 : int32_t(cells[k / 6])});
  }
  sort_by_view(patches);
  return patches;
}

void route_lines(Call& call) {
  const auto lines = call.read<RouteRows>(kRoutedRows);
  const int ranks = int(call.integer("ranks"));
  call.set('R', ranks);
  const std::vector<RankPatch> patches = rank_patches(call.integers("patches"), call.integers("cells"));
  auto* place = call.read<int32_t*>("place[R,M]");
  auto* counts = call.read<int64_t*>("counts[R]");
  auto* block_counts = call.scratch<int32_t>(int64_t{ranks} * route_blocks(lines.count));
  call.run(route_launch, lines, patches.data(), cuda_count(int64_t(patches.size()), "patches"),
           call.scratch_for(patches), ranks, block_counts, place, counts);
}

// Columns of so many rows, which are read, or written where `T` is not const.
template <typename T>
void take_columns(Call& call, const std::vector<at::Tensor>& columns, int64_t rows, RowWidths& widths,
                  T* (&found)[kMostColumns]) {
  TORCH_CHECK_VALUE(columns.size() <= kMostColumns, "rows have up to ", kMostColumns, " columns.");
  for (size_t c = 0; c < columns.size(); ++c) {
    widths.at[c] = columns[c].dim() == 1 ? 1 : int(columns[c].size(1));
    const auto shape = column_shape(rows, widths.at[c]);
    if constexpr (std::is_const_v<T>) {
      const at::Tensor checked = cuda_checked(columns[c], "columns", shape, at::kFloat, call.like());
      found[c] = static_cast<T*>(call.hold(aligned(checked, c == 0 ? 8 : 1)).const_data_ptr());
    } else {
      found[c] = call.written<T>(columns[c], "columns", shape);
    }
  }
  TORCH_CHECK_VALUE(with_columns(widths, [](auto) { return cudaSuccess; }) == cudaSuccess,
                    "no primitive has these columns: add theirs to the lists of cuda/exchange/row_columns.h.");
}

PackRows packed_rows(Call& call) {
  const std::vector<at::Tensor> columns = call.tensors("columns");
  PackRows rows = {};
  call.set('M', columns.at(0).size(0));
  take_columns(call, columns, call.size('M'), rows.widths, rows.columns);
  rows.radii = call.read<const int32_t*>("radii[M,2]@8");
  rows.view_ids = call.read<const int32_t*>("view_ids[M]");
  rows.count = call.read<int>("M");
  return rows;
}

// Results of L rows.
UnpackedRows unpacked_rows(Call& call) {
  std::vector<at::Tensor> columns;
  for (const int64_t width : call.integers("widths"))
    columns.push_back(at::empty(column_shape(call.size('L'), width), call.options(at::kFloat)));
  call.result(columns, "columns");
  UnpackedRows rows = {};
  take_columns(call, columns, call.size('L'), rows.widths, rows.columns);
  rows.radii = call.read<int32_t*>(">radii[L,2]");
  rows.view_ids = call.read<int32_t*>(">view_ids[L]");
  rows.owners = call.read<int32_t*>(">owners[L]");
  rows.slots = call.read<int32_t*>(">slots[L]");
  return rows;
}

void pack(Call& call) {
  const PackRows lines = packed_rows(call);
  const auto* place = call.read<const int32_t*>("place[R,M]");
  const auto* destinations = call.read<const int64_t*>("destinations[R]");
  call.run(pack_launch, lines, place, destinations, call.read<int>("R"), call.read<int>("#capacity"));
}

void unpack(Call& call) {
  const auto* records = call.read<const float*>("records[R,C,F]@16");
  const auto* counts = call.read<const int64_t*>("counts[R]");
  const int ranks = call.read<int>("R"), capacity = call.read<int>("C"), views = call.read<int>("#views");
  call.set('L', cuda_count(int64_t{ranks} * capacity, "rows"));
  call.run(unpack_launch, records, counts, ranks, capacity, views, unpacked_rows(call));
}

void footprint_counts(Call& call) {
  const auto lines = call.read<RouteRows>(kCountedRows);
  const at::IntArrayRef numbers = call.integers("patches");
  std::vector<RankPatch> patches;
  for (size_t k = 0; k < numbers.size(); k += 5) {
    const int64_t* n = numbers.data() + k;
    patches.push_back({int32_t(n[0]), int32_t(k / 5), int32_t(n[1]), int32_t(n[2]), int32_t(n[3]), int32_t(n[4])});
  }
  sort_by_view(patches);
  const int count = cuda_count(int64_t(patches.size()), "patches");
  call.run(footprint_launch, lines, patches.data(), count, call.scratch_for(patches), call.out<int64_t>({count}));
}

// ---- columns of words ----

int64_t lines_of(const WireSegments& segments) {
  int64_t lines = 0;
  for (int k = 0; k < segments.ranks; ++k) lines += segments.capacities[k];
  return lines;
}

WireSegments segments_of(Call& call) {
  const at::IntArrayRef starts = call.integers("starts"), capacities = call.integers("capacities");
  const int64_t ranks = static_cast<int64_t>(capacities.size()), rank = call.integer("rank");
  TORCH_INTERNAL_ASSERT(ranks <= kMostSegments && int64_t(starts.size()) == ranks);
  WireSegments segments = {};
  segments.ranks = int(ranks);
  segments.rank = int(rank);
  segments.half = call.flag("half");
  for (int64_t k = 0; k < ranks; ++k) {
    segments.starts[k] = starts[k];
    segments.capacities[k] = cuda_count(capacities[k], "rows of a segment");
  }
  cuda_count(lines_of(segments), "rows");
  return segments;
}

void pack_wire(Call& call) {
  const PackRows lines = packed_rows(call);
  const WireSegments to = segments_of(call);
  const auto* place = call.in<int32_t>("place", {to.ranks, lines.count});
  call.run(pack_wire_launch, lines, place, to, call.flag("slots"), call.read<uint32_t*>("wire[?]"));
}

void unpack_wire(Call& call) {
  const WireSegments come = segments_of(call);
  const auto* wire = call.read<const uint32_t*>("wire[?]");
  const auto* counts = call.in<int64_t>("counts", {come.ranks});
  call.set('L', lines_of(come));
  call.run(unpack_wire_launch, wire, come, counts, call.flag("slots"), call.read<int>("views"), unpacked_rows(call));
}

void keep_rows(Call& call) {
  const PackRows lines = packed_rows(call);
  const auto* place = call.read<const int32_t*>("place[M]");
  const std::vector<at::Tensor> columns = call.tensors("to_columns");
  UnpackedRows to = {};
  call.set('L', columns.at(0).size(0));
  take_columns(call, columns, call.size('L'), to.widths, to.columns);
  to.radii = call.read<int32_t*>("to_radii[L,2]");
  to.view_ids = call.read<int32_t*>("to_view_ids[L]");
  to.slots = call.read<int32_t*>("to_slots[L]");
  const int64_t start = call.integer("start");
  call.run(keep_rows_launch, lines, place, to, start, call.read<int>("#capacity"), call.flag("slots"));
}

Returned returned_of(Call& call, int64_t floats) {
  const at::IntArrayRef places = call.integers("returned");
  return {int(floats), places.data(), int(places.size())};
}

void pack_gradients(Call& call) {
  const WireSegments to = segments_of(call);
  call.set('L', lines_of(to));
  const auto* records = call.read<const float*>("records[L,F]@16");
  const auto* counts = call.in<int64_t>("counts", {to.ranks});
  auto* wire = call.read<uint32_t*>("wire[?]");
  call.run(pack_gradients_launch, returned_of(call, call.size('F')), records, counts, to, wire);
}

void collect_wire(Call& call) {
  const WireSegments come = segments_of(call);
  call.set('R', come.ranks);
  const auto* place = call.read<const int32_t*>("place[R,M]");
  const auto* count = call.read<const int64_t*>("count[1]");
  const auto* wire = call.read<const uint32_t*>("wire[?]");
  call.set('L', come.capacities[come.rank]);
  const auto* own = call.read<const float*>("own[L,F]@16");
  const Returned returned = returned_of(call, call.size('F'));
  call.run(collect_wire_launch, returned, place, count, wire, come, own, call.read<int>("M"),
           call.read<float*>(">records[M,F]"));
}

// ---- lines of several arrays ----

void put_rows(Call& call) {
  const std::vector<at::Tensor> arrays = call.tensors("arrays");
  const at::IntArrayRef taken = call.integers("taken");
  TORCH_INTERNAL_ASSERT(arrays.size() <= kMostPutArrays && arrays.size() == taken.size());
  const int64_t lines = arrays[0].size(0);
  PutArrays put{};
  put.count = int(arrays.size());
  put.capacity = cuda_count(lines, "lines");
  for (size_t k = 0; k < arrays.size(); ++k) {
    const int width = lines == 0 ? 1 : int(arrays[k].numel() / lines);
    put.arrays[k] = {static_cast<const int32_t*>(arrays[k].const_data_ptr()), width, int(taken[k])};
  }
  put.offset = int(call.integer("offset"));
  if (call.has("gate")) {
    put.gate_column = int(call.integer("gate_column"));
    call.set('M', lines);
    put.gate = call.read<const float*>("gate[M,W]");
    put.gate_width = call.read<int>("W");
  }
  const auto* count = call.read<const int64_t*>("count[1]");
  const auto* destinations = call.in<int64_t>("destinations", {-1, put.count});
  call.run(put_rows_launch, put, count, destinations, call.count("destinations", "ranks"));
}

// ---- cells ----

void cell_windows(Call& call) {
  const auto* viewmats = call.read<const float*>("viewmats[V,4,4]");
  const auto* Ks = call.read<const float*>("Ks[V,3,3]");
  const int views = call.read<int>("V");
  const at::ArrayRef<double> planes = call.numbers("planes");
  const at::IntArrayRef axes = call.integers("axes"), paths = call.integers("paths"), order = call.integers("order"),
                        upward = call.integers("upward"), drawn = call.integers("drawn"),
                        patches = call.integers("patches");
  const int splits = cuda_count(int64_t(axes.size()), "planes");
  const int cells = int(order.size()) / views, depth = int(paths.size()) / cells;
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
  auto* table = call.scratch<uint32_t>(int64_t(words.size()));
  call.run(cell_windows_launch, sizes, words.data(), table, viewmats, Ks, cuda_count(tiles, "tiles"),
           call.out<double>({tiles, 2}));
}

void cells_reached(Call& call) {
  const auto lines = call.read<CellRows>(kCellRows);
  const auto* viewmats = call.read<const float*>("viewmats[V,4,4]");
  const auto* Ks = call.read<const float*>("Ks[V,3,3]");
  const at::ArrayRef<double> boxes = call.numbers("boxes");
  const int views = call.read<int>("V"), cells = int(boxes.size() / 6);
  call.run(cells_reached_launch, lines, viewmats, Ks, views, boxes.data(), cells,
           call.scratch<double>(int64_t{cells} * 6), call.out<bool>({cells, lines.count}));
}

}  // namespace exchange_bind
}  // namespace nsmg

TORCH_LIBRARY_IMPL(ns_multigpu, CUDA, m) {
  using namespace nsmg::exchange_bind;
  using nsmg::bound;
  m.impl("route_lines", bound<route_lines>());
  m.impl("pack", bound<pack>());
  m.impl("unpack", bound<unpack>());
  m.impl("add_records", bound<nsmg::launched<nsmg::add_records_launch, kAddRecords>>());
  m.impl("footprint_counts", bound<footprint_counts>());
  m.impl("pack_wire", bound<pack_wire>());
  m.impl("unpack_wire", bound<unpack_wire>());
  m.impl("keep_rows", bound<keep_rows>());
  m.impl("pack_gradients", bound<pack_gradients>());
  m.impl("collect_wire", bound<collect_wire>());
  m.impl("put_rows", bound<nsmg::exchange_bind::put_rows>());
  m.impl("cell_windows", bound<cell_windows>());
  m.impl("cells_reached", bound<cells_reached>());
}
