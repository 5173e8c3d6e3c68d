// The microkernels of quantized weights: 4-bit codes by int8 or bfloat16 activations, and FP8 by bfloat16. Half a panel
// by up to 12 rows. Sums within a group stay in registers; groups are added in float32 in order, so a row's result does
// not depend on the other rows.
#pragma once

#include "gemm_tile.h"

namespace ISA {

struct HalfTile {
  const Form* form;
  int64_t k;
  const char* weight;  // of the first half panel; the next one follows
  const Pair* x;       // strip
  const char* ahead;   // to prefetch, or null; advances by `ahead_step` with each line
  int64_t ahead_step;
  float* c;  // [rows][kPanel], 16 columns are written
};

// Where a kernel for M rows is in the stream of a half panel. For one row nothing is prefetched.
template <int M>
struct Stream {
  const char *at, *ahead;
  int64_t ahead_step;
  ALWAYS_INLINE const char* skip(int64_t bytes) {
    const char* here = at;
    at += bytes;
    if (M > 1 && ahead) {
      fetch(ahead);
      ahead += bytes / 64 * ahead_step;
    }
    return here;
  }
};

// Scale and zero points of a group, the `index`-th of its head, for outputs `lane` on.
INLINE Register load_scale(const char* head, Scale scale, int64_t index, int64_t lane) {
  const int64_t at = index * kLanes + lane;
  switch (scale) {
    case Scale::kBf16: return (Register)(load_shorts(head + at * 2) << 16);
    case Scale::kF16: return load_halves(head + at * 2);
    case Scale::kF32: return load_sums(reinterpret_cast<const float*>(head) + at);
    case Scale::kE8m0: {
      const PairRegister bits = load_bytes(head + at) << 23;
      return (Register)(bits | ((bits == 0) & 0x00400000));  // byte 0 is 2^-127
    }
    default: return (Register)broadcast(reinterpret_cast<const Pair*>(head)[index]);
  }
}

// The scales of a head in float32, for a register of outputs.
struct Scales {
  alignas(64) float values[16 * kRegisterLanes];
  ALWAYS_INLINE void read(const char* head, Scale scale, int64_t heads, int64_t lane) {
    for (int64_t i = 0; i < heads; i++) store_sums(values + i * kRegisterLanes, load_scale(head, scale, i, lane));
  }
  ALWAYS_INLINE Register of(int64_t group) const { return load_sums(values + group * kRegisterLanes); }
};

INLINE PairRegister group_zeros(const char* head, const Form& form, int64_t index, int64_t lane) {
  return load_bytes(head + form.heads() * form.scale_bytes() + index * kLanes + lane);
}

// The codes of a line as unsigned bytes: quads of inputs k to k + 3, and of the 4 behind. `kRun` lines make a run; every
// group is whole runs.
template <Weights kWeights>
struct Codes {  // int4
  static constexpr int kRun = 4, kOffset = 8;
  static ALWAYS_INLINE void unpack(PairRegister line, PairRegister& low, PairRegister& high) {
    low = line & 0x0f0f0f0f;
    high = (line >> 4) & 0x0f0f0f0f;
  }
};

#define FOUR_TIMES(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__

template <>
struct Codes<Weights::kE2m1> {  // 12 plus twice the value
  static constexpr int kRun = 2, kOffset = 12;
  static constexpr ByteTable kBytes = {{FOUR_TIMES(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)}};
  static ALWAYS_INLINE void unpack(PairRegister line, PairRegister& low, PairRegister& high) {
    low = look_up(kBytes, line);
    high = look_up(kBytes, line >> 4);
  }
};

// Codes by int8 activations in groups. A row's sum in a group is exact; times the group's scale it is added to the sum
// of its kScaled inputs, and that, times the activations' scale, to the result.
template <int M, Weights kWeights>
static void multiply_bytes(const HalfTile& t) {
  using Table = Codes<kWeights>;
  // As many sums of a row as hide the latency of a dot, and lines to go round them.
  constexpr int kChains = kRegisterLanes < kLanes || kRunsOfShorts || M > 4 ? 1 : M > 1 ? 2 : 4;
  constexpr int kLines = kRunsOfShorts ? Table::kRun : M > 4 ? 1 : M > 1 ? 2 : Table::kRun;
  const Form form = *t.form;
  const int64_t heads = form.heads(), head_bytes = form.head_bytes(), lines = form.span / 8;
  const int64_t spans = kScaled / form.span, blocks = (t.k + kScaled - 1) / kScaled;
  for (int pass = 0; pass < kHalf; pass++) {
    const int64_t lane = pass * kRegisterLanes;
    Stream<M> stream{t.weight, pass == 0 ? t.ahead : nullptr, t.ahead_step};
    const Pair *x = t.x, *x_scales = t.x + t.k / 4 * M, *starts = x_scales + blocks * M;
    float* c = t.c + lane;
    Scales scales;
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) store_sums(c + m * kPanel, Register{});
    Register block[M] = {};
    int64_t until = spans;  // groups left in the block
    for (int64_t left = t.k / 8; left > 0;) {
      const char* head = stream.skip(head_bytes);
      scales.read(head, form.scale, heads, lane);
      for (int64_t i = 0; i < heads && left > 0; i++) {
        PairRegister sums[M][kChains] = {};
        if (form.zeros) {
          const PairRegister zeros = group_zeros(head, form, i, lane);
#pragma GCC unroll 12
          for (int m = 0; m < M; m++) sums[m][0] = multiply_shorts(zeros, broadcast(starts[m]));
        } else {
#pragma GCC unroll 12
          for (int m = 0; m < M; m++) sums[m][0] = broadcast(starts[m]);
        }
        starts += M;
        const int64_t mine = min(lines, left);
        left -= mine;
        for (int64_t line = 0; line < mine; line += kLines) {
          PairRegister run[M][kChains];
#pragma GCC unroll 12
          for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int chain = 0; chain < kChains; chain++) run[m][chain] = begin_run(sums[m][chain]);
#pragma GCC unroll 4
          for (int each = 0; each < kLines; each++) {
            const int first = 2 * each % kChains, second = (2 * each + 1) % kChains;
            PairRegister low, high;
            const Pair* words = reinterpret_cast<const Pair*>(stream.skip(64));
            Table::unpack(load_register(words + lane), low, high);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) run[m][first] = dot_run(run[m][first], low, x + m);
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) run[m][second] = dot_run(run[m][second], high, x + M + m);
            x += 2 * M;
          }
#pragma GCC unroll 12
          for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int chain = 0; chain < kChains; chain++) sums[m][chain] = end_run(sums[m][chain], run[m][chain]);
        }
        const Register scale = scales.of(i);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
          PairRegister sum = sums[m][0];
