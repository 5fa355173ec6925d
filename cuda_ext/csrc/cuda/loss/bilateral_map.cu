// A block takes pixels of one of the grid's cells, and has the maps at its corners in shared memory.
//
// The grid's gradient is a sum over pixels that all want the same few addresses. A thread has one of the maps' numbers,
// and sums it over a row in registers: by level, and for each level its moments by the place in the cell, of which the
// four corners follow. The block adds these to memory once, its threads' without atomic operations: of floats, these are
// loops of compare and swap in shared memory.
#include "cuda/loss/bilateral_map.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kMap = 12;   // numbers of an affine map, [3, 4]
constexpr int kAcross = 32, kDown = 64;  // pixels of a tile, at most
constexpr int kRows = 16;                // of a tile, at once: each is a group's of kMap threads
constexpr int kSums = kMap * kRows;      // threads that sum
constexpr int kLevels = 8;               // that a thread sums
constexpr int kMostLevels = 64;          // MOST_LEVELS of cuda_ext/ops/loss/bilateral_map.py
constexpr int kMoments = 4;              // 1, x, y, x * y
constexpr float kRed = 0.299f, kGreen = 0.587f, kBlue = 0.114f;  // of gray

// The cell of the grid that a place lies in, along one axis, and how far in it.
struct Along {
  int cell;
  float part;
};

__device__ __forceinline__ Along along(int pixel, int pixels, int nodes) {
  if (nodes < 2 || pixels < 2) return {0, 0.0f};
  const float place = float(pixel) * (float(nodes - 1) / float(pixels - 1));
  const int cell = min(int(place), nodes - 2);
  return {cell, place - float(cell)};
}

__device__ __forceinline__ Along along_gray(float gray, int levels) {
  if (levels < 2) return {0, 0.0f};
  const float place = fminf(fmaxf(gray, 0.0f), 1.0f) * float(levels - 1);  // 0 where gray is NaN
  const int cell = min(int(place), levels - 2);
  return {cell, place - float(cell)};
}

__device__ __forceinline__ float gray_of(const float* rgb) { return kRed * rgb[0] + kGreen * rgb[1] + kBlue * rgb[2]; }

__host__ __device__ __forceinline__ int cells_of(int pixels, int nodes) { return nodes < 2 || pixels < 2 ? 1 : nodes - 1; }

// The first pixel that lies in a cell or beyond it.
__device__ int first_pixel(int cell, int pixels, int nodes) {
  if (cell == 0) return 0;
  if (cell >= cells_of(pixels, nodes)) return pixels;
  int pixel = int(float(cell) * (float(pixels - 1) / float(nodes - 1)));
  while (pixel > 0 && along(pixel - 1, pixels, nodes).cell >= cell) --pixel;
  while (pixel < pixels && along(pixel, pixels, nodes).cell < cell) ++pixel;
  return pixel;
}

// Tiles of at most `side` pixels in which an axis of a view is cut: so many in each of its cells.
struct Tiles {
  int pixels, nodes, side, in_cell;

  Tiles(int pixels, int nodes, int side) : pixels(pixels), nodes(nodes), side(side) {
    const int cell = nodes < 2 || pixels < 2 ? pixels : (pixels - 1) / (nodes - 1) + 2;
    in_cell = (cell + side - 1) / side;
  }
  __host__ __device__ int count() const { return cells_of(pixels, nodes) * in_cell; }
};

// The pixels of a tile that lie in a rectangle from `first` on.
struct Range {
  int cell, begin, end;
};

__device__ Range range_of(const Tiles& tiles, int tile, int first, int count) {
  const int cell = tile / tiles.in_cell, offset = tile % tiles.in_cell * tiles.side;
  const int begin = first_pixel(cell, tiles.pixels, tiles.nodes) + offset;
  const int end = min(begin + tiles.side, first_pixel(cell + 1, tiles.pixels, tiles.nodes));
  return {cell, max(begin, first), min(end, first + count)};
}

