// Scalars for code that runs on the host and, compiled by nvcc, on the device. Selections instead of branches, so that
// a loop over rows that calls these stays one the compiler can vectorise.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define NSMG_HD __host__ __device__ __forceinline__
#else
#define NSMG_HD inline __attribute__((always_inline))
#endif

namespace nsmg {

// The smallest alpha that is blended (gsplat, INRIA): a splat below it everywhere contributes nothing.
template <typename T>
NSMG_HD constexpr T min_alpha() {
  return T(1) / T(255);
}

// An infinite or huge extent still has to fit an int32, with headroom to add a pixel coordinate.
template <typename T>
NSMG_HD constexpr T max_radius() {
  return T(1 << 30);
}

template <typename T>
NSMG_HD T smaller(T a, T b) {
  return a < b ? a : b;
}

template <typename T>
NSMG_HD T larger(T a, T b) {
  return a > b ? a : b;
}

template <typename T>
NSMG_HD T square(T a) {
  return a * a;
}

// a * b + c in one rounding wherever the processor has it, so that every kernel that writes it gets the same bits.
NSMG_HD float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__CUDACC__)
  return fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

NSMG_HD double multiply_add(double a, double b, double c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__CUDACC__)
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}

// a / b and the square root of a >= 0, on the device to two units in the last place: exact ones take a slow path where
// a number is 0 or tiny, as most moments of points that are drawn behind others are.
NSMG_HD float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

NSMG_HD double quotient(double a, double b) { return a / b; }

NSMG_HD float square_root(float a) {
#ifdef __CUDA_ARCH__
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(a));
  return root;
#else
  return std::sqrt(a);
#endif
}

NSMG_HD double square_root(double a) { return std::sqrt(a); }

// A half extent in pixels as a whole number, never too small: the margins cover the rounding of what led to `extent`.
template <typename T>
NSMG_HD T outward(T extent, T relative_margin) {
  return smaller(std::ceil(extent * (T(1) + relative_margin) + T(0.01)), max_radius<T>());
}

// The relative margins: of a row's own extent, and of the bound on it by which points are culled (so cull keeps more).
template <typename T>
NSMG_HD constexpr T extent_margin() {
  return T(1e-4);
}

template <typename T>
NSMG_HD constexpr T bound_margin() {
  return T(1e-3);
}

}  // namespace nsmg