#pragma GCC unroll 4
          for (int chain = 1; chain < kChains; chain++) sum += sums[m][chain];
          block[m] = fma_register(as_floats(sum), scale, block[m]);
        }
        if (--until > 0 && left > 0) continue;
        until = spans;
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
          const Register factor = (Register)broadcast(x_scales[m]);
          store_sums(c + m * kPanel, fma_register(block[m], factor, load_sums(c + m * kPanel)));
          block[m] = Register{};
        }
        x_scales += M;
      }
    }
  }
}

// Two whole numbers of float32 that bfloat16 holds, as a pair.
INLINE PairRegister exact_pair(Register even, Register odd) {
  return (((PairRegister)even >> 16) & 0xffff) | ((PairRegister)odd & static_cast<int32_t>(0xffff0000));
}

// bfloat16 of a whole number below 256 times 2^exponent.
constexpr uint16_t bf16_of(int value, int exponent = 0) {
  const int size = value < 0 ? -value : value;
  int top = 0;
  while (size >> (top + 1)) top++;
  if (size == 0) return 0;
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | (127 + top + exponent) << 7 | ((size << (7 - top)) & 127));
}

struct alignas(64) ShortTable {
  uint16_t entries[32];
};

// Values of codes by 4 bits of an index; with zero points, of differences by 5 bits, as a signed number.
constexpr ShortTable shorts_of(Weights weights, bool zeros) {
  ShortTable table{};
  for (int i = 0; i < 32; i++) {
    const int code = i & 15;
    if (zeros) table.entries[i] = bf16_of(i < 16 ? i : i - 32);
    else if (weights == Weights::kInt4) table.entries[i] = bf16_of(code - Codes<Weights::kInt4>::kOffset);
    else table.entries[i] = bf16_of(Codes<Weights::kE2m1>::kBytes.entries[code] - Codes<Weights::kE2m1>::kOffset);
  }
  return table;
}