// The maps at the corners of a tile's cell: above left, above right, below left, below right. [4, levels, kMap]; threads
// of a warp read maps of different levels, whose four numbers lie in different banks.
__device__ void load_corners(const BilateralGrid& grid, int column, int row, float4* corners) {
  const int64_t plane = int64_t{grid.rows} * grid.columns;
  float* const numbers = reinterpret_cast<float*>(corners);
  for (int i = threadIdx.x; i < 4 * kMap * grid.levels; i += blockDim.x) {
    const int k = i % kMap, level = i / kMap % grid.levels, corner = i / (kMap * grid.levels);
    const int x = min(column + corner % 2, grid.columns - 1), y = min(row + corner / 2, grid.rows - 1);
    numbers[i] = grid.values[(k * grid.levels + level) * plane + int64_t{y} * grid.columns + x];
  }
}

// The maps below and above a pixel's gray.
struct Maps {
  float4 low[3], high[3];
};

__device__ __forceinline__ void add(float4* sum, float weight, float4 value) {
  sum->x += weight * value.x, sum->y += weight * value.y, sum->z += weight * value.z, sum->w += weight * value.w;
}

__device__ __forceinline__ Maps maps_at(const float4* corners, int levels, float x, float y, int level) {
  const float w11 = x * y;
  const float weights[4] = {1.0f - x - (y - w11), x - w11, y - w11, w11};
  const int above = level + 1 < levels ? 3 : 0;
  Maps maps = {};
#pragma unroll
  for (int corner = 0; corner < 4; ++corner) {
    const float4* const at = corners + 3 * (corner * levels + level);
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      add(maps.low + c, weights[corner], at[c]);
      add(maps.high + c, weights[corner], at[above + c]);
    }
  }
  return maps;
}

__device__ __forceinline__ float4 between(float4 low, float4 high, float part) {
  return {low.x + part * (high.x - low.x), low.y + part * (high.y - low.y), low.z + part * (high.z - low.z),
          low.w + part * (high.w - low.w)};
}

__device__ __forceinline__ float dot(float4 map, const float* rgb) {
  return map.x * rgb[0] + map.y * rgb[1] + map.z * rgb[2] + map.w;
}

__global__ void __launch_bounds__(kThreads)
    map_kernel(const BilateralGrid grid, const MappedColors colors, const Tiles tiles_x, const Tiles tiles_y,
               float* __restrict__ out) {
  __shared__ float4 corners[4 * kMostLevels * kMap / 4];
  const int across = tiles_x.count();
  const Range x = range_of(tiles_x, blockIdx.x % across, colors.x0, colors.width);
  const Range y = range_of(tiles_y, blockIdx.x / across, colors.y0, colors.height);
  if (x.begin >= x.end || y.begin >= y.end) return;
  load_corners(grid, x.cell, y.cell, corners);
  __syncthreads();
  const int width = x.end - x.begin, pixels = width * (y.end - y.begin);
  for (int i = threadIdx.x; i < pixels; i += blockDim.x) {
    const int column = x.begin + i % width, row = y.begin + i / width;
    const int64_t at = 3 * (int64_t{row - colors.y0} * colors.width + column - colors.x0);
    const float rgb[3] = {colors.rgb[at], colors.rgb[at + 1], colors.rgb[at + 2]};
    const Along z = along_gray(gray_of(rgb), grid.levels);
    const float part_x = along(column, colors.view_width, grid.columns).part;
    const float part_y = along(row, colors.view_height, grid.rows).part;
    const Maps maps = maps_at(corners, grid.levels, part_x, part_y, z.cell);
#pragma unroll
    for (int c = 0; c < 3; ++c) out[at + c] = dot(between(maps.low[c], maps.high[c], z.part), rgb);
  }
}

// The gradient by a pixel's colour.
__device__ void color_gradient(const Maps& maps, const Along& z, int levels, const float* rgb, const float* v_out,
                               float* v_rgb) {
  float v[3] = {}, by_gray = 0.0f;
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const float4 map = between(maps.low[c], maps.high[c], z.part);
    v[0] += v_out[c] * map.x, v[1] += v_out[c] * map.y, v[2] += v_out[c] * map.z;
    by_gray += v_out[c] * (dot(maps.high[c], rgb) - dot(maps.low[c], rgb));
  }
  // As in torch, places at the grid's ends and beyond have no slope.
  const float gray = gray_of(rgb);
  by_gray = gray > 0.0f && gray < 1.0f ? by_gray * float(levels - 1) : 0.0f;
  v_rgb[0] = v[0] + kRed * by_gray;
  v_rgb[1] = v[1] + kGreen * by_gray;
  v_rgb[2] = v[2] + kBlue * by_gray;
}

