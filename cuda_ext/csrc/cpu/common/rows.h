// Rows, the (view, point) hits that the operators work on: checks, the rows of each view, and chunks for the threads.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace nsmg {

// Work is cut into chunks of this many rows whatever the number of threads, and sums are taken chunk by chunk in order:
// results do not depend on the number of threads.
constexpr int64_t kChunk = 1024;

struct Chunk {
  int64_t view, begin, end;  // rows
};

// Where each view's rows start; V + 1 numbers, the last of which is where padding starts: rows at the end whose point is
// -1 and whose view is the last. Throws unless rows are sorted by (view, point) without repetition and all ids are in
// range: the backward kernels add to a point's gradient without atomics because of that.
inline std::vector<int64_t> view_starts(const at::Tensor& view_ids, const at::Tensor& point_ids, int64_t views,
                                        int64_t points) {
  TORCH_CHECK_VALUE(view_ids.scalar_type() == at::kInt && point_ids.scalar_type() == at::kInt,
                    "view_ids and point_ids must be int32, not ", view_ids.scalar_type(), " and ",
                    point_ids.scalar_type(), ".");
  TORCH_CHECK_VALUE(view_ids.dim() == 1 && view_ids.sizes() == point_ids.sizes(),
                    "view_ids and point_ids must both be [M], not ", view_ids.sizes(), " and ", point_ids.sizes(), ".");
  const int32_t* view = view_ids.const_data_ptr<int32_t>();
  const int32_t* point = point_ids.const_data_ptr<int32_t>();
  const int32_t padding_view = static_cast<int32_t>(std::max<int64_t>(views - 1, 0));
  int64_t rows = view_ids.numel();
  while (rows > 0 && point[rows - 1] == -1 && view[rows - 1] == padding_view) --rows;
  bool bad = false;
  for (int64_t i = 0; i < rows; ++i) {
    bad |= (view[i] < 0) | (view[i] >= views) | (point[i] < 0) | (point[i] >= points);
  }
  TORCH_CHECK_INDEX(!bad, "a row names a view or point that does not exist (there are ", views, " views and ", points,
                    " points).");
  for (int64_t i = 1; i < rows; ++i) {
    bad |= (view[i - 1] > view[i]) | ((view[i - 1] == view[i]) & (point[i - 1] >= point[i]));
  }
  TORCH_CHECK_VALUE(!bad, "rows must be sorted by (view, point) and name each pair once, as cull returns them.");
  std::vector<int64_t> starts(views + 1);
  for (int64_t v = 0; v <= views; ++v) {
    starts[v] = std::lower_bound(view, view + rows, v) - view;
  }
  return starts;
}

// The chunks of views [first, last).
inline std::vector<Chunk> chunks_of(const std::vector<int64_t>& starts, int64_t first, int64_t last) {
  std::vector<Chunk> chunks;
  for (int64_t v = first; v < last; ++v) {
    for (int64_t begin = starts[v]; begin < starts[v + 1]; begin += kChunk) {
      chunks.push_back({v, begin, std::min(begin + kChunk, starts[v + 1])});
    }
  }
  return chunks;
}

// Calls f(index, chunk) for every chunk, on all threads.
template <typename F>
void for_chunks(const std::vector<Chunk>& chunks, const F& f) {
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      f(i, chunks[i]);
    }
  });
}

// Zeroes the padding's part of an output that has a line a row.
inline void zero_padding(const at::Tensor& output, const std::vector<int64_t>& starts) {
  output.narrow(0, starts.back(), output.size(0) - starts.back()).zero_();
}

// A contiguous tensor of this shape and dtype, or an error that names it. A size of -1 accepts any.
inline at::Tensor checked(const at::Tensor& tensor, const char* name, at::IntArrayRef shape, at::ScalarType dtype) {
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = shape[i] < 0 || tensor.size(static_cast<int64_t>(i)) == shape[i];
  }
  TORCH_CHECK_VALUE(fits, name, " must have the shape ", shape, " (-1: any size), not ", tensor.sizes(), ".");
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " must be ", dtype, " like means, not ", tensor.scalar_type(),
                   ".");
  return tensor.contiguous();
}

}  // namespace nsmg
