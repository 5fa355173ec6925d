// Adam's moments in half the bytes: as bfloat16, rounded up or down at random, so that the mean is right.
//
// A step of beta2 = 0.999 moves an average by at most about a thousandth of itself (unless gradients grow), and a
// bfloat16's neighbours lie 1/256 to 1/128 apart: rounded to the nearest it would stay where it is for good. Rounded up
// with the probability that makes the expected value the exact one (Gupta et al. 2015, "Deep FeedbackLoop with Limited
// Numerical Precision", section 3), it moves in one step out of several. All arithmetic stays in float32.
//
// The random numbers are a hash of what is rounded and of the step's own numbers: the same on whatever rank, in
// whatever row and thread, at whatever launch a point is stepped, and there is no state other than the moments. What
// makes them others in every step, with nothing to keep or to pass along:
// - a step's are of the scalars of the means, of which 1 / (1 - beta1^t) and 1 / sqrt(1 - beta2^t) change until beta2^t
//   is lost in float32 (after some 16,600 steps of 0.999) and the rate falls with every step while it has a schedule;
//   and of where its first view is seen from, which goes on changing: with nothing that does, a moment2 without
//   gradients would in the end be rounded up in the same way in every step, and stand still;
// - a flush's are of the first line of the table: the sum of the rates of the block's steps, and its decays;
// - and both moments of an element go in together.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/scalar.h"

namespace nsmg {

// The upper half of a float.
struct Bfloat16 {
  uint16_t bits;
};

NSMG_HD uint32_t word_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  return word;
#endif
}

NSMG_HD float float_of(uint32_t word) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(word);
#else
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
#endif
}

NSMG_HD float widened(Bfloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

// A one-to-one map of words in which every bit depends on every other (the finaliser of MurmurHash3, public domain).
NSMG_HD uint32_t scrambled(uint32_t word) {
  word ^= word >> 16;
  word *= 0x85ebca6bu;
  word ^= word >> 13;
  word *= 0xc2b2ae35u;
  return word ^ (word >> 16);
}

// What makes the random numbers of one step, or flush, others than those of another: see above. Further numbers may go
// in after the first three.
NSMG_HD uint32_t dither_salt(float a, float b, float c, uint32_t before = 0) {
  return scrambled(scrambled(scrambled(before + word_of(a)) + word_of(b)) + word_of(c));
}

// The same for one of its tensors.
NSMG_HD uint32_t tensor_salt(uint32_t salt, uint32_t tensor) { return scrambled(salt + tensor); }

// 32 random bits for an element: the lower half for its first moment, the upper for its second.
NSMG_HD uint32_t dither_bits(uint32_t salt, float moment1, float moment2) {
  return scrambled((word_of(moment1) * 0x9e3779b1u) ^ word_of(moment2) ^ salt);
}

// A float's word, of which the upper half is the bfloat16 that 16 random bits choose: the nearer the upper neighbour in
// magnitude is, the more of them carry into it. What a bfloat16 can hold, zeros and infinities too, has a lower half of
// zeros, into which nothing carries. NaN stays NaN.
NSMG_HD uint32_t dithered(float value, uint32_t random16) {
  const uint32_t word = word_of(value);
  return (word & 0x7fffffffu) > 0x7f800000u ? word | 0x00400000u : word + random16;
}

// Both moments of an element.
struct CompactMoments {
  Bfloat16 moment1, moment2;
};

NSMG_HD CompactMoments compacted(uint32_t salt, float moment1, float moment2) {
  const uint32_t random = dither_bits(salt, moment1, moment2);
  return {{static_cast<uint16_t>(dithered(moment1, random & 0xffffu) >> 16)},
          {static_cast<uint16_t>(dithered(moment2, random >> 16) >> 16)}};
}

// Rounding wanders off: by how much more than the table says (LazyLine's bound) points may move whose moments have been
// rounded in each of many steps. The bound is one on |m| / sqrt(v). Over the 1000 steps that v remembers, rounding adds
// up to a standard deviation of 3 % (tests/cuda_ext/optim/test_compact.py), 1.5 % of sqrt(v); over the ten that m does
// to less than 1 %. This is more than ten of theirs together.
template <typename Moment>
NSMG_HD constexpr float wander() {
  return sizeof(Moment) < sizeof(float) ? 1.25f : 1.0f;
}

}  // namespace nsmg
