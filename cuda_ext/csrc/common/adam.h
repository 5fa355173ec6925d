// One element's step of Adam (Kingma and Ba 2015), in the order of operations of torch.optim.Adam.
#pragma once

#include "common/scalar.h"

namespace nsmg {

// A line of adam_step's `scalars`: eight numbers, so that a thread loads it in two pieces of 16 bytes. 1 - beta comes
// along because subtracting in float32 would lose digits of it (1.3e-5 of 1 - 0.999).
template <typename T>
struct AdamScalars {
  T rate, beta1, beta2, eps;
  T correction1;  // 1 / (1 - beta1^t)
  T correction2;  // 1 / sqrt(1 - beta2^t)
  T rest1, rest2;  // 1 - beta1, 1 - beta2
};

// `first`: the gradient for the first moment. That is the same one, or a part of it, to take this part of the step.
template <typename T>
NSMG_HD void adam_element(const AdamScalars<T>& s, T first, T gradient, T& value, T& moment1, T& moment2) {
  moment1 = moment1 + s.rest1 * (first - moment1);
  moment2 = s.beta2 * moment2 + s.rest2 * gradient * gradient;
  const T size = square_root(moment2) * s.correction2 + s.eps;
  value = value - s.rate * s.correction1 * quotient(moment1, size);
}

}  // namespace nsmg
