// The one inner loop of all products: up to 12 rows by 32 columns, whose sums stay in registers.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace ISA {

using namespace pypto;

// 12 x 2 sums + 2 weights + 1 broadcast of 32 registers; two AVX2 registers make one of ours, and there are 16.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 3;
#endif

// `pairs` of the summed dimension. `left` and `right` lead to columns 0-15 and 16-31; `ahead` are two addresses that will
// be read soon, or null: while the stretch is summed they advance by `Tile::ahead_step` bytes and are fetched.
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
};

// c[m][0..15] = sum over p of a(m, p) . left[p], c[m][16..31] likewise with right. Every sum runs over p in order in one
// register, so that a row's result depends neither on how many rows there are nor on what stands beside it.
// a(m, p) is a[p * M + m] where kRow is 0, else a[m * kRow + p].
template <int M, int kRow>
static void multiply(const Tile& t) {
  Floats left[M], right[M];
#pragma GCC unroll 12
  for (int m = 0; m < M; m++) left[m] = right[m] = Floats{};
  const Pair* a = t.a;
  const int64_t step = t.step, ahead_step = t.ahead_step;
  for (const Stretch* s = t.stretches; s != t.stretches + t.num_stretches; s++) {
    const Pair *l = s->left, *r = s->right;
    const char *ahead0 = s->ahead[0], *ahead1 = s->ahead[1];
    for (int64_t p = s->pairs; p > 0; p--) {
      if (ahead0) {
        __builtin_prefetch(ahead0);
        __builtin_prefetch(ahead1);
        ahead0 += ahead_step;
        ahead1 += ahead_step;
      }
      const Ints x = load_pairs(l), y = load_pairs(r);
#pragma GCC unroll 12
      for (int m = 0; m < M; m++) {
        const Ints broadcast = set1(a[m * (kRow ? kRow : 1)]);
        left[m] = dot(left[m], x, broadcast);
        right[m] = dot(right[m], y, broadcast);
      }
      a += kRow ? 1 : M;
      l += step;
      r += step;
    }
  }
  float* c = t.c;
  const int64_t ldc = t.ldc;
#pragma GCC unroll 12
  for (int m = 0; m < M; m++) {
    store(c + m * ldc, left[m]);
    store(c + m * ldc + kLanes, right[m]);
  }
}

template <int kRow>
INLINE void multiply(int64_t rows, const Tile& t) {
  switch (rows) {
    case 1: return multiply<1, kRow>(t);
    case 2: return multiply<2, kRow>(t);
    case 3: return multiply<3, kRow>(t);
#if defined(__AVX512F__)
    case 4: return multiply<4, kRow>(t);
    case 5: return multiply<5, kRow>(t);
    case 6: return multiply<6, kRow>(t);
    case 7: return multiply<7, kRow>(t);
    case 8: return multiply<8, kRow>(t);
    case 9: return multiply<9, kRow>(t);
    case 10: return multiply<10, kRow>(t);
    case 11: return multiply<11, kRow>(t);
    case 12: return multiply<12, kRow>(t);
#endif
  }
}

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// Stores 16 floats as 8 pairs, `stride` pairs apart.
INLINE void store_pairs(Pair* out, int64_t stride, Floats x) {
  bf16 rounded[kLanes];
  store_narrow(rounded, x);
  for (int i = 0; i < kLanes / 2; i++) std::memcpy(out + i * stride, rounded + 2 * i, sizeof(Pair));
}

}  // namespace ISA