__global__ void __launch_bounds__(kSums)
    backward_kernel(const BilateralGrid grid, const MappedColors colors, const float* __restrict__ v_out,
                    const Tiles tiles_x, const Tiles tiles_y, int groups, float* __restrict__ v_grid,
                    float* __restrict__ v_rgb) {
  __shared__ union {
    struct {  // padded, so that the rows of a warp are in other banks
      float v[kRows][3 * kAcross + 4], rgb[kRows][3 * kAcross + 4];
      float4 hats[kRows][kAcross * kLevels / 4 + 1];  // of a pixel, the weights of levels
    } tile;
    float4 moments[kLevels][kSums];  // of each thread
  } shared;
  __shared__ float x_parts[kAcross];
  __shared__ float4 corners[4 * kMostLevels * kMap / 4];
  auto& tile_v = shared.tile.v;
  auto& tile_rgb = shared.tile.rgb;
  auto& hats = shared.tile.hats;
  const int tile = blockIdx.x / groups, first_level = blockIdx.x % groups * kLevels;
  const int across = tiles_x.count();
  const Range x = range_of(tiles_x, tile % across, colors.x0, colors.width);
  const Range y = range_of(tiles_y, tile / across, colors.y0, colors.height);
  if (x.begin >= x.end || y.begin >= y.end) return;
  const int width = x.end - x.begin, k = threadIdx.x % kMap, own = threadIdx.x / kMap, c = k / 4, j = k % 4;
  if (first_level == 0) load_corners(grid, x.cell, y.cell, corners);
  for (int p = threadIdx.x; p < width; p += blockDim.x) {
    x_parts[p] = along(x.begin + p, colors.view_width, grid.columns).part;
  }
  float moments[kLevels][kMoments] = {};
  for (int top = y.begin; top < y.end; top += kRows) {
    const int rows = min(kRows, y.end - top);
    __syncthreads();
    for (int i = threadIdx.x; i < rows * width; i += blockDim.x) {
      const int row = i / width, p = i % width;
      const int64_t at = 3 * (int64_t{top - colors.y0 + row} * colors.width + x.begin - colors.x0 + p);
      float v[3], rgb[3];
#pragma unroll
      for (int channel = 0; channel < 3; ++channel) {
        tile_v[row][3 * p + channel] = v[channel] = v_out[at + channel];
        tile_rgb[row][3 * p + channel] = rgb[channel] = colors.rgb[at + channel];
      }
      const Along z = along_gray(gray_of(rgb), grid.levels);
      if (first_level == 0) {
        const float part_y = along(top + row, colors.view_height, grid.rows).part;
        const Maps maps = maps_at(corners, grid.levels, x_parts[p], part_y, z.cell);
        color_gradient(maps, z, grid.levels, rgb, v, v_rgb + at);
      }
      float hat[kLevels];
#pragma unroll
      for (int l = 0; l < kLevels; ++l) {
        const int above = first_level + l - z.cell;
        hat[l] = above == 0 ? 1.0f - z.part : above == 1 ? z.part : 0.0f;
      }
      hats[row][2 * p] = {hat[0], hat[1], hat[2], hat[3]};
      hats[row][2 * p + 1] = {hat[4], hat[5], hat[6], hat[7]};
    }
    __syncthreads();
    if (own >= rows) continue;
    float plain[kLevels] = {}, by_x[kLevels] = {};
    for (int p = 0; p < width; ++p) {
      const float value = tile_v[own][3 * p + c] * (j < 3 ? tile_rgb[own][3 * p + j] : 1.0f);
      const float value_x = value * x_parts[p];
      const float4 low = hats[own][2 * p], high = hats[own][2 * p + 1];
      const float hat[kLevels] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int l = 0; l < kLevels; ++l) {
        plain[l] += hat[l] * value;
        by_x[l] += hat[l] * value_x;
      }
    }
    const float part = along(top + own, colors.view_height, grid.rows).part;
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      moments[l][0] += plain[l];
      moments[l][1] += by_x[l];
      moments[l][2] += part * plain[l];
      moments[l][3] += part * by_x[l];
    }
  }
  __syncthreads();
