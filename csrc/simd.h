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

// One machine register, for sums that must stay in it: compilers keep vectors of several registers in memory. 16 lanes
// with AVX-512, 8 with AVX2, 4 elsewhere.
#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16;
#elif defined(__AVX2__)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif
typedef float Register __attribute__((vector_size(4 * kRegisterLanes), may_alias));
typedef int32_t PairRegister __attribute__((vector_size(4 * kRegisterLanes), may_alias));

INLINE PairRegister load_register(const Pair* p) {
  PairRegister x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

INLINE Register load_sums(const float* p) {
  Register x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

INLINE PairRegister broadcast(Pair x) { return PairRegister{} + static_cast<int32_t>(x); }

INLINE void store_sums(float* p, Register x) { std::memcpy(p, &x, sizeof x); }

// Converts integers to float32, rounded to nearest, ties to even.
INLINE Register as_floats(PairRegister x) { return __builtin_convertvector(x, Register); }

// Forces x to be computed although nothing reads it.
INLINE void keep(Register x) { asm volatile("" : : "m"(x)); }

INLINE Register fma_register(Register a, Register b, Register c) {
#if defined(__AVX512F__)
  return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// total + a.low * b.low + a.high * b.high in every lane; one vdpbf16ps where the machine has it.
INLINE Register dot(Register total, PairRegister a, PairRegister b) {
#if defined(__AVX512BF16__)
  return (Register)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
  const PairRegister high = PairRegister{} + static_cast<int32_t>(0xffff0000);
  const Register low = fma_register((Register)(a << 16), (Register)(b << 16), total);
  return fma_register((Register)(a & high), (Register)(b & high), low);
#endif
}

// The sum of two products of 16-bit integers in every lane.
INLINE PairRegister multiply_shorts(PairRegister a, PairRegister b) {
#if defined(__AVX512BW__)
  return (PairRegister)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (PairRegister)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (PairRegister)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// total + the sum of four products of a signed byte of a and an unsigned byte of b in every lane; one vpdpbusd where
// the machine has it. Elsewhere even and odd bytes become 16-bit integers, because vpmaddubsw saturates.
INLINE PairRegister dot_bytes(PairRegister total, PairRegister a, PairRegister b) {
#if defined(__AVX512VNNI__)
  return (PairRegister)_mm512_dpbusd_epi32((__m512i)total, (__m512i)b, (__m512i)a);
#else
  typedef int16_t Shorts __attribute__((vector_size(4 * kRegisterLanes), may_alias));
  const PairRegister bytes = PairRegister{} + 0x00ff00ff;
  const PairRegister even = multiply_shorts((PairRegister)((Shorts)((Shorts)a << 8) >> 8), b & bytes);
  const PairRegister odd = multiply_shorts((PairRegister)((Shorts)a >> 8), (b >> 8) & bytes);
  return total + even + odd;
#endif
}

// As `dot`, of one pair b in all lanes, which the instruction broadcasts by itself. Compilers would use a register.
INLINE Register dot_all(Register total, PairRegister a, const Pair* b) {
#if defined(__AVX512BF16__)
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(total) : "v"(a), "m"(*b));
  return total;
#else
  return dot(total, a, broadcast(*b));
#endif
}

// As dot_bytes, of unsigned bytes a up to 24 and a quad b of signed bytes in all lanes, for a run of products: four
// quads, or eight where a is at most 15. Sums of a run do not saturate 16 bits: 4 * 2 * 24 * 127 < 2^15.
#if defined(__AVX512VNNI__) || !defined(__AVX2__)
constexpr bool kRunsOfShorts = false;
INLINE PairRegister begin_run(PairRegister total) { return total; }
INLINE PairRegister dot_run(PairRegister run, PairRegister a, const Pair* b) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(run) : "v"(a), "m"(*b));
  return run;
#else
  return dot_bytes(run, broadcast(*b), a);
#endif
}
INLINE PairRegister end_run(PairRegister, PairRegister run) { return run; }
#else
constexpr bool kRunsOfShorts = true;
INLINE PairRegister begin_run(PairRegister) { return PairRegister{}; }
INLINE PairRegister dot_run(PairRegister run, PairRegister a, const Pair* b) {
#if defined(__AVX512BW__)
  return (PairRegister)_mm512_add_epi16((__m512i)run, _mm512_maddubs_epi16((__m512i)a, (__m512i)broadcast(*b)));
#else
  return (PairRegister)_mm256_add_epi16((__m256i)run, _mm256_maddubs_epi16((__m256i)a, (__m256i)broadcast(*b)));
#endif
}
INLINE PairRegister end_run(PairRegister total, PairRegister run) {
  return total + multiply_shorts(run, PairRegister{} + 0x00010001);
}
#endif

// Numbers of 16 bits: IEEE 754 halves.
INLINE Register load_halves(const void* p) {
#if defined(__AVX512F__)
  return (Register)_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Register)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  uint16_t halves[kRegisterLanes];
  std::memcpy(halves, p, sizeof halves);
  Register x;
  for (int i = 0; i < kRegisterLanes; i++) x[i] = half_to_float(halves[i]);
  return x;
#endif
}

// Unsigned bytes and shorts as integers.
INLINE PairRegister load_bytes(const void* p) {
#if defined(__AVX512F__)
  return (PairRegister)_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (PairRegister)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#else
  PairRegister x;
  for (int i = 0; i < kRegisterLanes; i++) x[i] = static_cast<const uint8_t*>(p)[i];
  return x;
#endif
}

INLINE PairRegister load_shorts(const void* p) {
#if defined(__AVX512F__)
  return (PairRegister)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (PairRegister)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  PairRegister x;
  for (int i = 0; i < kRegisterLanes; i++) x[i] = static_cast<const bf16*>(p)[i];
  return x;
#endif
}

// Bytes of a and b in turns: in each 128 bits, of the first 8 bytes and of the last 8.
INLINE void interleave_bytes(PairRegister a, PairRegister b, PairRegister out[2]) {
#if defined(__AVX512BW__)
  out[0] = (PairRegister)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b);
  out[1] = (PairRegister)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  out[0] = (PairRegister)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b);
  out[1] = (PairRegister)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b);
#else
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  static_assert(sizeof a == sizeof(Bytes));
  out[0] = (PairRegister)__builtin_shuffle((Bytes)a, (Bytes)b,
                                           Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
  out[1] = (PairRegister)__builtin_shuffle((Bytes)a, (Bytes)b,
                                           Bytes{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#endif
}

// A table of 16 bytes, four times.
struct alignas(64) ByteTable {
  uint8_t entries[64];
};

// Each byte: the entry of the low half of a byte of x.
INLINE PairRegister look_up(const ByteTable& table, PairRegister x) {
#if defined(__AVX512VBMI__)
  return (PairRegister)_mm512_permutexvar_epi8((__m512i)x, _mm512_load_si512(&table));
#elif defined(__AVX512BW__)
  return (PairRegister)_mm512_shuffle_epi8(_mm512_load_si512(&table), (__m512i)(x & 0x0f0f0f0f));
#elif defined(__AVX2__)
  const __m256i entries = _mm256_load_si256(reinterpret_cast<const __m256i*>(&table));
  return (PairRegister)_mm256_shuffle_epi8(entries, (__m256i)(x & 0x0f0f0f0f));
#else
  uint8_t bytes[sizeof x];
  std::memcpy(bytes, &x, sizeof x);
  for (uint8_t& byte : bytes) byte = table.entries[byte & 15];
  std::memcpy(&x, bytes, sizeof x);
  return x;
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
