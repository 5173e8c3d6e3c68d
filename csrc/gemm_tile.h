// The microkernel of all GEMMs: up to 12 rows by 32 columns, whose sums stay in registers.
#pragma once

#include <type_traits>

#include "ops.h"
#include "registers.h"

namespace ISA {

using namespace pypto;

// A tile is computed in one pass where its sums fit the registers, else in one pass for each half of the columns.
// AVX-512: 12 rows x 2 registers + 2 of weights + 1 broadcast of 32. AVX2: 4 x 2 + 4 of halved weights + 2 of 16.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12, kPasses = 1;
#elif defined(__AVX2__)
constexpr int kMaxRows = 4, kPasses = 2;
#else
constexpr int kMaxRows = 2, kPasses = 2;
#endif
constexpr int kHalf = kLanes / kRegisterLanes;  // registers that 16 columns take

// A contiguous piece of k: `pairs` pairs, or quads. `left` and `right` point to columns 0-15 and 16-31. `ahead` are two
// addresses to prefetch, or null; they advance by `Tile::ahead_step` bytes with each step.
struct Stretch {
  const Pair *left, *right;
  int64_t pairs;
  const char* ahead[2];
};

struct Tile {
  const Pair* a;
  const Stretch* stretches;
  int64_t num_stretches;
  int64_t step;  // pairs from one step of `left` and `right` to the next
  int64_t ahead_step;
  float* c;  // [rows, ldc], 32 columns are written
  int64_t ldc;
  bool add;  // to what stands in c
  const int32_t* compensation = nullptr;  // what sums of bytes begin with, for 32 columns
};

// The dot product instruction, over 32 bits of k at a time.
struct Bf16Dot {  // pairs of bfloat16, summed in float32
  using Sums = Register;
  static constexpr int64_t kEach = 2;
  static ALWAYS_INLINE Sums begin(const Tile& t, int64_t row, int64_t column) {
    return t.add ? load_sums(t.c + row * t.ldc + column) : Sums{};
  }
  static ALWAYS_INLINE Sums add(Sums total, PairRegister weights, PairRegister x) { return dot(total, weights, x); }
  static ALWAYS_INLINE Register end(Sums total) { return total; }
};

struct Int8Dot {  // quads of int8 weights and uint8 activations, summed exactly in int32
  using Sums = PairRegister;
  static constexpr int64_t kEach = 4;
  static ALWAYS_INLINE Sums begin(const Tile& t, int64_t, int64_t column) {
    return load_register(reinterpret_cast<const Pair*>(t.compensation + column));
  }
  static ALWAYS_INLINE Sums add(Sums total, PairRegister weights, PairRegister x) {
    return dot_bytes(total, weights, x);
  }
  static ALWAYS_INLINE Register end(Sums total) { return as_floats(total); }
};

// c[m][0..15] = sum over p of a(m, p) . left[p], c[m][16..31] likewise with right. Every sum runs over p in order in
// one register, so a row's result does not depend on the other rows or on their number (batch invariance). a(m, p) is
// a[p * M + m] where kRow is 0, else a[m * kRow + p].
template <int M, int kRow, typename Kind>
static void multiply(const Tile& t) {
  constexpr int kColumns = 2 / kPasses * kHalf;
  for (int pass = 0; pass < kPasses; pass++) {
    typename Kind::Sums sums[M][kColumns];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int i = 0; i < kColumns; i++)
        sums[m][i] = Kind::begin(t, m, pass * kLanes + i * kRegisterLanes);
    const Pair* a = t.a;
    const int64_t step = t.step, ahead_step = t.ahead_step;
    for (const Stretch* s = t.stretches; s != t.stretches + t.num_stretches; s++) {
      const Pair *b = pass == 0 ? s->left : s->right, *right = s->right;
      const char *ahead0 = pass == 0 ? s->ahead[0] : nullptr, *ahead1 = s->ahead[1];
      for (int64_t p = s->pairs; p > 0; p--) {
        if (ahead0) {
          fetch(ahead0);
          fetch(ahead1);
          ahead0 += ahead_step;
          ahead1 += ahead_step;
        }
        PairRegister weights[kColumns];
#pragma GCC unroll 8
        for (int i = 0; i < kColumns; i++)
          weights[i] = load_register(i < kHalf ? b + i * kRegisterLanes : right + (i - kHalf) * kRegisterLanes);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
          const PairRegister x = broadcast(a[m * (kRow ? kRow : 1)]);
#pragma GCC unroll 8
          for (int i = 0; i < kColumns; i++) sums[m][i] = Kind::add(sums[m][i], weights[i], x);
        }
        a += kRow ? 1 : M;
        b += step;
        right += step;
      }
    }
    float* c = t.c + pass * kLanes;
    const int64_t ldc = t.ldc;
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int i = 0; i < kColumns; i++) store_sums(c + m * ldc + i * kRegisterLanes, Kind::end(sums[m][i]));
  }
}

// Calls `each` with the number of rows of a strip as a constant.
template <typename Each>
INLINE void with_rows(int64_t rows, Each each) {
  switch (rows) {
    case 1: return each(std::integral_constant<int, 1>());
    case 2: return each(std::integral_constant<int, 2>());
#if defined(__AVX2__)
    case 3: return each(std::integral_constant<int, 3>());
    case 4: return each(std::integral_constant<int, 4>());
#endif
#if defined(__AVX512F__)
    case 5: return each(std::integral_constant<int, 5>());
    case 6: return each(std::integral_constant<int, 6>());
    case 7: return each(std::integral_constant<int, 7>());
    case 8: return each(std::integral_constant<int, 8>());
    case 9: return each(std::integral_constant<int, 9>());
    case 10: return each(std::integral_constant<int, 10>());
    case 11: return each(std::integral_constant<int, 11>());
    case 12: return each(std::integral_constant<int, 12>());
#endif
  }
}

template <int kRow, typename Kind = Bf16Dot>
INLINE void multiply(int64_t rows, const Tile& t) {
  with_rows(rows, [&](auto count) { multiply<count(), kRow, Kind>(t); });
}

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// Stores 16 floats as 8 pairs, `stride` pairs apart.
INLINE void store_pairs(Pair* out, int64_t stride, Floats x) {
  bf16 rounded[kLanes];
  store_narrow(rounded, x);
  for (int i = 0; i < kLanes / 2; i++) std::memcpy(out + i * stride, rounded + 2 * i, sizeof(Pair));
}

}  // namespace ISA
