// Dense Adam's steps without a gradient, taken later and all at once.
//
// Step s multiplies the moments of a parameter without a gradient by beta1 and beta2, and moves it by
//     -a_s m_s / (sqrt(v_s) + e_s),  a_s = rate sqrt(1 - beta2^s) / (1 - beta1^s),  e_s = eps sqrt(1 - beta2^s).
// From moments m, v after step t, with the products D1 and D2 of the betas of steps t+1 to s, m_s / sqrt(v_s) is
// D1 / sqrt(D2) m / sqrt(v): all these steps together move it by
//     -S m / (sqrt(v) + e),  S = sum over s of a_s D1 / sqrt(D2),
// where e is the mean of e_s / sqrt(D2), weighted as in S. That is exact for eps = 0. Otherwise the relative error is
// at most about the relative variance of e_s / sqrt(D2) among those weights, some 1e-5 after the first thousand steps,
// and falls with the square of e / sqrt(v): only parameters with sqrt(v) below some 1e3 eps are concerned at all.
//
// Of moments that Adam itself made from zero, |m| <= B sqrt(v): with r = beta1^2 / beta2, and g_i the gradient of i
// steps ago,
//     m = (1 - beta1) sum beta1^i g_i = (1 - beta1) sum r^(i/2) (beta2^(i/2) g_i)
//       <= (1 - beta1) sqrt(sum r^i) sqrt(sum beta2^i g_i^2) = (1 - beta1) / sqrt(1 - r) sqrt(v / (1 - beta2))
// by Cauchy and Schwarz. B = (1 - beta1) / sqrt((1 - beta2) (1 - r)), 7.27 for the usual betas. So S B bounds how far
// the missed steps move any parameter of the tensor.
#pragma once

#include "common/adam.h"

namespace nsmg {

// Maximum number of deferred steps before a flush.
constexpr int kLazySteps = 64;

// A line of the table [kLazySteps + 1, tensors, 8]: for a tensor's parameters whose last step was t, what came since.
template <typename T>
struct LazyLine {
  T shift;           // S
  T eps;             // e; 1 where S is 0
  T decay1, decay2;  // D1, D2
  T bound;           // S B
  T weighted;        // S e
};

template <typename T>
NSMG_HD LazyLine<T> lazy_start() {
  return {T(0), T(1), T(1), T(1), T(0), T(0)};
}

// Whether a step leaves everything as it is: a rate of zero, and betas of one.
template <typename T>
NSMG_HD bool stands_still(const AdamScalars<T>& s) {
  return (s.rate == T(0)) & (s.rest1 == T(0)) & (s.rest2 == T(0));
}

// The line after one more step.
template <typename T>
NSMG_HD LazyLine<T> lazy_extended(const LazyLine<T>& line, const AdamScalars<T>& s) {
  LazyLine<T> next;
  next.decay1 = line.decay1 * s.beta1;
  next.decay2 = line.decay2 * s.beta2;
  const T root = std::sqrt(next.decay2);
  const T weight = s.rate * s.correction1 / s.correction2 * (next.decay1 / root);
  next.shift = line.shift + weight;
  next.weighted = line.weighted + weight * (s.eps / (s.correction2 * root));
  next.eps = next.shift > T(0) ? next.weighted / next.shift : T(1);
  // A little more, for moments are rounded. Without end where the sum over r^i has none.
  const T ratio = s.beta1 * s.beta1 / s.beta2;
  const T most = T(1.001) * s.rest1 / std::sqrt(s.rest2 * (T(1) - ratio));
  next.bound = next.shift * (ratio < T(1) ? most : T(1e30));
  return next;
}

// The value that the missed steps lead to; the moments of before.
template <typename T>
NSMG_HD T lazy_value(T shift, T eps, T value, T moment1, T moment2) {
  const T moved = multiply_add(-shift, quotient(moment1, square_root(moment2) + eps), value);
  return moment1 == T(0) ? value : moved;  // also where eps is 0 and there never was a gradient
}

}  // namespace nsmg
