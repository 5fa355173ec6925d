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

constexpr char kRoutedRows[] = "view_ids[M] count[1] means2d[M,2]@8 radii[M,2]@8 M first end reached[?,M]";
constexpr char kCountedRows[] = "view_ids[M] count[1] means2d[M,2] radii[M,2] M - M -";
constexpr char kPackedRows[] =
    "means2d[M,2]@8 conics[M,3] opacities[M] features[M,3] depths[M] radii[M,2]@8 view_ids[M] M - M";
constexpr char kUnpackedRows[] =
    ">means2d[L,2] >conics[L,3] >opacities[L] >features[L,3] >depths[L] >radii[L,2] >view_ids[L] >owners[L] >slots[L]";
constexpr char kKeptRows[] =
    "to_means2d[L,2] to_conics[L,3] to_opacities[L] to_features[L,3] to_depths[L] to_radii[L,2] to_view_ids[L] - "
    "to_slots[L]";
constexpr char kCollect[] = "place[R,M] count[1] sources[R] R #capacity M >records[M,16]";
constexpr char kAddRecords[] = "records[M,F] M F sinks[S] S owners[M] slots[M] system_scope";
constexpr char kCellRows[] = "view_ids[M] means2d[M,2] radii[M,2] depths[M] M";

int checked_ranks(int64_t ranks) {
  TORCH_CHECK_VALUE(ranks >= 1 && ranks <= kMostExchanging, "the exchange of rows takes 1 to ", kMostExchanging,
                    " ranks, not ", ranks, ".");
  return int(ranks);
}

void sort_by_view(std::vector<RankPatch>& patches) {
  std::stable_sort(patches.begin(), patches.end(),
                   [](const RankPatch& a, const RankPatch& b) { return a.view < b.view; });
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
  const auto lines = call.read<RouteRows>(kRoutedRows);
  check_lines(lines.first, lines.end, lines.count);
  const int ranks = checked_ranks(call.integer("ranks"));
  call.set('R', ranks);
  const int64_t cells = lines.reached == nullptr ? 0 : call.count("reached", "cells");
  const std::vector<RankPatch> patches = rank_patches(call.integers("patches"), ranks, call.integers("cells"), cells);
  auto* place = call.read<int32_t*>("place[R,M]");
  auto* counts = call.read<int64_t*>("counts[R]");
  auto* block_counts = call.scratch<int32_t>(int64_t{ranks} * route_blocks(lines.end - lines.first));
  call.run(route_launch, lines, patches.data(), cuda_count(int64_t(patches.size()), "patches"),
           call.scratch_for(patches), ranks, block_counts, place, counts);
}

// All rows, or those from `first` to `end` where the operator takes these.
PackRows pack_rows(Call& call) {
  auto lines = call.read<PackRows>(kPackedRows);
  if (!call.knows("first")) return lines;
  const int64_t first = call.integer("first"), end = call.has("end") ? call.integer("end") : lines.count;
  check_lines(first, end, lines.count);
  lines.first = int(first);
  lines.end = int(end);
  return lines;
}

void pack(Call& call) {
  const PackRows lines = pack_rows(call);
  const auto* place = call.read<const int32_t*>("place[R,M]");
  const auto* destinations = call.read<const int64_t*>("destinations[R]");
  call.run(pack_launch, lines, place, destinations, checked_ranks(call.size('R')), call.read<int>("#capacity"));
}

void unpack(Call& call) {
  const auto* records = call.read<const float*>("records[R,C,16]@16");
  const auto* counts = call.read<const int64_t*>("counts[R]");
  const int ranks = checked_ranks(call.size('R')), capacity = call.read<int>("C"), views = call.read<int>("#views");
  TORCH_CHECK_VALUE(views >= 1, "unpack needs at least one view, not ", views, ".");
  call.set('L', cuda_count(int64_t{ranks} * capacity, "rows"));
  call.run(unpack_launch, records, counts, ranks, capacity, views, call.read<UnpackedRows>(kUnpackedRows));
}

void collect(Call& call) {
  checked_ranks(call.tensor("place").size(0));
  launched<collect_launch, kCollect>(call);
}

