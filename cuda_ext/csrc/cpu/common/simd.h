// Vectors as wide as the machine has them, through the compiler's vector extension (GCC and Clang, any architecture).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu/common/exp.h"

namespace nsmg {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <typename T>
struct Lanes;

template <>
struct Lanes<float> {
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Ids __attribute__((vector_size(kVectorBytes)));
  using Id = int32_t;
  static constexpr int kWidth = kVectorBytes / 4;
};

template <>
struct Lanes<double> {
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Ids __attribute__((vector_size(kVectorBytes)));
  using Id = int64_t;
  static constexpr int kWidth = kVectorBytes / 8;
};

template <typename T>
using Vec = typename Lanes<T>::Vec;

template <typename T>
inline Vec<T> load(const T* anywhere) {
  Vec<T> v;
  std::memcpy(&v, anywhere, sizeof(v));
  return v;
}

template <typename T>
inline void store(T* anywhere, Vec<T> v) {
  std::memcpy(anywhere, &v, sizeof(v));
}

inline constexpr int32_t sign_bit(float) { return INT32_MIN; }
inline constexpr int64_t sign_bit(double) { return INT64_MIN; }

template <typename T>
inline Vec<T> absolute(Vec<T> x) {
  return (Vec<T>)((typename Lanes<T>::Ids)x & ~sign_bit(T()));
}

template <typename T>
inline Vec<T> minus_absolute(Vec<T> x) {
  return (Vec<T>)((typename Lanes<T>::Ids)x | sign_bit(T()));
}

// exp(-x) where 0 <= x <= 80, otherwise zero: for all that a splat's alpha needs.
inline Vec<float> exp_minus(Vec<float> x) {
  // As unsigned numbers the bits of negative floats and NaN are greater than those of 80: one comparison does it all.
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  const Vec<float> y = exp_nonpositive_f32<Vec<float>, Lanes<float>::Ids>(-x);
  return (Bits)x <= 0x42a00000u ? y : Vec<float>{};
}

inline Vec<double> exp_minus(Vec<double> x) {
  Vec<double> y{};
  for (int lane = 0; lane < Lanes<double>::kWidth; ++lane)
    if (x[lane] >= 0 && x[lane] <= 80) y[lane] = std::exp(-x[lane]);
  return y;
}

// Half of a transpose: where lane & kHalf is 0 the sum of a's two lanes that differ in that bit, otherwise of b's.
template <typename T, int kHalf, size_t... kLane>
inline Vec<T> fold_pairs(Vec<T> a, Vec<T> b, std::index_sequence<kLane...>) {
  constexpr size_t kWidth = sizeof...(kLane), kBit = kHalf;
#if defined(__clang__)
  return __builtin_shufflevector(a, b, int(kLane & kBit ? kWidth + kLane : kLane)...) +
         __builtin_shufflevector(a, b, int(kLane & kBit ? kWidth + (kLane ^ kBit) : kLane ^ kBit)...);
#else
  using Ids = typename Lanes<T>::Ids;
  using Id = typename Lanes<T>::Id;
  return __builtin_shuffle(a, b, Ids{Id(kLane & kBit ? kWidth + kLane : kLane)...}) +
         __builtin_shuffle(a, b, Ids{Id(kLane & kBit ? kWidth + (kLane ^ kBit) : kLane ^ kBit)...});
#endif
}

// Overwrites vectors[0] with the sums over the lanes of vectors[0..kWidth): the sum of vector k in lane k. The order of
// additions never changes.
template <typename T, int kHalf = Lanes<T>::kWidth / 2>
inline void sum_lanes(Vec<T>* vectors) {
  for (int k = 0; k < kHalf; ++k)
    vectors[k] = fold_pairs<T, kHalf>(vectors[k], vectors[k + kHalf], std::make_index_sequence<Lanes<T>::kWidth>{});
  if constexpr (kHalf > 1) sum_lanes<T, kHalf / 2>(vectors);
}

}  // namespace nsmg
