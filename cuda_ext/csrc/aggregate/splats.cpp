// The operators of splats: gradients of points by shard, pixels by rows of tiles.
#include "operators.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <c10/core/DeviceGuard.h>

#include <limits>
#include <numeric>

namespace aggregate {
namespace {

// Where rows of each member's points begin, and their number at the end, if rows ascend by point; else empty. The host
// waits for it.
std::vector<int64_t> row_bounds(const Tensor& ids, const std::vector<Part>& parts) {
  const int64_t rows = ids.size(0);
  std::vector<int64_t> begins;
  for (const Part& part : parts) begins.push_back(part.begin);
  c10::DeviceGuard guard(device(0));
  const Tensor all = plain(ids, 0), places = at::tensor(begins, ids.scalar_type()).to(device(0));
  const Tensor ascends = all.narrow(0, 0, rows - 1).le(all.narrow(0, 1, rows - 1)).all();
  const Tensor read = at::cat({at::searchsorted(all, places), ascends.to(at::kLong).view({1})}).cpu();
  std::vector<int64_t> bounds(read.const_data_ptr<int64_t>(), read.const_data_ptr<int64_t>() + read.numel());
  const bool ascending = bounds.back() != 0;
  bounds.back() = rows;
  return ascending ? bounds : std::vector<int64_t>();
}

// Calls `op` for each member's shard of the points and the rows that name them. `letters` as of call_shards, and 'r':
// rows. Those of one view are cut. Of several views, a member gets those of its points first, and padding behind: then
// the host learns no count.
bool by_points(
    const Operator& op, const Stack& arguments, std::string letters, const std::string& outs, size_t point_ids,
    size_t cameras, Stack& results) {
  const Tensor ids = arguments[point_ids].toTensor();
  const int64_t points = arguments[cameras - 1].toTensor().size(0), rows = ids.size(0);
  const auto parts = parts_of(points);
  const bool one_view = arguments[cameras].toTensor().size(0) == 1 && rows > 1 && parts.size() > 1;
  const auto bounds = one_view ? row_bounds(ids, parts) : std::vector<int64_t>();
  const auto cut = [&](Stack& changed, size_t i) {
    for (size_t k = 0; k < changed.size(); ++k) {
      if (!op.is_tensor(k) || letters[op.letter_of[k]] != 'r') continue;
      const Tensor row =
          plain(changed[k].toTensor(), parts[i].member, 0, bounds[i], bounds[i + 1] - bounds[i]);
      changed[k] = k == point_ids ? row.sub(parts[i].begin) : row;
    }
  };
  const auto pad = [&](Stack& changed, size_t i) {
    const Part& part = parts[i];
    const Tensor all = plain(ids, part.member).sub(part.begin);
    const Tensor mine = all.ge(0).logical_and(all.lt(part.length));
    const Tensor place = at::where(mine, mine.cumsum(0).sub(1), rows);
    for (size_t k = 0; k < changed.size(); ++k) {
      if (op.is_tensor(k) && letters[op.letter_of[k]] == 'r') {
        const Tensor row = k == point_ids ? all : plain(changed[k].toTensor(), part.member);
        c10::DimVector sizes(row.sizes());
        sizes[0] += 1; // rows of other members' points end there
        const int64_t last_view = changed[cameras].toTensor().size(0) - 1;
        const int64_t padding = k == point_ids ? -1 : k == point_ids - 1 ? last_view : 0;
        changed[k] = at::full(sizes, padding, row.options()).index_copy_(0, place, row).narrow(0, 0, rows);
      }
    }
  };
  std::string plain_rows = letters;
  std::replace(plain_rows.begin(), plain_rows.end(), 'r', '.');
  const Change change = bounds.empty() ? Change(pad) : Change(cut);
  call_parts(op, arguments, plain_rows, outs, {0, points}, -1, parts, change, results);
  return true;
}

// Rows of tiles of one member: patches, their tiles and their pixels.
struct Band {
  std::vector<int64_t> patches;
  int64_t first_tile = 0, tiles = 0;
};

// Cuts patches (view, x0, y0, x1, y1) between rows of tiles, so that members have about as many tiles.
std::vector<Band> bands_of(const std::vector<int64_t>& patches, int64_t tile, std::vector<Part>& parts) {
  const auto tiles_along = [&](int64_t pixels) { return (pixels + tile - 1) / tile; };
  int64_t total = 0, tiles = 0, pixels = 0;
  for (size_t p = 0; p < patches.size(); p += 5) {
    total += tiles_along(patches[p + 3] - patches[p + 1]) * tiles_along(patches[p + 4] - patches[p + 2]);
  }
  std::vector<Band> bands;
  for (size_t p = 0; p < patches.size(); p += 5) {
    const int64_t width = patches[p + 3] - patches[p + 1];
    for (int64_t y = patches[p + 2]; width > 0 && y < patches[p + 4]; y += tile) {
      const int64_t end = std::min(y + tile, patches[p + 4]);
      const int member = static_cast<int>(tiles * count() / total);
      if (parts.empty() || parts.back().member != member) {
        parts.push_back({member, pixels, 0});
        bands.push_back({{}, tiles, 0});
      }
      std::vector<int64_t>& mine = bands.back().patches;
      if (y > patches[p + 2] && !mine.empty()) {
        mine.back() = end;
      } else {
        mine.insert(mine.end(), {patches[p], patches[p + 1], y, patches[p + 3], end});
      }
      bands.back().tiles += tiles_along(width);
      parts.back().length += width * (end - y);
      tiles += tiles_along(width);
      pixels += width * (end - y);
    }
  }
  return bands;
}

// Arguments of rasterize and its backward.
enum { kTileOffsets = 4, kRowIds = 5, kPatches = 6, kTileSize = 7, kLast = 9, kState = 10 };

// The arguments of a band: its patches, and its part of the tiles' lists. The host waits for where that begins.
Change of_bands(const std::vector<Part>& parts, const std::vector<Band>& bands, const Tensor& offsets) {
  return [&parts, &bands, offsets](Stack& changed, size_t i) {
    const auto begin = offsets[bands[i].first_tile].item<int>();
    const auto end = offsets[bands[i].first_tile + bands[i].tiles].item<int>();
    const Tensor all = plain(changed[kTileOffsets].toTensor(), parts[i].member);
    changed[kTileOffsets] = all.narrow(0, bands[i].first_tile, bands[i].tiles + 1).sub(begin);
    changed[kRowIds] = changed[kRowIds].toTensor().narrow(0, begin, end - begin);
    changed[kPatches] = bands[i].patches;
  };
}

// The places in lists that pixels hold, -1 for none, counted from the bands' lists (sign -1) or from all (1).
Tensor shifted(
    const Tensor& last, const std::vector<Part>& parts, const std::vector<Band>& bands, const Tensor& offsets,
    int sign) {
  std::vector<Tensor> places;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor mine = last.narrow(0, parts[i].begin, parts[i].length);
    places.push_back(mine.add(mine.ge(0), sign * offsets[bands[i].first_tile].item<int>()));
  }
  return at::cat(places);
}

// Pixels around a band of rows that its windows of SSIM see.
constexpr int64_t kHalo = 5;

// The arguments of a band of an image's rows: the inner rectangle, counted from row `first`.
void cut_inner(Stack& changed, size_t inner, const Part& part, int64_t first) {
  auto rectangle = changed[inner].toIntVector();
  for (int side : {1, 3}) {
    rectangle[side] = std::clamp(rectangle[side], part.begin, part.begin + part.length) - first;
  }
  changed[inner] = rectangle;
}

// The members' k-th results, of floats, one behind the other; behind them their lengths, unless all are empty.
Tensor in_line_with_lengths(std::vector<Stack> found, size_t k, std::vector<Part> parts) {
  std::vector<int64_t> lengths;
  for (const Stack& one : found) lengths.push_back(one[k].toTensor().numel());
  const std::vector<int64_t> none(parts.size() + 1, 0);
  if (lengths != std::vector<int64_t>(parts.size(), 0)) {
    Stack last(k + 1);
    last[k] = at::tensor(lengths, at::kLong).view(at::kFloat).to(device(0));
    found.push_back(last);
    parts.push_back({0, 0, 0});
  }
  return in_line(found, k, parts, none);
}

// The lengths that `in_line_with_lengths` has written. The host waits for them.
std::vector<int64_t> lengths_in(const Tensor& line, size_t count) {
  if (line.numel() == 0) return std::vector<int64_t>(count, 0);
  const auto floats = static_cast<int64_t>(2 * count);
  const Tensor read = line.narrow(0, line.numel() - floats, floats).cpu().view(at::kLong);
  return {read.const_data_ptr<int64_t>(), read.const_data_ptr<int64_t>() + count};
}

} // namespace

