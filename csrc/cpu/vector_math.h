// What kernels need on top of a SIMD header: partial vectors, exp, sums in a fixed order.
#pragma once

#include <cstdint>
#include <cstring>

#define SPECENGINE_UNROLL _Pragma("GCC unroll 16")

namespace specengine {
namespace SPECENGINE_ISA {

constexpr int kLanes = 8;
constexpr float kInfinity = __builtin_inff();

// The first n < 8 elements, zeros after them. Tails go through whole vectors, so that an element's bits don't depend on
// where it lies.
template <class T>
inline Vec load_n(const T* p, int64_t n) {
  T whole[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) whole[i] = p[i];
  return load(whole);
}

template <class T>
inline void store_n(T* p, Vec a, int64_t n) {
  T whole[kLanes];
  store(whole, a);
  for (int64_t i = 0; i < n; ++i) p[i] = whole[i];
}

template <class T>
inline Vec load_upto(const T* p, int64_t left) {
  return left >= kLanes ? load(p) : load_n(p, left);
}

template <class T>
inline void store_upto(T* p, Vec a, int64_t left) {
  if (left >= kLanes) {
    store(p, a);
  } else {
    store_n(p, a, left);
  }
}

// e^x: 0 below -87.3, at most 1.65e38, NaN stays NaN, e^0 is exactly 1. x = n ln 2 + r, |r| <= ln 2 / 2 (ln 2 in two parts,
// Cody and Waite 1980), e^r = 1 + r + r^2 q(r) with q fitted for the least relative error (3e-9); ops/reference.py has the
// same steps.
inline Vec exp(Vec x) {
  const Vec limited = max(set1(-88.0f), min(set1(88.0f), x));
  const Vec n = round(limited * set1(1.44269504f));
  const Vec r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), limited));
  Vec q = fma(r, set1(0.0013814539f), set1(0.0083687454f));
  q = fma(q, r, set1(0.041668389f));
  q = fma(q, r, set1(0.16666521f));
  q = fma(q, r, set1(0.49999994f));
  const Vec p = fma(q, r * r, r) + set1(1.0f);
  return zero_below(x, -87.3f, p * pow2(n));
}

// Sum of squares of n elements: four running vectors, then their sum, in an order that depends on n alone.
inline float sum_of_squares(const float* x, int64_t n) {
  Vec sums[4] = {set1(0), set1(0), set1(0), set1(0)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const Vec a = load(x + i + j * kLanes);
      sums[j] = fma(a, a, sums[j]);
    }
  }
  for (; i < n; i += kLanes) {
    const Vec a = load_upto(x + i, n - i);
    sums[0] = fma(a, a, sums[0]);
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// y = x * scale * weight; y may be x.
template <class W>
inline void scale_by_weight(const float* x, float scale, const W* weight, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec a = load_upto(x + i, n - i) * set1(scale) * load_upto(weight + i, n - i);
    store_upto(y + i, a, n - i);
  }
}

inline float rms_scale(const float* x, int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, n) / static_cast<float>(n) + eps);
}

// Calls f with a null pointer of the element type.
template <class F>
inline void for_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32:
      return f(static_cast<const float*>(nullptr));
    case Dtype::kBFloat16:
      return f(static_cast<const BF16*>(nullptr));
    case Dtype::kFloat16:
      return f(static_cast<const F16*>(nullptr));
  }
}

}  // namespace SPECENGINE_ISA
}  // namespace specengine