// The two bytes of bfloat16 for each magnitude of e4m3; those below 8 are subnormal.
struct alignas(64) MagnitudeTables {
  uint8_t low[128], high[128];
};

constexpr MagnitudeTables magnitudes() {
  MagnitudeTables tables{};
  for (int code = 0; code < 128; code++) {
    const uint16_t bits = code < 8 ? bf16_of(code, -9) : bf16_of(8 + (code & 7), (code >> 3) - 10);
    tables.low[code] = static_cast<uint8_t>(bits);
    tables.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return tables;
}

// The lines of weights that bfloat16 activations are multiplied with, as pairs of consecutive inputs.
template <Weights kWeights, bool kZeros>
struct Wide {  // codes, less their offset or zero points
  static constexpr int kPairs = 4, kInputs = 8;
#if defined(__AVX512BW__)
  static constexpr ShortTable kShorts = shorts_of(kWeights, kZeros);
  static ALWAYS_INLINE PairRegister values(__m512i codes, PairRegister zeros) {
    if (kZeros)
      codes = _mm512_sub_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(15)), (__m512i)(zeros | zeros << 16));
    return (PairRegister)_mm512_permutexvar_epi16(codes, _mm512_load_si512(&kShorts));
  }
  static ALWAYS_INLINE void unpack(PairRegister line, PairRegister zeros, PairRegister* out) {
    const __m512i codes = (__m512i)line;
    out[0] = values(codes, zeros);
    out[1] = values(_mm512_srli_epi16(codes, 8), zeros);
    out[2] = values(_mm512_srli_epi16(codes, 4), zeros);
    out[3] = values(_mm512_srli_epi16(codes, 12), zeros);
  }
#else
  static ALWAYS_INLINE void unpack(PairRegister line, PairRegister zeros, PairRegister* out) {
    PairRegister quads[2];
    Codes<kWeights>::unpack(line, quads[0], quads[1]);
    const PairRegister offset = kZeros ? zeros : PairRegister{} + Codes<kWeights>::kOffset;
    for (int i = 0; i < 4; i++) {
      const PairRegister even = quads[i / 2] >> (i % 2 * 8), odd = quads[i / 2] >> (16 + i % 2 * 8);
      out[i] = exact_pair(as_floats((even & 0xff) - offset), as_floats((odd & 0xff) - offset));
    }
  }
#endif
};

template <>
struct Wide<Weights::kFp8, false> {
  static constexpr int kPairs = 2, kInputs = 4;
#if defined(__AVX512VBMI__)
  static constexpr MagnitudeTables kTables = magnitudes();
  static ALWAYS_INLINE PairRegister look_up(const uint8_t* table, PairRegister x) {
    return (PairRegister)_mm512_permutex2var_epi8(_mm512_load_si512(table), (__m512i)x, _mm512_load_si512(table + 64));
  }
  static ALWAYS_INLINE void unpack(PairRegister line, PairRegister, PairRegister* out) {
    const PairRegister low = look_up(kTables.low, line);
    const PairRegister high = look_up(kTables.high, line) | (line & static_cast<int32_t>(0x80808080));
    interleave_bytes(low, high, out);
  }
#else
  // Exact for subnormal numbers too, which float32 holds until they are multiplied.
  static ALWAYS_INLINE Register value(PairRegister byte) {
    const Register size = (Register)((byte & 0x7f) << 20) * 0x1p120f;
    return (Register)((PairRegister)size | (byte & 0x80) << 24);
  }
  static ALWAYS_INLINE void unpack(PairRegister line, PairRegister, PairRegister* out) {
    interleave_bytes(line, PairRegister{}, out);
    for (int i = 0; i < 2; i++) out[i] = exact_pair(value(out[i]), value(out[i] >> 16));
  }
#endif
};