// Of one view each member culls its shard: the rows of all, one behind the other, ascend by point.
bool cull(const Operator& op, const Stack& arguments, Stack& results) {
  const int64_t points = arguments[0].toTensor().size(0);
  const auto parts = parts_of(points);
  if (parts.size() < 2 || arguments[3].toTensor().size(0) != 1) return false;
  std::vector<Stack> found(parts.size());
  std::vector<int64_t> none(parts.size(), 0), begins;
  for (const Part& part : parts) begins.push_back(part.begin);
  at_once(parts, [&](size_t i) { found[i] = call_member(op, arguments, "000..", {0, points}, parts[i]); });
  results.emplace_back(in_line(found, 0, parts, none));
  results.emplace_back(in_line(found, 1, parts, begins));
  return true;
}

// Each member lists the rows of its tiles.
bool intersect(const Operator& op, const Stack& arguments, Stack& results) {
  std::vector<Part> parts;
  const auto bands = bands_of(arguments[kPatches].toIntVector(), arguments[kTileSize].toInt(), parts);
  if (parts.size() < 2) return false;
  std::vector<Stack> found(parts.size());
  at_once(parts, [&](size_t i) {
    Stack changed = arguments;
    changed[kPatches] = bands[i].patches;
    found[i] = call_member(op, changed, "", {0, 0}, parts[i]);
  });
  std::vector<int64_t> none(parts.size(), 0), begins{0};
  for (size_t i = 0; i < parts.size(); ++i) {
    begins.push_back(begins.back() + found[i][1].toTensor().size(0));
    // A band ends where the next begins.
    if (i + 1 < parts.size()) found[i][0] = found[i][0].toTensor().narrow(0, 0, bands[i].tiles);
  }
  TORCH_CHECK(begins.back() <= std::numeric_limits<int32_t>::max(), "intersect: more than 2^31 intersections");
  results.emplace_back(in_line(found, 0, parts, begins));
  results.emplace_back(in_line(found, 1, parts, none));
  return true;
}