#pragma unroll
  for (int l = 0; l < kLevels; ++l) {
    shared.moments[l][threadIdx.x] = {moments[l][0], moments[l][1], moments[l][2], moments[l][3]};
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kMap * kLevels; i += blockDim.x) {
    const int of = i % kMap, level = first_level + i / kMap;
    if (level >= grid.levels) continue;
    float all = 0.0f, right = 0.0f, below = 0.0f, both = 0.0f;
    for (int row = 0; row < kRows; ++row) {
      const float4 sum = shared.moments[i / kMap][kMap * row + of];
      all += sum.x, right += sum.y, below += sum.z, both += sum.w;
    }
    const float sums[2][2] = {{all - right - below + both, right - both}, {below - both, both}};
    float* const to = v_grid + (int64_t{of} * grid.levels + level) * grid.rows * grid.columns;
    for (int a = 0; a < 2; ++a) {
      for (int b = 0; b < 2; ++b) {
        const bool inside = y.cell + a < grid.rows && x.cell + b < grid.columns;
        if (inside && sums[a][b] != 0.0f) atomicAdd(to + (y.cell + a) * grid.columns + x.cell + b, sums[a][b]);
      }
    }
  }
}

// A thread is a value of the grids. Sums of squares of differences have differences as their gradient, twice.
__global__ void __launch_bounds__(kThreads)
    variation_backward_kernel(const float* __restrict__ grids, int64_t count, int levels, int rows, int columns,
                              float weight, float* __restrict__ v_grids) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= count) return;
  const float own = grids[at];
  float sum = 0.0f;
  int64_t step = 1;
  int left = int(at % (int64_t{levels} * rows * columns));  // in its map
  for (const int nodes : {columns, rows, levels}) {
    const int place = left % nodes;
    if (nodes > 1) {
      const float pairs = float(count) * (float(nodes - 1) / float(nodes));
      const float before = place > 0 ? own - grids[at - step] : 0.0f;
      const float after = place + 1 < nodes ? grids[at + step] - own : 0.0f;
      sum += (before - after) / pairs;
    }
    step *= nodes;
    left /= nodes;
  }
  v_grids[at] = 2.0f * weight * sum;
}

// The tiles of a view.
Tiles tiles_across(const BilateralGrid& grid, const MappedColors& colors) {
  return Tiles(colors.view_width, grid.columns, kAcross);
}
Tiles tiles_down(const BilateralGrid& grid, const MappedColors& colors) {
  return Tiles(colors.view_height, grid.rows, kDown);
}

}  // namespace

cudaError_t bilateral_map_launch(const BilateralGrid& grid, const MappedColors& colors, float* out, cudaStream_t stream) {
  if (colors.width * colors.height == 0) return cudaSuccess;
  if (grid.levels > kMostLevels) return cudaErrorInvalidValue;
  const Tiles x = tiles_across(grid, colors), y = tiles_down(grid, colors);
  const int blocks = x.count() * y.count();
  map_kernel<<<blocks, kThreads, 0, stream>>>(grid, colors, x, y, out);
  return cudaGetLastError();
}

cudaError_t bilateral_map_backward_launch(const BilateralGrid& grid, const MappedColors& colors, const float* v_out,
                                          float* v_grid, float* v_rgb, cudaStream_t stream) {
  if (colors.width * colors.height == 0) return cudaSuccess;
  if (grid.levels > kMostLevels) return cudaErrorInvalidValue;
  const Tiles x = tiles_across(grid, colors), y = tiles_down(grid, colors);
  const int groups = (grid.levels + kLevels - 1) / kLevels, blocks = x.count() * y.count() * groups;
  backward_kernel<<<blocks, kSums, 0, stream>>>(grid, colors, v_out, x, y, groups, v_grid, v_rgb);
  return cudaGetLastError();
}

cudaError_t bilateral_variation_backward_launch(const float* grids, int views, int levels, int rows, int columns,
                                                float weight, float* v_grids, cudaStream_t stream) {
  const int64_t count = int64_t{views} * kMap * levels * rows * columns;
  if (count == 0) return cudaSuccess;
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  variation_backward_kernel<<<blocks, kThreads, 0, stream>>>(grids, count, levels, rows, columns, weight, v_grids);
  return cudaGetLastError();
}

}  // namespace nsmg
