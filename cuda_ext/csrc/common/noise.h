// Noise on the means of Gaussians (Kheradmand et al. 2024, "3D Gaussian Splatting as Markov Chain Monte Carlo",
// equation 10), of normal numbers that follow from their place in an endless table.
#pragma once

#include <cstdint>

#include "common/activations.h"
#include "common/quaternion.h"

namespace nsmg {

// The 64 bits that SplitMix64 (Steele, Lea and Flood 2014) draws k-th, from `start` on.
NSMG_HD uint64_t table_bits(uint64_t start, uint64_t k) {
  uint64_t bits = start + (k + 1) * 0x9E3779B97F4A7C15ull;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
  return bits ^ (bits >> 31);
}

// Number k of the table that begins at `start`: of these bits, by Box and Muller's transform.
NSMG_HD float table_normal(uint64_t start, uint64_t k) {
  const uint64_t bits = table_bits(start, k);
  constexpr double unit = 1.0 / 4294967296.0, turn = 2.0 * 3.14159265358979323846;
  const double radius = std::sqrt(-2.0 * std::log((double(bits >> 32) + 0.5) * unit));
  return float(radius * std::cos(double(bits & 0xFFFFFFFFull) * (unit * turn)));
}

struct NoiseRule {
  uint64_t start;  // of the table
  double steepness, threshold;  // the gate fades out as opacities rise beyond the threshold
};

// By how much the mean of a Gaussian moves that stands in line `row` of the table, three numbers a line.
template <typename T>
NSMG_HD Vec3<T> noise_of(const NoiseRule& rule, uint64_t row, const Quat<T>& quat, const Vec3<T>& log_scale, T logit,
                         T scale) {
  const Vec3<T> drawn = {T(table_normal(rule.start, 3 * row)), T(table_normal(rule.start, 3 * row + 1)),
                         T(table_normal(rule.start, 3 * row + 2))};
  const Mat3<T> frame = rotation(scaled(quat, inverse_length(quat)));
  const Vec3<T> variance = {std::exp(2 * log_scale.x), std::exp(2 * log_scale.y), std::exp(2 * log_scale.z)};
  const Vec3<T> along = times(drawn * frame, variance);
  const T gate = sigmoid(T(rule.steepness) * (T(rule.threshold) - sigmoid(logit)));
  return (scale * gate) * Vec3<T>{dot(frame.r0, along), dot(frame.r1, along), dot(frame.r2, along)};
}

}  // namespace nsmg
