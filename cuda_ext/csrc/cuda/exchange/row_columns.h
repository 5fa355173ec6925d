// Columns of the rows that ranks exchange, as a type for each primitive: kernels are templates over them. A launch
// finds the type by the columns' widths, or by the places of gradients.
#pragma once

#include <cuda_runtime_api.h>

#include "common/columns.h"
#include "common/convex_pixel.h"
#include "common/surfel_pixel.h"

namespace nsmg {

inline constexpr int kMostColumns = 6;

using GaussianColumns = Columns<2, 3, 1, 3, 1>;  // means2d, conics, opacities, colors, depths
using SurfelColumns = SurfelTraits::RowColumns;
using ConvexColumns = ConvexTraits::RowColumns;

struct RowWidths {
  int at[kMostColumns];  // 0 behind the last column
};

// Quads of a record: the columns, radii x, y, view id and slot, then zeros. A power of two: a warp takes whole records.
template <typename Row>
constexpr int record_quads() {
  int quads = 1;
  while (4 * quads < Row::kNumbers + 4) quads *= 2;
  return quads;
}

// Calls f with the first of the types that fits.
template <typename... Types, typename Fits, typename F>
cudaError_t with_first(const Fits& fits, const F& f) {
  cudaError_t status = cudaErrorInvalidValue;
  static_cast<void>(((fits(Types{}) && (status = f(Types{}), true)) || ...));
  return status;
}

// Calls f with the columns that have these widths.
template <typename F>
cudaError_t with_columns(const RowWidths& widths, const F& f) {
  const auto fit = [&](auto columns) {
    bool all = true;
    for (int c = 0; c < kMostColumns; ++c) all &= widths.at[c] == (c < columns.kCount ? columns.width(c) : 0);
    return all;
  };
  return with_first<GaussianColumns, SurfelColumns, ConvexColumns>(fit, f);
}

// Gradients of a record that return to its owner: `kCount` numbers at place(k).
template <typename Row>
struct AllGradients {
  static constexpr bool kRounds = false;
  static constexpr int kQuads = record_quads<Row>(), kCount = Row::kNumbers;
  static constexpr int place(int k) { return k; }
};

// Of 3D Gaussians 9, one more of the depth and two more with absolute ones. They may be rounded to float16.
template <int kNumber>
struct SplatGradients {
  static constexpr bool kRounds = true;
  static constexpr int kQuads = record_quads<GaussianColumns>(), kCount = kNumber;
  static constexpr int place(int k) { return k < 9 || kNumber == 10 ? k : 12 - kNumber + k; }
};

// Returned numbers: their places [count] in records of so many floats, on the host.
struct Returned {
  int floats;
  const int64_t* places;
  int count;
};

// Calls f with the gradients that lie in these places.
template <typename F>
cudaError_t with_gradients(const Returned& returned, const F& f) {
  const auto fit = [&](auto gradients) {
    bool all = returned.floats == 4 * gradients.kQuads && returned.count == gradients.kCount;
    for (int k = 0; all && k < gradients.kCount; ++k) all = returned.places[k] == gradients.place(k);
    return all;
  };
  return with_first<SplatGradients<9>, SplatGradients<10>, SplatGradients<11>, SplatGradients<12>,
                    AllGradients<SurfelColumns>, AllGradients<ConvexColumns>>(fit, f);
}

#ifdef __CUDACC__

// Calls f(pointer, place) of each number of a row but the means, which are read and written as one float2.
template <typename Row, typename T, typename F>
__device__ __forceinline__ void each_number(T* const (&columns)[kMostColumns], int64_t row, const F& f) {
  typename Row::template Pointers<T> all;
#pragma unroll
  for (int c = 0; c < Row::kCount; ++c) all.at[c] = columns[c];
  Row::each(all, row, [&](T* at, int place) {
    if (place > 1) f(at, place);
  });
}

template <typename Row>
__device__ __forceinline__ void load_numbers(const float* const (&columns)[kMostColumns], int64_t row, float* numbers) {
  const float2 mean = reinterpret_cast<const float2*>(columns[0])[row];
  numbers[0] = mean.x, numbers[1] = mean.y;
  each_number<Row>(columns, row, [&](const float* at, int place) { numbers[place] = *at; });
}

template <typename Row>
__device__ __forceinline__ void store_numbers(float* const (&columns)[kMostColumns], int64_t row,
                                              const float* numbers) {
  reinterpret_cast<float2*>(columns[0])[row] = make_float2(numbers[0], numbers[1]);
  each_number<Row>(columns, row, [&](float* at, int place) { *at = numbers[place]; });
}

// Quad k of numbers, and back.
__device__ __forceinline__ float4 quad_of(const float* numbers, int k) {
  return make_float4(numbers[4 * k], numbers[4 * k + 1], numbers[4 * k + 2], numbers[4 * k + 3]);
}
__device__ __forceinline__ void put_quad(const float4& quad, float* numbers, int k) {
  numbers[4 * k] = quad.x, numbers[4 * k + 1] = quad.y, numbers[4 * k + 2] = quad.z, numbers[4 * k + 3] = quad.w;
}

#endif

}  // namespace nsmg
