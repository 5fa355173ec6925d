// The compositing rule of 3D Gaussian Splatting (Kerbl et al. 2023, section 6 and appendix C), with gsplat 1.4.0's
// constants. Forward, backward, intersection and culling all read them here, so that they agree on a splat's support.
#pragma once

namespace nsmg {

// A splat whose alpha at a pixel is below this adds nothing to that pixel.
template <typename T>
inline constexpr T kAlphaMin = T(1.0 / 255.0);

// Alpha is capped here, so that the transmittance is never zero. Where the cap holds, alpha is a constant: neither
// the geometry nor the opacity gets a gradient.
template <typename T>
inline constexpr T kAlphaMax = T(0.999);

// A splat that would lower the transmittance to this value or below is not blended, and the pixel is closed.
template <typename T>
inline constexpr T kTransmittanceMin = T(1e-4);

}  // namespace nsmg
