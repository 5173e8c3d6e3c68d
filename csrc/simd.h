// Vectors of 16 lanes on every machine: one AVX-512 register, two of AVX2, or what the compiler makes of it.
//
// All vector arithmetic of the kernels goes through these functions. Contraction is off (-ffp-contract=off), so a fused
// multiply-add happens exactly where `fma` is written, and one source gives one result in every place it is inlined.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#include "types.h"

#ifndef ISA
#error "compile with -DISA=name"
#endif

namespace ISA {

using pypto::bf16;
using pypto::Pair;

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), may_alias));
typedef double Doubles __attribute__((vector_size(64), may_alias));  // eight lanes

#define INLINE static inline __attribute__((always_inline))

INLINE Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

INLINE void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

INLINE Floats set1(float x) { return Floats{} + x; }

INLINE Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  union { Floats all; __m256 half[2]; } x{a}, y{b}, z{c}, r;
  r.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  r.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  return r.all;
#else
  return a * b + c;
#endif
}

// Comparisons: -1 in the lanes that hold. A vector of two AVX2 registers is cut in half, because compilers would
// compare it lane by lane.
#if defined(__AVX2__) && !defined(__AVX512F__)
typedef float HalfFloats __attribute__((vector_size(32), may_alias));
typedef int32_t HalfInts __attribute__((vector_size(32), may_alias));
#define COMPARE(name, Whole, Half, op)              \
  INLINE Ints name(Whole a, Whole b) {              \
    union { Whole all; Half half[2]; } x{a}, y{b};  \
    union { Ints all; HalfInts half[2]; } r;        \
    r.half[0] = x.half[0] op y.half[0];             \
    r.half[1] = x.half[1] op y.half[1];             \
    return r.all;                                   \
  }
#else
#define COMPARE(name, Whole, Half, op) \
  INLINE Ints name(Whole a, Whole b) { return a op b; }
#endif
COMPARE(above, Floats, HalfFloats, >)
COMPARE(equal, Floats, HalfFloats, ==)
COMPARE(at_most, Ints, HalfInts, <=)
#undef COMPARE

// Each lane: `a` where the comparison holds, else `b`.
INLINE Floats select(Ints holds, Floats a, Floats b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  union { Ints all; __m256 half[2]; } h{holds};
  union { Floats all; __m256 half[2]; } x{a}, y{b}, r;
  r.half[0] = _mm256_blendv_ps(y.half[0], x.half[0], h.half[0]);
  r.half[1] = _mm256_blendv_ps(y.half[1], x.half[1], h.half[1]);
  return r.all;
#else
  return holds ? a : b;
#endif
}

INLINE Floats larger(Floats a, Floats b) { return select(above(a, b), a, b); }

INLINE Floats smaller(Floats a, Floats b) { return select(above(b, a), a, b); }

// Prefetches into the L2 cache, since the data exceed the L1 cache.
INLINE void fetch(const char* p) { __builtin_prefetch(p, 0, 2); }

// Lane i is lane order[i] of x.
INLINE Floats permute(Floats x, Ints order) {
#if defined(__AVX512F__)
  return (Floats)_mm512_permutexvar_ps((__m512i)order, (__m512)x);
#else
  Floats y;
  for (int i = 0; i < kLanes; i++) y[i] = x[order[i]];
  return y;
#endif
}

// Sum and maximum of all lanes in the order of a binary tree: lanes i and i + 8, then i + 4, ...
template <int kWidth>
struct Part {
  typedef float Type __attribute__((vector_size(4 * kWidth), may_alias));
};

template <int kWidth, typename Combine>
INLINE float reduce(typename Part<kWidth>::Type x, Combine combine) {
  if constexpr (kWidth == 1) {
    return x[0];
  } else {
    typename Part<kWidth / 2>::Type half[2];
    std::memcpy(half, &x, sizeof x);
    return reduce<kWidth / 2>(combine(half[0], half[1]), combine);
  }
}

INLINE float sum(Floats x) {
  return reduce<kLanes>(x, [](auto a, auto b) { return a + b; });
}

INLINE float largest(Floats x) {
  return reduce<kLanes>(x, [](auto a, auto b) { return a > b ? a : b; });
}

INLINE double sum(Doubles x) {
  double lane[kLanes / 2];
  std::memcpy(lane, &x, sizeof x);
  for (int width = kLanes / 4; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
}

// Lane i plus lane i + 8, in float64.
INLINE Doubles add_halves(Floats x) {
  typedef float Half __attribute__((vector_size(32), may_alias));
  Half half[2];
  std::memcpy(half, &x, sizeof x);
  return __builtin_convertvector(half[0], Doubles) + __builtin_convertvector(half[1], Doubles);
}

// Bit i is set if lane i of a comparison holds.
INLINE uint32_t bits(Ints holds) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)holds);
#elif defined(__AVX2__)
  union { Ints all; __m256 half[2]; } x{holds};
  return _mm256_movemask_ps(x.half[0]) | _mm256_movemask_ps(x.half[1]) << 8;
#else
  uint32_t all = 0;
  for (int i = 0; i < kLanes; i++) all |= (static_cast<uint32_t>(holds[i]) >> 31) << i;
  return all;
