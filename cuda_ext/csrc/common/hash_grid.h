// The voxel of a position in one level of a multiresolution hash grid (Instant-NGP, section 3). The order of rows is
// that of nerfstudio's HashEncoding in torch.
#pragma once

#include <cmath>

#include "common/scalar.h"

namespace nsmg {

template <typename T>
struct Voxel {
  unsigned low[3], high[3];  // its corners
  T part[3];                 // where in it the position is

  NSMG_HD Voxel(const T* position, T scaling) {
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const T scaled = position[axis] * scaling, floor = std::floor(scaled);
      low[axis] = unsigned(int(floor));
      high[axis] = unsigned(int(std::ceil(scaled)));
      part[axis] = scaled - floor;
    }
  }

  // The row of a corner: bit `axis` of `corner` says which side. The low bits of a product do not depend on the others.
  NSMG_HD unsigned row(int corner, unsigned mask) const {
    const unsigned x = corner & 1 ? high[0] : low[0], y = corner & 2 ? high[1] : low[1];
    const unsigned z = corner & 4 ? high[2] : low[2];
    return (x ^ y * 2654435761u ^ z * 805459861u) & mask;
  }

  // A corner's weight along an axis.
  NSMG_HD T along(int corner, int axis) const { return corner >> axis & 1 ? part[axis] : T(1) - part[axis]; }

  NSMG_HD T weight(int corner) const { return along(corner, 0) * along(corner, 1) * along(corner, 2); }

  // Adds to `moved` the derivative of a corner's weight by the position in units of the voxel, times `by`.
  NSMG_HD void add_slope(int corner, T by, T (&moved)[3]) const {
    const T x = along(corner, 0), y = along(corner, 1), z = along(corner, 2);
    moved[0] += (corner & 1 ? by : -by) * y * z;
    moved[1] += (corner & 2 ? by : -by) * x * z;
    moved[2] += (corner & 4 ? by : -by) * x * y;
  }
};

}  // namespace nsmg
