// Single machine registers, and the dot products of GEMMs on them.
#pragma once

#include "simd.h"

namespace ISA {

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

INLINE PairRegister broadcast(Pair x) {
  PairRegister all = PairRegister{} + static_cast<int32_t>(x);
#if defined(__AVX2__) && !defined(__AVX512BF16__)
  asm("" : "+v"(all));  // compilers would take a pair or quad apart first, and broadcast the parts
#endif
  return all;
}

INLINE void store_sums(float* p, Register x) { std::memcpy(p, &x, sizeof x); }

INLINE void store_register(Pair* p, PairRegister x) { std::memcpy(p, &x, sizeof x); }

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

// Pairs as dots take them: where the machine has no dot of pairs, both numbers in float32.
#if defined(__AVX512BF16__)
constexpr bool kDotsOfPairs = true;
using Operand = PairRegister;
INLINE Operand operand(PairRegister pairs) { return pairs; }
INLINE PairRegister pairs_of(Operand x) { return x; }
#else
constexpr bool kDotsOfPairs = false;
struct Operand {
  Register even, odd;
};
INLINE Operand operand(PairRegister pairs) {
  return {(Register)(pairs << 16), (Register)(pairs & static_cast<int32_t>(0xffff0000))};
}
// The reverse, of numbers that bfloat16 holds.
INLINE PairRegister pairs_of(Operand x) {
  return (((PairRegister)x.even >> 16) & 0xffff) | ((PairRegister)x.odd & static_cast<int32_t>(0xffff0000));
}
#endif

// total + a.even * b.even + a.odd * b.odd in every lane; one vdpbf16ps where the machine has it.
INLINE Register dot_operands(Register total, Operand a, Operand b) {
#if defined(__AVX512BF16__)
  return (Register)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
  return fma_register(a.odd, b.odd, fma_register(a.even, b.even, total));
#endif
}

INLINE Register dot(Register total, PairRegister a, PairRegister b) {
  return dot_operands(total, operand(a), operand(b));
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

// The same of one pair b in all lanes, which the instruction broadcasts by itself. Compilers would use a register.
INLINE Register dot_all(Register total, Operand a, const Pair* b) {
#if defined(__AVX512BF16__)
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(total) : "v"(a), "m"(*b));
  return total;
#else
  return dot_operands(total, a, operand(broadcast(*b)));
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

// Byte i of each lane, unsigned.
INLINE PairRegister byte_of(PairRegister x, int i) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const int32_t first = static_cast<int32_t>(0x80808000) + i;
  const __m256i lanes = _mm256_setr_epi32(first, first + 4, first + 8, first + 12, first, first + 4, first + 8, first + 12);
  return (PairRegister)_mm256_shuffle_epi8((__m256i)x, lanes);
#else
  return (x >> (8 * i)) & 0xff;
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

}  // namespace ISA
