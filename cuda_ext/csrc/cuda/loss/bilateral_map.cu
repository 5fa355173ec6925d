// A thread a pixel for colours and their gradient: neighbours read the same corners of the grid, which stays in cache.
//
// The grid's gradient is a sum over pixels that all want the same few addresses. So a block takes pixels of one of the
// grid's cells. A thread has one of the maps' numbers, and sums it over a row in registers: by level, and for each level
// its moments by the place in the cell, of which the four corners follow. The block adds these to memory once.
#include "cuda/loss/bilateral_map.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kMap = 12;   // numbers of an affine map, [3, 4]
constexpr int kAcross = 32, kDown = 64;  // pixels of a tile, at most
constexpr int kRows = 16;                // of a tile, at once: each is a group's of kMap threads
constexpr int kSums = kMap * kRows;      // threads that sum
constexpr int kLevels = 8;               // that a thread sums
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

// The maps below and above a pixel's gray.
struct Maps {
  float low[kMap], high[kMap];
  float part;
};

__device__ __forceinline__ Maps maps_at(const BilateralGrid& grid, const MappedColors& colors, int pixel, float gray) {
  const Along x = along(colors.x0 + pixel % colors.width, colors.view_width, grid.columns);
  const Along y = along(colors.y0 + pixel / colors.width, colors.view_height, grid.rows);
  const Along z = along_gray(gray, grid.levels);
  const int right = x.cell + 1 < grid.columns ? 1 : 0, below = y.cell + 1 < grid.rows ? grid.columns : 0;
  const float w11 = x.part * y.part, w01 = x.part - w11, w10 = y.part - w11, w00 = 1.0f - x.part - w10;
  const int64_t level = int64_t{grid.rows} * grid.columns, step = z.cell + 1 < grid.levels ? level : 0;
  Maps maps;
  maps.part = z.part;
#pragma unroll
  for (int k = 0; k < kMap; ++k) {
    const float* at = grid.values + (k * grid.levels + z.cell) * level + y.cell * grid.columns + x.cell;
    maps.low[k] = w00 * at[0] + w01 * at[right] + w10 * at[below] + w11 * at[below + right];
    at += step;
    maps.high[k] = w00 * at[0] + w01 * at[right] + w10 * at[below] + w11 * at[below + right];
  }
  return maps;
}

__global__ void __launch_bounds__(kThreads)
    map_kernel(const BilateralGrid grid, const MappedColors colors, float* __restrict__ out) {
  const int pixel = blockIdx.x * kThreads + threadIdx.x;
  if (pixel >= colors.width * colors.height) return;
  const float* const rgb = colors.rgb + int64_t{3} * pixel;
  const Maps maps = maps_at(grid, colors, pixel, gray_of(rgb));
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    float map[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      map[j] = maps.low[4 * c + j] + maps.part * (maps.high[4 * c + j] - maps.low[4 * c + j]);
    }
    out[int64_t{3} * pixel + c] = map[0] * rgb[0] + map[1] * rgb[1] + map[2] * rgb[2] + map[3];
  }
}

__global__ void __launch_bounds__(kThreads)
    colors_backward_kernel(const BilateralGrid grid, const MappedColors colors, const float* __restrict__ v_out,
                           float* __restrict__ v_rgb) {
  const int pixel = blockIdx.x * kThreads + threadIdx.x;
  if (pixel >= colors.width * colors.height) return;
  const float* const rgb = colors.rgb + int64_t{3} * pixel;
  const float gray = gray_of(rgb);
  const Maps maps = maps_at(grid, colors, pixel, gray);
  float v[3] = {}, by_gray = 0.0f;
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    const float v_c = v_out[int64_t{3} * pixel + c];
    float slope = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float difference = maps.high[4 * c + j] - maps.low[4 * c + j];
      slope += difference * (j < 3 ? rgb[j] : 1.0f);
      if (j < 3) v[j] += v_c * (maps.low[4 * c + j] + maps.part * difference);
    }
    by_gray += v_c * slope;
  }
  // As in torch, places at the grid's ends and beyond have no slope.
  by_gray = gray > 0.0f && gray < 1.0f ? by_gray * float(grid.levels - 1) : 0.0f;
  v_rgb[int64_t{3} * pixel] = v[0] + kRed * by_gray;
  v_rgb[int64_t{3} * pixel + 1] = v[1] + kGreen * by_gray;
  v_rgb[int64_t{3} * pixel + 2] = v[2] + kBlue * by_gray;
}

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
  int count() const { return cells_of(pixels, nodes) * in_cell; }
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