void footprint_counts(Call& call) {
  const auto lines = call.read<RouteRows>(kCountedRows);
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
  call.run(reach_launch, lines, patches.data(), count, call.scratch_for(patches), call.out<int64_t>({count}));
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

void pack_wire(Call& call) {
  const PackRows lines = pack_rows(call);
  const WireSegments to = row_segments(call);
  const auto* place = call.in<int32_t>("place", {to.ranks, lines.count});
  call.run(pack_wire_launch, lines, place, to, call.flag("slots"), call.read<uint32_t*>("wire[?]"));
}

void unpack_wire(Call& call) {
  const WireSegments come = row_segments(call);
  const auto* wire = call.read<const uint32_t*>("wire[?]");
  const auto* counts = call.in<int64_t>("counts", {come.ranks});
  const int64_t views = call.integer("views");
  TORCH_CHECK_VALUE(views >= 1 && views <= kMostViews, "rows are of 1 to ", kMostViews, " views on the wire, not of ",
                    views, ".");
  call.set('L', lines_of(come));
  call.run(unpack_wire_launch, wire, come, counts, call.flag("slots"), int(views),
           call.read<UnpackedRows>(kUnpackedRows));
}

void keep_rows(Call& call) {
  const auto to = call.read<UnpackedRows>(kKeptRows);
  const int64_t start = call.integer("start"), capacity = call.integer("capacity");
  TORCH_CHECK_VALUE(0 <= start && 0 <= capacity && start + capacity <= call.size('L'), "lines ", start, " to ",
                    start + capacity, " are to be kept, of ", call.size('L'), " that arrived.");
  const PackRows lines = pack_rows(call);
  call.run(keep_rows_launch, lines, call.read<const int32_t*>("place[M]"), to, start,
           cuda_count(capacity, "rows of a segment"), call.flag("slots"));
}

void pack_gradients(Call& call) {
  const WireSegments to = gradient_segments(call);
  const float* records = call.in<float>("records", {lines_of(to), 16}, 16);
  const auto* counts = call.in<int64_t>("counts", {to.ranks});
  call.run(pack_gradients_launch, records, counts, to, call.flag("absgrad"), call.read<uint32_t*>("wire[?]"));
}

void collect_wire(Call& call) {
  const WireSegments come = gradient_segments(call);
  call.set('R', come.ranks);
  const auto* place = call.read<const int32_t*>("place[R,M]");
  const auto* count = call.read<const int64_t*>("count[1]");
  const auto* wire = call.read<const uint32_t*>("wire[?]");
  const float* own = call.in<float>("own", {come.capacities[come.rank], 16}, 16);
  const int rows = call.read<int>("M");
  call.run(collect_wire_launch, place, count, wire, come, own, call.flag("absgrad"), rows, call.out<float>({rows, 16}));
}

// ---- lines of several arrays ----

void put_rows(Call& call) {
  const std::vector<at::Tensor> arrays = call.tensors("arrays");
  const at::IntArrayRef taken = call.integers("taken");
  const int64_t gate_column = call.integer("gate_column"), offset = call.integer("offset");
  TORCH_CHECK_VALUE(!arrays.empty() && arrays.size() <= kMostTold && arrays.size() == taken.size(),
                    "put_rows takes 1 to ", kMostTold, " arrays and as many numbers, not ", arrays.size(), " and ",
                    taken.size(), ".");
  const int64_t lines = arrays[0].size(0);
  Told told{};
  told.count = int(arrays.size());
  told.capacity = cuda_count(lines, "lines");
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
    told.arrays[k] = {static_cast<const int32_t*>(array.const_data_ptr()), width, int(taken[k])};
  }
  told.offset = int(offset);
  TORCH_CHECK_VALUE(offset == 0 || (arrays[0].scalar_type() == at::kInt && told.arrays[0].width % 4 != 0),
                    "an offset is for lines of int32, and not of a multiple of 4; array 0 is ", arrays[0].scalar_type(),
                    ", with ", told.arrays[0].width, " a line.");
  if (call.has("gate")) {
    told.gate_column = int(gate_column);
    call.set('M', lines);
    told.gate = call.read<const float*>("gate[M,W]");
    told.gate_width = call.read<int>("W");
    const ToldArray& last = told.arrays[told.count - 1];
    TORCH_CHECK_VALUE(last.width % 4 == 0 && gate_column >= 0 && gate_column + told.gate_width <= last.width,
                      "the gate is of columns ", gate_column, " to ", gate_column + told.gate_width, " of lines of ",
                      last.width, ", which must be a multiple of 4.");
  }
  const auto* count = call.read<const int64_t*>("count[1]");
  const auto* destinations = call.in<int64_t>("destinations", {-1, told.count});
  call.run(put_rows_launch, told, count, destinations, call.count("destinations", "ranks"));
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
  TORCH_CHECK_VALUE(views > 0 && boxes.size() % 6 == 0, "boxes must hold 6 numbers a cell, and there must be a view.");
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
  m.impl("collect", bound<collect>());
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