// Bands of rows with a halo; the gradient of a pixel in two bands' halos is the sum of theirs.
bool l1_ssim(const Operator& op, const Stack& arguments, Stack& results) {
  const Tensor image = arguments[0].toTensor();
  const int64_t height = image.size(0);
  const auto parts = parts_of(height);
  if (parts.size() < 2) return false;
  const auto first = [&](const Part& part) { return std::max<int64_t>(part.begin - kHalo, 0); };
  const auto last = [&](const Part& part) { return std::min(part.begin + part.length + kHalo, height); };
  std::vector<Stack> found;
  {
    Together together;
    for (const Part& part : parts) {
      Stack changed = arguments;
      for (int k : {0, 1}) {
        changed[k] = changed[k].toTensor().narrow(0, first(part), last(part) - first(part));
      }
      cut_inner(changed, 2, part, first(part));
      found.push_back(call_member(op, changed, "", {0, 0}, part));
    }
  }
  const Cut rows{0, height};
  for (size_t k : {0, 1}) results.emplace_back(joined(found, k, '+', rows, parts));
  std::vector<Stack> own(found.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    own[i] = {found[i][2].toTensor().narrow(0, parts[i].begin - first(parts[i]), parts[i].length)};
  }
  const Tensor gradient = joined(own, 0, '0', rows, parts);
  c10::DeviceGuard guard(device(0));
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t end = parts[i].begin + parts[i].length;
    for (const auto& [begin, halo_end] : {std::pair(first(parts[i]), parts[i].begin), std::pair(end, last(parts[i]))}) {
      if (begin == halo_end) continue;
      const Tensor halo = found[i][2].toTensor().narrow(0, begin - first(parts[i]), halo_end - begin);
      plain(gradient, 0, 0, begin, halo_end - begin).add_(halo.to(device(0)));
    }
  }
  results.emplace_back(gradient);
  return true;
}

