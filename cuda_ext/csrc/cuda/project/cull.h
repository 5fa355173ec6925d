// Finds the rows that may be seen, in the order (view, point), without reading anything back.
#pragma once

#include "cuda/common/rows.h"

namespace nsmg {

struct CullInputs {
  const float *means, *scales, *opacities;  // [N, 3], [N, 3], [N]
  Cameras cameras;
  int intrinsics_rows;  // of a view: 3, or 7 with lenses
  const int64_t *sizes, *rects;  // on the host: 2 and 4 numbers a view
  int points, views;
  float eps2d;
};

constexpr int kCullPoints = 1024;  // a block's
constexpr int kCullWords = kCullPoints / 32;

// Scratch memory of `cull_mark`, for views * groups_of(points, kCullPoints) parts:
//   masks [parts * kCullWords]: one bit a point; counts [parts + 1].
// Afterwards the exclusive sum of `counts`, with the number of rows behind it, goes to `cull_write`.
cudaError_t cull_mark(const CullInputs& in, uint32_t* masks, int64_t* counts, cudaStream_t stream);

// The exclusive sum of `count` numbers. With temp == nullptr only says in `bytes` how much scratch memory it needs.
cudaError_t exclusive_sum(void* temp, size_t& bytes, const int64_t* in, int64_t* out, int count, cudaStream_t stream);

// Writes the ids of all rows.
cudaError_t cull_write(const uint32_t* masks, const int64_t* offsets, int points, int views, int* view_ids,
                       int* point_ids, cudaStream_t stream);

}  // namespace nsmg
