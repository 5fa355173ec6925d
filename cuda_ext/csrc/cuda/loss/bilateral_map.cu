// A thread a pixel for colours and their gradient: neighbours read the same corners of the grid, which stays in cache.
//
// The grid's gradient is a sum over pixels that all want the same few addresses. So a block takes a tile of pixels that
// lies in two by two of the grid's cells at most, a thread has one of the maps' numbers at one level of gray, sums it
// over the tile in registers, for three by three corners, and adds these to memory once.
#include "cuda/loss/bilateral_map.h"

namespace nsmg {
namespace {

constexpr int kThreads = 256;
constexpr int kMap = 12;   // numbers of an affine map, [3, 4]
constexpr int kTile = 32;  // pixels of a tile's side, at most
constexpr int kCorners = 3;
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

// The pixels of a tile's side that lie in two cells at most.
int side_of_tile(int pixels, int nodes) {
  if (nodes < 2 || pixels < 2) return kTile;
  const int cell = (pixels - 1) / (nodes - 1);
  return cell < 1 ? 1 : cell > kTile ? kTile : cell;
}

// A thread is a number of the maps at a level: 12 * levels threads.
__global__ void grid_backward_kernel(const BilateralGrid grid, const MappedColors colors,
                                     const float* __restrict__ v_out, int tile_width, int tile_height, int tiles_across,
                                     float* __restrict__ v_grid) {
  __shared__ float v_row[3 * kTile], rgb_row[3 * kTile], part_row[kTile], weights[kTile * kCorners];
  __shared__ int level_row[kTile];
  const int first_x = blockIdx.x % tiles_across * tile_width, first_y = blockIdx.x / tiles_across * tile_height;
  const int width = min(tile_width, colors.width - first_x), height = min(tile_height, colors.height - first_y);
  const int left = along(colors.x0 + first_x, colors.view_width, grid.columns).cell;
  const int top = along(colors.y0 + first_y, colors.view_height, grid.rows).cell;
  const int k = threadIdx.x % kMap, level = threadIdx.x / kMap, c = k / 4, j = k % 4;
  for (int p = threadIdx.x; p < width; p += blockDim.x) {
    const Along x = along(colors.x0 + first_x + p, colors.view_width, grid.columns);
    const int corner = x.cell - left;
    weights[kCorners * p] = corner == 0 ? 1.0f - x.part : 0.0f;
    weights[kCorners * p + 1] = corner == 0 ? x.part : 1.0f - x.part;
    weights[kCorners * p + 2] = corner == 0 ? 0.0f : x.part;
  }
  float sums[kCorners][kCorners] = {};
  for (int row = 0; row < height; ++row) {
    __syncthreads();
    const int64_t first = int64_t{first_y + row} * colors.width + first_x;
    for (int p = threadIdx.x; p < 3 * width; p += blockDim.x) {
      v_row[p] = v_out[3 * first + p];
      rgb_row[p] = colors.rgb[3 * first + p];
    }
    __syncthreads();
    for (int p = threadIdx.x; p < width; p += blockDim.x) {
      const Along z = along_gray(gray_of(rgb_row + 3 * p), grid.levels);
      level_row[p] = z.cell;
      part_row[p] = z.part;
    }
    __syncthreads();
    float of_row[kCorners] = {};
    for (int p = 0; p < width; ++p) {
      const int above = level - level_row[p];
      if (above != 0 && above != 1) continue;
      const float by_gray = above == 0 ? 1.0f - part_row[p] : part_row[p];
      const float value = by_gray * v_row[3 * p + c] * (j < 3 ? rgb_row[3 * p + j] : 1.0f);
#pragma unroll
      for (int b = 0; b < kCorners; ++b) of_row[b] += value * weights[kCorners * p + b];
    }
    const Along y = along(colors.y0 + first_y + row, colors.view_height, grid.rows);
    const bool same = y.cell == top;
    const float by_row[kCorners] = {same ? 1.0f - y.part : 0.0f, same ? y.part : 1.0f - y.part, same ? 0.0f : y.part};
#pragma unroll
    for (int a = 0; a < kCorners; ++a) {
#pragma unroll
      for (int b = 0; b < kCorners; ++b) sums[a][b] += by_row[a] * of_row[b];
    }
  }
  float* const to = v_grid + (int64_t{k} * grid.levels + level) * grid.rows * grid.columns;
#pragma unroll
  for (int a = 0; a < kCorners; ++a) {
#pragma unroll
    for (int b = 0; b < kCorners; ++b) {
      const bool inside = top + a < grid.rows && left + b < grid.columns;
      if (inside && sums[a][b] != 0.0f) atomicAdd(to + (top + a) * grid.columns + left + b, sums[a][b]);
    }
  }
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
  const int width = side_of_tile(colors.view_width, grid.columns), height = side_of_tile(colors.view_height, grid.rows);
  const int across = (colors.width + width - 1) / width, tiles = across * ((colors.height + height - 1) / height);
  const int threads = kMap * grid.levels;
  grid_backward_kernel<<<tiles, threads, 0, stream>>>(grid, colors, v_out, width, height, across, v_grid);
  return cudaGetLastError();
}

}  // namespace nsmg