bool l1_ssim_backward(const Operator& op, const Stack& arguments, Stack& results) {
  const int64_t height = arguments[0].toTensor().size(0);
  const auto parts = parts_of(height);
  if (parts.size() < 2) return false;
  const auto change = [&](Stack& changed, size_t i) { cut_inner(changed, 3, parts[i], parts[i].begin); };
  call_parts(op, arguments, "000..", "0", {0, height}, -1, parts, change, results);
  return true;
}

bool project_backward(const Operator& op, const Stack& arguments, Stack& results) {
  return by_points(op, arguments, "0000..rrrrrrrr", "0000+", 8, 4, results);
}

bool sh_colors_backward(const Operator& op, const Stack& arguments, Stack& results) {
  return by_points(op, arguments, "0.00rrrr", "0+00", 6, 2, results);
}

bool rasterize(const Operator& op, const Stack& arguments, Stack& results) {
  std::vector<Part> parts;
  const auto bands = bands_of(arguments[kPatches].toIntVector(), arguments[kTileSize].toInt(), parts);
  if (parts.size() < 2) return false;
  const Tensor offsets = arguments[kTileOffsets].toTensor().cpu();
  const Cut pixels{0, parts.back().begin + parts.back().length};
  const Change of_band = of_bands(parts, bands, offsets);
  std::vector<Stack> found;
  {
    Together together;
    for (size_t i = 0; i < parts.size(); ++i) {
      Stack changed = arguments;
      c10::DeviceGuard guard(device(parts[i].member));
      of_band(changed, i);
      found.push_back(call_member(op, changed, "", {0, 0}, parts[i]));
    }
  }
  for (size_t k : {0, 1, 2}) results.emplace_back(joined(found, k, '0', pixels, parts));
  results[2] = shifted(results[2].toTensor(), parts, bands, offsets, 1);
  results.emplace_back(in_line_with_lengths(found, 3, parts));
  return true;
}

bool rasterize_backward(const Operator& op, const Stack& arguments, Stack& results) {
  std::vector<Part> parts;
  const auto bands = bands_of(arguments[kPatches].toIntVector(), arguments[kTileSize].toInt(), parts);
  if (parts.size() < 2) return false;
  const Tensor offsets = arguments[kTileOffsets].toTensor().cpu();
  const Cut pixels{0, parts.back().begin + parts.back().length};
  Stack changed = arguments;
  changed[kLast] = shifted(arguments[kLast].toTensor(), parts, bands, offsets, -1);
  const Change of_band = of_bands(parts, bands, offsets);
  const Tensor state = arguments[kState].toTensor();
  const auto lengths = lengths_in(state, parts.size());
  const auto change = [&](Stack& shards, size_t i) {
    of_band(shards, i);
    const int64_t begin = std::accumulate(lengths.begin(), lengths.begin() + i, int64_t{0});
    shards[kState] = state.narrow(0, begin, lengths[i]);
  };
  call_parts(op, changed, "......00.000", "+++++", pixels, -1, parts, change, results);
  return true;
}

} // namespace aggregate
