// What a step is served from tables that its host fills ahead (take_lines, show_patches, keep_line): which line is counted
// on the device, so that one CUDA graph serves step after step. On the given stream, without a wait.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace nsmg {

inline constexpr int kMostTables = 4;
inline constexpr int kPatchesPerLaunch = 64;  // within the 4 KB of kernel parameters

// `width` words of 4 bytes a line. The table may lie in page-locked memory of the host.
struct QueuedTable {
  const int32_t* lines;
  int32_t* into;
  int width;
};

struct QueuedTables {
  QueuedTable tables[kMostTables];
  int count, lines;
};

// Line `at` of each table to where it is wanted; nothing where there is no such line.
cudaError_t take_lines_launch(const QueuedTables& tables, const int64_t* at, cudaStream_t stream);

// line [width] becomes line `at` of the table [lines, width], if there is one; then `at` is one more.
cudaError_t keep_line_launch(const float* line, float* table, int lines, int width, int64_t* at, cudaStream_t stream);

// A rectangle of an image, in bytes: `rows` parts of `row_bytes`, the first at `from` of the image and at `to` of where
// they are put, one behind the other.
struct ShownPatch {
  int64_t row_bytes, from, to;
  int rows;
  int place;  // whose image: of those that are chosen
};

struct Shown {
  const uint8_t* images;
  uint8_t* pictures;
  const int32_t* chosen;  // in device memory: the image of each place
  int64_t image_bytes, row_bytes;
  int images_count;
};

cudaError_t show_patches_launch(const Shown& shown, const ShownPatch* host_patches, int count, cudaStream_t stream);

}  // namespace nsmg