#endif
}

// Loads the first `count` >= 1 lanes; the others are zero.
INLINE Ints load_some(const void* p, int64_t count) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), p);
#else
  int32_t lanes[kLanes] = {};
  for (int64_t i = 0; i < count; i++) std::memcpy(lanes + i, static_cast<const char*>(p) + 4 * i, 4);
  Ints x;
  std::memcpy(&x, lanes, sizeof x);
  return x;
#endif
}

INLINE void store_some(void* p, Ints x, int64_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << count) - 1), (__m512i)x);
#else
  int32_t lanes[kLanes];
  std::memcpy(lanes, &x, sizeof x);
  for (int64_t i = 0; i < count; i++) std::memcpy(static_cast<char*>(p) + 4 * i, lanes + i, 4);
#endif
}

INLINE float widen(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// Rounds to nearest, ties to even; NaN stays NaN.
INLINE bf16 narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  float y;
  if (exponent == 0) {
    y = static_cast<float>(fraction) * 5.9604645e-8f;
    return sign ? -y : y;
  }
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// Stores 16 floats as bfloat16.
INLINE void store_narrow(bf16* p, Floats x) {
#if defined(__AVX512BF16__)
  const __m256bh y = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &y, sizeof y);
#else
  float lane[kLanes];
  store(lane, x);
  for (int i = 0; i < kLanes; i++) p[i] = narrow(lane[i]);
#endif
}

INLINE Floats load_widen(const bf16* p) {
#if defined(__AVX512F__)
  __m256i x;
  std::memcpy(&x, p, sizeof x);
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16);
#else
  float lane[kLanes];
  for (int i = 0; i < kLanes; i++) lane[i] = widen(p[i]);
  return load(lane);
#endif
}

// Stores as bfloat16 and returns the rounded values.
INLINE Floats store_rounded(bf16* p, Floats x) {
#if defined(__AVX512BF16__)
  const __m256bh y = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(p, &y, sizeof y);
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)y), 16);
#else
  store_narrow(p, x);
  return load_widen(p);
#endif
}

// 2^x for x in [-126, 126]; 0 below, exactly 1 at 0; NaN stays NaN. The remainder f in [-1/2, 1/2] goes through the
// Taylor series of 2^f to the 7th power: relative error below 2e-8 before rounding.
INLINE Floats exp2_to_126(Floats x) {
  const Floats magic = set1(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  const Floats shifted = x + magic;
  const Floats f = x - (shifted - magic);
  Floats y = set1(1.5252734e-5f);
  y = fma(y, f, set1(1.5403530e-4f));
  y = fma(y, f, set1(1.3333558e-3f));
  y = fma(y, f, set1(9.6181291e-3f));
  y = fma(y, f, set1(5.5504109e-2f));
  y = fma(y, f, set1(2.4022651e-1f));
  y = fma(y, f, set1(6.9314718e-1f));
  y = fma(y, f, set1(1.0f));
  const Floats scaled = (Floats)((Ints)y + ((Ints)shifted << 23));
  return select(equal(x, x), select(above(set1(-126.0f), x), Floats{}, scaled), x);
}

// exp2_to_126 for any x; 2^126 above 126.
INLINE Floats exp2(Floats x) { return exp2_to_126(select(above(x, set1(126.0f)), set1(126.0f), x)); }

// 2^x of one number.
INLINE float power(float x) {
  float lane[kLanes];
  store(lane, exp2(set1(x)));
  return lane[0];
}

constexpr float kLog2E = 1.4426950408889634f;

// e^x for x in [-87, 87]; 0 below, exactly 1 at 0; NaN stays NaN. The multiple of ln 2 is subtracted in two parts, the
// first of few bits (Cody and Waite 1980), which keeps the remainder exact to the last bits for large x too.
INLINE Floats exp(Floats x) {
  const Floats clamped = smaller(larger(x, set1(-87.0f)), set1(87.0f));
  const Floats magic = set1(12582912.0f);
  const Floats shifted = clamped * set1(kLog2E) + magic, whole = shifted - magic;
  const Floats f = fma(whole, set1(2.12194440e-4f), fma(whole, set1(-0.693359375f), clamped));
  Floats y = set1(1.9875691500e-4f);
  y = fma(y, f, set1(1.3981999507e-3f));
  y = fma(y, f, set1(8.3334519073e-3f));
  y = fma(y, f, set1(4.1665795894e-2f));
  y = fma(y, f, set1(1.6666665459e-1f));
  y = fma(y, f, set1(5.0000001201e-1f));
  y = fma(y, f * f, f) + set1(1.0f);
  const Floats scaled = (Floats)((Ints)y + ((Ints)shifted << 23));
  return select(equal(x, x), select(above(set1(-87.0f), x), Floats{}, scaled), x);
}

// x * sigmoid(x): Elfwing et al. 2017, arXiv:1702.03118.
INLINE Floats silu(Floats x) { return x / (set1(1.0f) + exp2(x * set1(-kLog2E))); }

INLINE Floats sigmoid(Floats x) { return set1(1.0f) / (set1(1.0f) + exp(-x)); }

}  // namespace ISA
