// From what an optimizer sees (log-scales, logits) to scales and opacities.
#pragma once

#include "common/projection.h"

namespace nsmg {

template <typename T>
NSMG_HD T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

template <typename T>
NSMG_HD Vec3<T> sigmoid(const Vec3<T>& x) {
  return {sigmoid(x.x), sigmoid(x.y), sigmoid(x.z)};
}

// A point from its raw numbers: log-scales and the logit of its opacity.
template <typename T>
NSMG_HD Point<T> activated(const Vec3<T>& mean, const Quat<T>& quat, const Vec3<T>& log_scale, T logit) {
  return {mean, quat, {std::exp(log_scale.x), std::exp(log_scale.y), std::exp(log_scale.z)}, sigmoid(logit)};
}

}  // namespace nsmg