__global__ void __launch_bounds__(kSums)
    grid_backward_kernel(const BilateralGrid grid, const MappedColors colors, const float* __restrict__ v_out,
                         const Tiles tiles_x, const Tiles tiles_y, int groups, float* __restrict__ v_grid) {
  __shared__ float v_tile[kRows][3 * kAcross], rgb_tile[kRows][3 * kAcross];
  __shared__ float4 hats[kRows][kAcross][kLevels / 4];  // of a pixel, the weights of levels
  __shared__ float x_parts[kAcross], sums[kMap * kLevels * kMoments];
  const int tile = blockIdx.x / groups, first_level = blockIdx.x % groups * kLevels;
  const int across = cells_of(tiles_x.pixels, tiles_x.nodes) * tiles_x.in_cell;
  const Range x = range_of(tiles_x, tile % across, colors.x0, colors.width);
  const Range y = range_of(tiles_y, tile / across, colors.y0, colors.height);
  if (x.begin >= x.end || y.begin >= y.end) return;
  const int width = x.end - x.begin, k = threadIdx.x % kMap, own = threadIdx.x / kMap, c = k / 4, j = k % 4;
  for (int i = threadIdx.x; i < kMap * kLevels * kMoments; i += blockDim.x) sums[i] = 0.0f;
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
      for (int channel = 0; channel < 3; ++channel) {
        v_tile[row][3 * p + channel] = v_out[at + channel];
        rgb_tile[row][3 * p + channel] = colors.rgb[at + channel];
      }
      const Along z = along_gray(gray_of(rgb_tile[row] + 3 * p), grid.levels);
      float hat[kLevels];
#pragma unroll
      for (int l = 0; l < kLevels; ++l) {
        const int above = first_level + l - z.cell;
        hat[l] = above == 0 ? 1.0f - z.part : above == 1 ? z.part : 0.0f;
      }
      hats[row][p][0] = {hat[0], hat[1], hat[2], hat[3]};
      hats[row][p][1] = {hat[4], hat[5], hat[6], hat[7]};
    }
    __syncthreads();
    if (own >= rows) continue;
    float plain[kLevels] = {}, by_x[kLevels] = {};
    for (int p = 0; p < width; ++p) {
      const float value = v_tile[own][3 * p + c] * (j < 3 ? rgb_tile[own][3 * p + j] : 1.0f);
      const float value_x = value * x_parts[p];
      const float4 low = hats[own][p][0], high = hats[own][p][1];
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
#pragma unroll
  for (int l = 0; l < kLevels; ++l) {
#pragma unroll
    for (int m = 0; m < kMoments; ++m) atomicAdd(sums + (k * kLevels + l) * kMoments + m, moments[l][m]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kMap * kLevels; i += blockDim.x) {
    const int level = first_level + i % kLevels;
    if (level >= grid.levels) continue;
    const float all = sums[kMoments * i], right = sums[kMoments * i + 1];
    const float below = sums[kMoments * i + 2], both = sums[kMoments * i + 3];
    const float corners[2][2] = {{all - right - below + both, right - both}, {below - both, both}};
    float* const to = v_grid + (int64_t{i / kLevels} * grid.levels + level) * grid.rows * grid.columns;
    for (int a = 0; a < 2; ++a) {
      for (int b = 0; b < 2; ++b) {
        const bool inside = y.cell + a < grid.rows && x.cell + b < grid.columns;
        if (inside && corners[a][b] != 0.0f) atomicAdd(to + (y.cell + a) * grid.columns + x.cell + b, corners[a][b]);
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
  int64_t step = 1, left = at;
  for (const int nodes : {columns, rows, levels}) {
    const int place = int(left % nodes);
    if (nodes > 1) {
      const float pairs = float(count / nodes) * float(nodes - 1);
      const float before = place > 0 ? own - grids[at - step] : 0.0f;
      const float after = place + 1 < nodes ? grids[at + step] - own : 0.0f;
      sum += (before - after) / pairs;
    }
    step *= nodes;
    left /= nodes;
  }
  v_grids[at] = 2.0f * weight * sum;
}

int blocks_of(const MappedColors& colors) { return (colors.width * colors.height + kThreads - 1) / kThreads; }

}  // namespace

cudaError_t bilateral_map_launch(const BilateralGrid& grid, const MappedColors& colors, float* out, cudaStream_t stream) {
  if (colors.width * colors.height == 0) return cudaSuccess;
  map_kernel<<<blocks_of(colors), kThreads, 0, stream>>>(grid, colors, out);
  return cudaGetLastError();
}

cudaError_t bilateral_map_backward_launch(const BilateralGrid& grid, const MappedColors& colors, const float* v_out,
                                          float* v_grid, float* v_rgb, cudaStream_t stream) {
  if (colors.width * colors.height == 0) return cudaSuccess;
  colors_backward_kernel<<<blocks_of(colors), kThreads, 0, stream>>>(grid, colors, v_out, v_rgb);
  const cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  const Tiles x(colors.view_width, grid.columns, kAcross), y(colors.view_height, grid.rows, kDown);
  const int groups = (grid.levels + kLevels - 1) / kLevels, blocks = x.count() * y.count() * groups;
  grid_backward_kernel<<<blocks, kSums, 0, stream>>>(grid, colors, v_out, x, y, groups, v_grid);
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
