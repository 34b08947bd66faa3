// Eight float32 lanes in plain C++ that any compiler for any machine takes. The same names as simd_avx2.h.
//
// `fma` is a multiplication and an addition here (two roundings): results differ from AVX2 in the last bits, never among
// themselves. Compiled with -ffp-contract=off.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace specengine {
namespace SPECENGINE_ISA {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// The vector extension of GCC and Clang, which they lower to whatever the machine has.
typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t IntLanes __attribute__((vector_size(32)));

struct Vec {
  Lanes v;
};

inline float to_float(BF16 a) {
  const uint32_t bits = static_cast<uint32_t>(a.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline float to_float(F16 a) {
  const uint32_t sign = static_cast<uint32_t>(a.bits & 0x8000) << 16;
  const uint32_t magnitude = a.bits & 0x7FFF;
  uint32_t bits;
  if (magnitude >= 0x7C00) {
    bits = sign | 0x7F800000 | (magnitude & 0x3FF) << 13;  // infinity or NaN
  } else if (magnitude >= 0x0400) {
    bits = sign | ((magnitude << 13) + 0x38000000);
  } else {  // subnormal: magnitude * 2^-24 is exact
    const float f = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &f, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline void from_float(BF16* p, float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (f != f) {
    p->bits = 0x7FC0;
  } else {
    p->bits = static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
}

inline void from_float(F16* p, float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7FFFFFFF;
  uint32_t half;
  if (bits > 0x7F800000) {
    half = 0x7E00;
  } else if (bits >= 0x47800000) {  // 65536 and above
    half = 0x7C00;
  } else if (bits >= 0x38800000) {  // normal: round to nearest even; 65520 and above carry into infinity
    half = (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13;
  } else {  // subnormal: beside 0.5 the last bit is worth 2^-24, and the addition rounds to nearest even
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    const float aligned = magnitude + 0.5f;
    std::memcpy(&half, &aligned, 4);
    half -= 0x3F000000;
  }
  p->bits = static_cast<uint16_t>(sign | half);
}

inline Vec set1(float a) {
  Vec r;
  for (int i = 0; i < 8; ++i) r.v[i] = a;
  return r;
}
inline Vec broadcast(const float* p) { return set1(*p); }
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec sqrt(Vec a) {
  for (int i = 0; i < 8; ++i) a.v[i] = std::sqrt(a.v[i]);
  return a;
}
// To the nearest whole number, ties to even, for |a| < 2^22: the sum pushes the fraction out of the significand.
inline Vec round(Vec a) {
  const Vec shift = set1(12582912.0f);
  return (a + shift) - shift;
}
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }  // b where either is NaN

// `otherwise`, but 0 in lanes where x < bound.
inline Vec zero_below(Vec x, float bound, Vec otherwise) { return {x.v < set1(bound).v ? Lanes{} : otherwise.v}; }

// 2^n for whole n in [-127, 127]; anything for NaN.
inline Vec pow2(Vec n) {
  const Lanes limited = n.v == n.v ? n.v : Lanes{};
  const IntLanes bits = (__builtin_convertvector(limited, IntLanes) + 127) << 23;
  Vec r;
  std::memcpy(&r.v, &bits, 32);
  return r;
}

// Lanes first + i with begin <= first + i < end keep x, the others get `fill`.
inline Vec keep_range(Vec x, int first, int begin, int end, float fill) {
  for (int i = 0; i < 8; ++i) {
    if (first + i < begin || first + i >= end) x.v[i] = fill;
  }
  return x;
}

inline float reduce_add(Vec a) {
  const float s0 = a.v[0] + a.v[4], s1 = a.v[1] + a.v[5], s2 = a.v[2] + a.v[6], s3 = a.v[3] + a.v[7];
  return (s0 + s2) + (s1 + s3);
}

inline float reduce_max(Vec a) {
  float m = a.v[0];
  for (int i = 1; i < 8; ++i) m = m > a.v[i] ? m : a.v[i];
  return m;
}

inline Vec load(const float* p) {
  Vec r;
  std::memcpy(&r.v, p, 32);
  return r;
}
template <class T>
inline Vec load(const T* p) {
  Vec r;
  for (int i = 0; i < 8; ++i) r.v[i] = to_float(p[i]);
  return r;
}

inline void store(float* p, Vec a) { std::memcpy(p, &a.v, 32); }
template <class T>
inline void store(T* p, Vec a) {
  for (int i = 0; i < 8; ++i) from_float(p + i, a.v[i]);
}

// One row of a weight panel: columns 0..7 and 8..15.
inline void load_panel(const float* p, Vec& low, Vec& high) {
  low = load(p);
  high = load(p + 8);
}
template <class T>
inline void load_panel(const T* p, Vec& low, Vec& high) {
  for (int i = 0; i < 8; ++i) {
    low.v[i] = to_float(p[2 * i]);
    high.v[i] = to_float(p[2 * i + 1]);
  }
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

// Rows become columns.
inline void transpose(Vec (&r)[8]) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < i; ++j) {
      const float t = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = t;
    }
  }
}

}  // namespace SPECENGINE_ISA
}  // namespace specengine
