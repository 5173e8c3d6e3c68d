// Lines of packed 4-bit codes and FP8, and the heads before them, in registers; weights.h says what they hold.
#pragma once

#include "gemm_tile.h"

namespace ISA {

// Signed bytes as floats.
INLINE Register load_small(const char* p) { return as_floats(load_bytes(p) << 24 >> 24); }

// The scales of a head in float32, or its minimums, for a register of outputs.
struct Scales {
  alignas(64) float values[16 * kRegisterLanes];
  ALWAYS_INLINE void read_split(const char* head, const Form& form, int64_t heads, int64_t lane, bool minimums) {
    const char* halves = head + heads * form.group_bytes() + (minimums ? 32 : 0);
    const Register half = load_halves(halves + lane * 2);
    const char* small = head + (minimums ? heads * kLanes : 0) + lane;
    for (int64_t i = 0; i < heads; i++) store_sums(values + i * kRegisterLanes, half * load_small(small + i * kLanes));
  }
  ALWAYS_INLINE void read_minimums(const char* head, const Form& form, int64_t heads, int64_t lane) {
    if (form.scale == Scale::kSplit) return read_split(head, form, heads, lane, true);
    read(head + heads * form.scale_bytes(), form.scale, heads, lane);
  }
  ALWAYS_INLINE void read(const char* head, Scale scale, int64_t heads, int64_t lane) {
    const auto store_all = [&](auto load) __attribute__((always_inline)) {
      for (int64_t i = 0; i < heads; i++) store_sums(values + i * kRegisterLanes, load(i * kLanes + lane));
    };
    switch (scale) {
      case Scale::kBf16: return store_all([&](int64_t at) { return (Register)(load_shorts(head + at * 2) << 16); });
      case Scale::kF16: return store_all([&](int64_t at) { return load_halves(head + at * 2); });
      case Scale::kF32:
        return store_all([&](int64_t at) { return load_sums(reinterpret_cast<const float*>(head) + at); });
      case Scale::kE8m0:
        return store_all([&](int64_t at) {
          const PairRegister bits = load_bytes(head + at) << 23;
          return (Register)(bits | ((bits == 0) & 0x00400000));  // byte 0 is 2^-127
        });
      default:
        return store_all(
            [&](int64_t at) { return (Register)broadcast(reinterpret_cast<const Pair*>(head)[at / kLanes]); });
    }
  }
  ALWAYS_INLINE Register of(int64_t group) const { return load_sums(values + group * kRegisterLanes); }
};

INLINE PairRegister group_zeros(const char* head, const Form& form, int64_t index, int64_t lane) {
  return load_bytes(head + form.heads() * form.scale_bytes() + index * kLanes + lane);
}

// The codes of a line as unsigned bytes: quads of inputs k to k + 3, and of the 4 after them. `kRun` lines make a run;
// every group is whole runs.
template <Weights kWeights>
struct Codes {  // int4
  static constexpr int kRun = 4, kOffset = 8, kQuads = 2;
  static constexpr bool kAnyByte = false;  // or all are small, see dot_run
  static ALWAYS_INLINE void unpack(PairRegister line, PairRegister& low, PairRegister& high) {
    low = line & 0x0f0f0f0f;
    high = (line >> 4) & 0x0f0f0f0f;
  }
};

struct ShortGroups : Codes<Weights::kInt4> {  // int4 in groups of 16
  static constexpr int kRun = 2;
};

#define FOUR_TIMES(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__

template <>
struct Codes<Weights::kE2m1> {  // 12 plus twice the value
  static constexpr int kRun = 2, kOffset = 12, kQuads = 2;
  static constexpr bool kAnyByte = false;
  static constexpr ByteTable kBytes = {{FOUR_TIMES(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)}};
  static ALWAYS_INLINE void unpack(PairRegister line, PairRegister& low, PairRegister& high) {
    low = look_up(kBytes, line);
    high = look_up(kBytes, line >> 4);
  }
};

template <>
struct Codes<Weights::kIq4> {  // 128 plus the value
  static constexpr int kRun = 4, kOffset = 128, kQuads = 2;
  static constexpr bool kAnyByte = true;
  static constexpr ByteTable kBytes = {
      {FOUR_TIMES(1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)}};
  static ALWAYS_INLINE void unpack(PairRegister line, PairRegister& low, PairRegister& high) {
    low = look_up(kBytes, line);
    high = look_up(kBytes, line >> 4);
  }
};

template <>
struct Codes<Weights::kBytes> {  // one quad
  static constexpr int kRun = 4, kOffset = 128, kQuads = 1;
  static constexpr bool kAnyByte = true;
  static ALWAYS_INLINE void unpack(PairRegister line, PairRegister& quad, PairRegister&) { quad = line; }
};

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

// A line of weights, for a register of outputs, as pairs of consecutive inputs for bfloat16 activations.
template <Weights kWeights, bool kZeros = false>
struct Line {  // codes, less their offset or zero points
  static constexpr int kPairs = 4;
  static constexpr bool kWithZeros = kZeros;
#if defined(__AVX512BW__)
  typedef uint16_t Shorts __attribute__((vector_size(64), may_alias));
  static constexpr ShortTable kShorts = shorts_of(kWeights, kZeros);
  Shorts codes, zeros;
  ALWAYS_INLINE void read(PairRegister line, PairRegister zero) {
    codes = (Shorts)line;
    zeros = (Shorts)(zero | zero << 16);
  }
  ALWAYS_INLINE Operand pair(int i) const {
    constexpr int kShifts[] = {0, 8, 4, 12};
    const Shorts shifted = codes >> kShifts[i], places = kZeros ? (shifted & 15) - zeros : shifted;
    return operand((PairRegister)_mm512_permutexvar_epi16((__m512i)places, _mm512_load_si512(&kShorts)));
  }
#else
  PairRegister quads[2], offset;
  ALWAYS_INLINE void read(PairRegister line, PairRegister zero) {
    Codes<kWeights>::unpack(line, quads[0], quads[1]);
    offset = kZeros ? zero : PairRegister{} + Codes<kWeights>::kOffset;
  }
  ALWAYS_INLINE Operand pair(int i) const {
    const auto value = [&](int byte)
        __attribute__((always_inline)) { return as_floats(byte_of(quads[i / 2], byte) - offset); };
    return {value(i % 2), value(2 + i % 2)};
  }
#endif
};

template <>
struct Line<Weights::kFp8> {
  static constexpr int kPairs = 2;
  static constexpr bool kWithZeros = false;
  PairRegister pairs[2];
#if defined(__AVX512VBMI__)
  static constexpr MagnitudeTables kTables = magnitudes();
  static ALWAYS_INLINE PairRegister look_up(const uint8_t* table, PairRegister x) {
    return (PairRegister)_mm512_permutex2var_epi8(_mm512_load_si512(table), (__m512i)x, _mm512_load_si512(table + 64));
  }
  ALWAYS_INLINE void read(PairRegister line, PairRegister) {
    const PairRegister low = look_up(kTables.low, line);
    const PairRegister high = look_up(kTables.high, line) | (line & static_cast<int32_t>(0x80808080));
    interleave_bytes(low, high, pairs);
  }
  ALWAYS_INLINE Operand pair(int i) const { return operand(pairs[i]); }
#else
  // The number in the highest byte of each lane. Exact for subnormal numbers too, which float32 holds until they are
  // multiplied.
  static ALWAYS_INLINE Register value(PairRegister x) {
    return (Register)((x >> 4) & static_cast<int32_t>(0x87f00000)) * 0x1p120f;
  }
  ALWAYS_INLINE void read(PairRegister line, PairRegister) { interleave_bytes(PairRegister{}, line, pairs); }
  ALWAYS_INLINE Operand pair(int i) const { return {value(pairs[i] << 16), value(pairs[i])}; }
#endif
};

// Calls `each` with the kind of lines of a form, as a type, for bfloat16 activations.
template <typename Each>
INLINE void with_line(const Form& form, Each each) {
  switch (form.weights) {
    case Weights::kInt4:
      if (form.zeros) return each(std::type_identity<Line<Weights::kInt4, true>>());
      return each(std::type_identity<Line<Weights::kInt4>>());
    case Weights::kE2m1: return each(std::type_identity<Line<Weights::kE2m1>>());
    default: return each(std::type_identity<Line<Weights::kFp8>>());
  }
}

}  // namespace ISA
