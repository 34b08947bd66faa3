// Eight float32 lanes with AVX2, FMA and F16C. The same names as simd_portable.h; kernels are written against either.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace specengine {
namespace SPECENGINE_ISA {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

struct Vec {
  __m256 v;
};

inline Vec set1(float a) { return {_mm256_set1_ps(a)}; }
inline Vec broadcast(const float* p) { return {_mm256_broadcast_ss(p)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.v)}; }
inline Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }  // b where either is NaN

// `otherwise`, but 0 in lanes where x < bound.
inline Vec zero_below(Vec x, float bound, Vec otherwise) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.v, _mm256_set1_ps(bound), _CMP_LT_OQ), otherwise.v)};
}

// 2^n for whole n in [-127, 127].
inline Vec pow2(Vec n) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23))};
}

// Lanes first + i with begin <= first + i < end keep x, the others get `fill`.
inline Vec keep_range(Vec x, int first, int begin, int end, float fill) {
  const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane);
  const __m256i inside = _mm256_andnot_si256(before, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
  return {_mm256_blendv_ps(_mm256_set1_ps(fill), x.v, _mm256_castsi256_ps(inside))};
}

inline float reduce_add(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

inline float reduce_max(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const BF16* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16))};
}
inline Vec load(const F16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }

inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline void store(BF16* p, Vec a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  // Rounding could carry a NaN's payload into the exponent; keep it a quiet NaN instead.
  const __m256 nan = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC00000), _mm256_castps_si256(nan));
  const __m256i high = _mm256_srli_epi32(rounded, 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
inline void store(F16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// One row of a weight panel: columns 0..7 and 8..15.
inline void load_panel(const float* p, Vec& low, Vec& high) {
  low = load(p);
  high = load(p + 8);
}
inline void load_panel(const BF16* p, Vec& low, Vec& high) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  low.v = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
  high.v = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline void load_panel(const F16* p, Vec& low, Vec& high) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i even = _mm256_and_si256(raw, _mm256_set1_epi32(0xFFFF));
  const __m256i odd = _mm256_srli_epi32(raw, 16);
  const __m128i first = _mm_packus_epi32(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1));
  const __m128i second = _mm_packus_epi32(_mm256_castsi256_si128(odd), _mm256_extracti128_si256(odd, 1));
  low.v = _mm256_cvtph_ps(first);
  high.v = _mm256_cvtph_ps(second);
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

// Rows become columns.
inline void transpose(Vec (&r)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
    a[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
      b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xEE);
    }
  }
  for (int i = 0; i < 4; ++i) {
    r[i].v = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    r[i + 4].v = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}

}  // namespace SPECENGINE_ISA
}  // namespace specengine