// Codes or FP8 by bfloat16 activations, for `kHalves` half panels in step: each sum is a chain of dots, and few rows
// are too few chains.
template <int M, int kHalves, Weights kWeights, bool kZeros>
static void multiply_wide(const HalfTile& t) {
  using Line = Wide<kWeights, kZeros>;
  const Form form = *t.form;
  const int64_t heads = form.heads(), head_bytes = form.head_bytes(), half_bytes = form.half_bytes(t.k);
  const int64_t lines = form.span / Line::kInputs;
  for (int pass = 0; pass < kHalf; pass++) {
    const int64_t lane = pass * kRegisterLanes;
    Stream<M> stream{t.weight, pass == 0 ? t.ahead : nullptr, t.ahead_step};
    const Pair* x = t.x;
    Register total[M][kHalves] = {};
    Scales scales[kHalves];
    for (int64_t left = t.k / Line::kInputs; left > 0;) {
      const char* head = stream.skip(head_bytes);
      for (int half = 0; half < kHalves; half++) scales[half].read(head + half * half_bytes, form.scale, heads, lane);
      for (int64_t i = 0; i < heads && left > 0; i++) {
        Register sums[M][kHalves] = {};
        PairRegister zeros[kHalves] = {};
        if (kZeros)
          for (int half = 0; half < kHalves; half++) zeros[half] = group_zeros(head + half * half_bytes, form, i, lane);
        const int64_t mine = min(lines, left);
        left -= mine;
        for (int64_t line = 0; line < mine; line++) {
          if (kHalves == 2 && stream.ahead) fetch(stream.ahead + half_bytes);
          const char* words = stream.skip(64);
#pragma GCC unroll 2
          for (int half = 0; half < kHalves; half++) {
            PairRegister pairs[Line::kPairs];
            Line::unpack(load_register(reinterpret_cast<const Pair*>(words + half * half_bytes) + lane), zeros[half],
                         pairs);
#pragma GCC unroll 4
            for (int i = 0; i < Line::kPairs; i++)
#pragma GCC unroll 12
              for (int m = 0; m < M; m++)
                sums[m][half] = dot_all(sums[m][half], pairs[i], x + i * M + m);
          }
          x += Line::kPairs * M;
        }
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; half++) {
          const Register scale = scales[half].of(i);
#pragma GCC unroll 12
          for (int m = 0; m < M; m++) total[m][half] = fma_register(sums[m][half], scale, total[m][half]);
        }
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; half++) store_sums(t.c + m * kPanel + half * kLanes + lane, total[m][half]);
  }
}

// A panel by the strip of `rows` rows, half by half.
template <typename Multiply>
INLINE void halves(HalfTile t, Multiply multiply) {
  for (int half = 0; half < 2; half++) {
    multiply(t);
    const int64_t bytes = t.form->half_bytes(t.k);
    t.weight += bytes;
    t.c += kLanes;
    if (t.ahead) t.ahead += bytes / 64 * t.ahead_step;
  }
}

template <Weights kWeights>
INLINE void panel_bytes(int64_t rows, const HalfTile& t) {
  with_rows(rows, [&](auto count) { halves(t, multiply_bytes<count(), kWeights>); });
}

template <Weights kWeights, bool kZeros = false>
INLINE void panel_wide(int64_t rows, const HalfTile& t) {
  with_rows(rows, [&](auto count) {
    if constexpr (count() <= 4 && kRegisterLanes == kLanes) multiply_wide<count(), 2, kWeights, kZeros>(t);
    else halves(t, multiply_wide<count(), 1, kWeights, kZeros>);
  });
}

// A panel of quantized weights by a strip.
INLINE void multiply_quantized(int64_t rows, Inputs inputs, const HalfTile& t) {
  const bool bytes = inputs == Inputs::kGroups;
  switch (t.form->weights) {
    case Weights::kInt4:
      if (bytes) return panel_bytes<Weights::kInt4>(rows, t);
      if (t.form->zeros) return panel_wide<Weights::kInt4, true>(rows, t);
      return panel_wide<Weights::kInt4>(rows, t);
    case Weights::kE2m1:
      if (bytes) return panel_bytes<Weights::kE2m1>(rows, t);
      return panel_wide<Weights::kE2m1>(rows, t);
    default: return panel_wide<Weights::kFp8>(rows, t);
  }
}

}  // namespace ISA
