// Vectors as wide as the machine has them, through the compiler's vector extension (GCC and Clang, any architecture).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../common/exp.h"

namespace ns_multigpu {

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

inline Vec<float> exp_nonpositive(Vec<float> x) { return exp_nonpositive_f32<Vec<float>, Lanes<float>::Ids>(x); }

inline Vec<double> exp_nonpositive(Vec<double> x) {
  Vec<double> y;
  for (int lane = 0; lane < Lanes<double>::kWidth; ++lane) y[lane] = std::exp(x[lane]);
  return y;
}

template <typename V>
inline V absolute(V x) {
  return x < 0 ? -x : x;
}

// Sum over the lanes by halving, in an order that never changes.
template <typename T>
inline T lane_sum(Vec<T> v) {
  T lanes[Lanes<T>::kWidth];
  std::memcpy(lanes, &v, sizeof(v));
  for (int half = Lanes<T>::kWidth / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

}  // namespace ns_multigpu
