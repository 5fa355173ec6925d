// The words of a row and of its gradients. Nothing may be contracted to fused multiply-adds here: the CPU's bits are
// those of single operations.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/exchange/row_columns.h"

namespace nsmg {

constexpr uint32_t kOne = 127u << 23;  // 1.0f, bit for bit
constexpr int kHalfRow = 9;            // words of a rounded row of 3D Gaussians

// Words of a row: its columns' numbers, and two of radii and view.
template <typename Row>
constexpr int kFullRow = Row::kNumbers + 2;

template <typename Row>
struct RowNumbers {
  float values[Row::kNumbers];
  int2 radii;
  int view;
};

__device__ __forceinline__ uint32_t bits(float x) { return __float_as_uint(x); }

// 28 bits of a radius, and 4 of the view.
__device__ __forceinline__ uint32_t radius_word(int radius, int view_bits) {
  return ((bits(float(radius)) - kOne) & 0xfffffffu) | uint32_t(view_bits & 15) << 28;
}

__device__ __forceinline__ int radius_of(uint32_t word) {
  return int(__uint_as_float((word & 0xfffffffu) + kOne));
}

// The exponent of the power of two by which the largest of the numbers comes to lie in 2^14 to 2^15, from the largest of
// their bits without signs.
__device__ __forceinline__ int scale_of(uint32_t most) {
  const int scale = 14 + 127 - int(most >> 23);
  return scale < 126 ? scale : 126;
}

__device__ __forceinline__ uint32_t magnitude(float x) { return bits(x) & 0x7fffffffu; }
__device__ __forceinline__ uint32_t larger_of(uint32_t a, uint32_t b) { return a > b ? a : b; }
__device__ __forceinline__ float power(int exponent) { return __uint_as_float(uint32_t(exponent + 127) << 23); }

__device__ __forceinline__ uint32_t half_bits(float x) { return __half_as_ushort(__float2half_rn(x)); }
__device__ __forceinline__ float low_half(uint32_t word) { return __half2float(__ushort_as_half(word & 0xffffu)); }
__device__ __forceinline__ float high_half(uint32_t word) { return __half2float(__ushort_as_half(word >> 16)); }
__device__ __forceinline__ uint32_t halfs(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
__device__ __forceinline__ uint32_t with_scales(float value, int one, int other) {
  return half_bits(value) | uint32_t(one & 0xff) << 16 | uint32_t(other & 0xff) << 24;
}
__device__ __forceinline__ int first_scale(uint32_t word) { return int8_t(word >> 16); }
__device__ __forceinline__ int second_scale(uint32_t word) { return int8_t(word >> 24); }

__device__ __forceinline__ float root(float x) { return __fsqrt_rn(x > 0.0f ? x : 0.0f); }

template <typename Row>
__device__ __forceinline__ void full_row(const RowNumbers<Row>& row, uint32_t* words) {
#pragma unroll
  for (int k = 0; k < Row::kNumbers; ++k) words[k] = bits(row.values[k]);
  words[Row::kNumbers] = radius_word(row.radii.x, row.view);
  words[Row::kNumbers + 1] = radius_word(row.radii.y, row.view >> 4);
}

__device__ __forceinline__ void half_row(const RowNumbers<GaussianColumns>& row, uint32_t* words) {
  const float* v = row.values;
  const float a = root(v[2]), b = a > 0.0f ? __fdiv_rn(v[3], a) : 0.0f;
  const float c = root(__fsub_rn(v[4], __fmul_rn(b, b)));
  const int of_conic = scale_of(larger_of(larger_of(magnitude(a), magnitude(b)), magnitude(c)));
  const int of_color = scale_of(larger_of(larger_of(magnitude(v[6]), magnitude(v[7])), magnitude(v[8])));
  const float conic = power(of_conic), color = power(of_color);
  words[0] = bits(v[0]);
  words[1] = bits(v[1]);
  words[2] = bits(v[9]);
  words[3] = radius_word(row.radii.x, row.view);
  words[4] = radius_word(row.radii.y, row.view >> 4);
  words[5] = halfs(a * conic, b * conic);
  words[6] = halfs(c * conic, v[5]);
  words[7] = halfs(v[6] * color, v[7] * color);
  words[8] = with_scales(v[8] * color, of_conic, of_color);
}

template <typename Row>
__device__ __forceinline__ RowNumbers<Row> read_full_row(const uint32_t* words) {
  constexpr int kEnd = Row::kNumbers;
  RowNumbers<Row> row;
#pragma unroll
  for (int k = 0; k < kEnd; ++k) row.values[k] = __uint_as_float(words[k]);
  row.radii = make_int2(radius_of(words[kEnd]), radius_of(words[kEnd + 1]));
  row.view = int(words[kEnd] >> 28 | words[kEnd + 1] >> 28 << 4);
  return row;
}

__device__ __forceinline__ RowNumbers<GaussianColumns> read_half_row(const uint32_t* words) {
  RowNumbers<GaussianColumns> row;
  const float conic = power(-first_scale(words[8])), color = power(-second_scale(words[8]));
  const float a = low_half(words[5]) * conic, b = high_half(words[5]) * conic, c = low_half(words[6]) * conic;
  row.values[0] = __uint_as_float(words[0]);
  row.values[1] = __uint_as_float(words[1]);
  row.values[2] = __fmul_rn(a, a);
  row.values[3] = __fmul_rn(a, b);
  row.values[4] = __fadd_rn(__fmul_rn(b, b), __fmul_rn(c, c));
  row.values[5] = high_half(words[6]);
  row.values[6] = low_half(words[7]) * color;
  row.values[7] = high_half(words[7]) * color;
  row.values[8] = low_half(words[8]) * color;
  row.values[9] = __uint_as_float(words[2]);
  row.radii = make_int2(radius_of(words[3]), radius_of(words[4]));
  row.view = int(words[3] >> 28 | words[4] >> 28 << 4);
  return row;
}

// Words of so many gradients: 9, one more of a depth and two more of absolute ones.
constexpr int half_words(int gradients) { return 5 + (gradients - 8) / 2; }

template <int kCount>
__device__ __forceinline__ void half_gradients(const float* v, uint32_t* words) {
  uint32_t conics = 0, rest = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    uint32_t& most = k >= 2 && k < 5 ? conics : rest;
    most = larger_of(most, magnitude(v[k]));
  }
  const int of_conic = scale_of(conics), of_rest = scale_of(rest);
  const float conic = power(of_conic), other = power(of_rest);
  words[0] = halfs(v[0] * other, v[1] * other);
  words[1] = halfs(v[2] * conic, v[3] * conic);
  words[2] = halfs(v[4] * conic, v[5] * other);
  words[3] = halfs(v[6] * other, v[7] * other);
  words[4] = with_scales(v[8] * other, of_conic, of_rest);
#pragma unroll
  for (int k = 9; k < kCount; k += 2) {
    words[5 + (k - 9) / 2] = halfs(v[k] * other, k + 1 < kCount ? v[k + 1] * other : 0.0f);
  }
}

template <int kCount>
__device__ __forceinline__ void read_half_gradients(const uint32_t* words, float* v) {
  const float conic = power(-first_scale(words[4])), other = power(-second_scale(words[4]));
  v[0] = low_half(words[0]) * other;
  v[1] = high_half(words[0]) * other;
  v[2] = low_half(words[1]) * conic;
  v[3] = high_half(words[1]) * conic;
  v[4] = low_half(words[2]) * conic;
  v[5] = high_half(words[2]) * other;
  v[6] = low_half(words[3]) * other;
  v[7] = high_half(words[3]) * other;
  v[8] = low_half(words[4]) * other;
#pragma unroll
  for (int k = 9; k < kCount; ++k) {
    const uint32_t word = words[5 + (k - 9) / 2];
    v[k] = ((k - 9) % 2 == 0 ? low_half(word) : high_half(word)) * other;
  }
}

}  // namespace nsmg
