// Forms of packed weights and of the activations that they are multiplied with, and how weights are packed.
#pragma once

#include <cstdint>

#include "fields.h"
#include "types.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace pypto {

// Packed bfloat16 weights [n, k]: panels of 32 outputs, each [k / 2][2][16] pairs in VNNI layout. The GEMM reads a
// panel as one linear stream; two loads fill two registers with 16 outputs each. Outputs from n on are zero.
constexpr int kPanel = 32;
constexpr int kGateHalf = kPanel / 2;  // gate or up in a shared panel

// Packed int8 weights: the same panels, [k / 4][2][16] quads. A quad is four int8 along k, the first one lowest. Int8
// activations: strips of [k / 4][rows] quads of uint8, each number plus 128. The sums start at -128 times the sum of an
// output's weights, which cancels that offset.

// Packed 4-bit codes and FP8 weights: half panels of 16 outputs, one after the other, each one stream of lines of 64
// bytes. A line of codes is [16][4] bytes of 8 inputs: the low halves of an output's bytes belong to inputs k, k + 2,
// k + 1, k + 3, the high ones to those 4 further on. So both the quads of int8 activations and, with every other byte,
// the pairs of bfloat16 ones meet their weights without a permutation. A line of FP8 is [4][2][4][2] bytes of 4 inputs:
// of 4 outputs, the first two inputs of each, then the others; interleaving the two bytes of bfloat16 makes them pairs.
// A line of bytes is [16] quads of 4 inputs in the order k, k + 2, k + 1, k + 3.
// Before their lines lie the scales of `heads` groups, [heads][16] as stored, and their zero points, [heads][16] bytes,
// or minimums, of the scales' type. Scales and minimums of kSplit are int8; after them lie the halves that multiply those
// of 16 outputs in kSuper inputs.
//
// Int8 activations in groups, for codes and bytes: strips of [k / 4][rows] quads of int8 in that order, [k / 128][rows]
// float32 scales, and [groups][rows] int32 sums times -offset, at which the sums of a group of weights start. Int16
// activations have two such quads of 4 inputs, one after the other: 256 times the first, plus the second.
constexpr int kScaled = 128;  // inputs that share a scale of int8 or int16 activations in groups
constexpr int kSuper = 256;   // inputs that share the halves of kSplit

// What weights are packed as: int4 is code - 8 or code - zero point, e2m1 is 0, 1, 2, 3, 4, 6, 8, 12 and their
// negatives, twice the values of the type, iq4 the table of GGUF's IQ4_NL, and bytes are byte - 128. With minimums, int4
// and bytes are themselves.
ENUM(Weights, kBf16, kInt8, kInt4, kE2m1, kFp8, kIq4, kBytes)

// What activations are packed as.
ENUM(Inputs, kBf16, kInt8, kGroups, kWideGroups)

// How scales are packed: one for each of 16 outputs, or one float32 shared by them; kSplit are int8 times a half.
ENUM(Scale, kBf16, kF16, kF32, kE8m0, kShared, kSplit)

// The form of packed weights. Of codes, bytes and FP8, `span` inputs share a scale, and with `zeros` a zero point, or
// with `minimums` a number that is subtracted from each product of scale and code.
struct Form {
  Weights weights;
  Scale scale;
  int64_t span;
  bool zeros, minimums;
  FIELDS(weights, scale, span, zeros, minimums)

  ALWAYS_INLINE int64_t groups(int64_t k) const { return (k + span - 1) / span; }
  ALWAYS_INLINE int64_t line_inputs() const {
    return weights == Weights::kFp8 || weights == Weights::kBytes ? 4 : 8;
  }
  // Bytes of the scales of one group, and where its zero points begin.
  ALWAYS_INLINE int64_t scale_bytes() const {
    switch (scale) {
      case Scale::kBf16:
      case Scale::kF16: return 32;
      case Scale::kF32: return 64;
      case Scale::kE8m0:
      case Scale::kSplit: return 16;
      default: return 4;
    }
  }
  // Groups whose scales and zero points fill whole lines, and the bytes of those. A few at a time are read faster.
  ALWAYS_INLINE int64_t group_bytes() const { return scale_bytes() * (minimums ? 2 : 1) + (zeros ? 16 : 0); }
  ALWAYS_INLINE int64_t heads() const {
    if (scale == Scale::kSplit) return kSuper / span;
    const int64_t each = group_bytes();
    int64_t count = 4;
    while (count * each % 64) count *= 2;
    return count;
  }
  ALWAYS_INLINE int64_t head_bytes() const {
    const int64_t bytes = heads() * group_bytes();
    return scale == Scale::kSplit ? (bytes + (minimums ? 64 : 32) + 63) / 64 * 64 : bytes;
  }
  ALWAYS_INLINE int64_t half_bytes(int64_t k) const {
    return (groups(k) + heads() - 1) / heads() * head_bytes() + k / line_inputs() * 64;
  }
  // 32-bit words of a panel.
  ALWAYS_INLINE int64_t panel_words(int64_t k) const {
    if (weights == Weights::kBf16) return k / 2 * kPanel;
    if (weights == Weights::kInt8) return k / 4 * kPanel;
    return half_bytes(k) / 2;
  }
};

// 32-bit words of a row of packed activations.
ALWAYS_INLINE int64_t row_words(Inputs inputs, int64_t k, int64_t span) {
  if (inputs == Inputs::kBf16) return k / 2;
  if (inputs == Inputs::kInt8) return k / 4;
  return (inputs == Inputs::kWideGroups ? k / 2 : k / 4) + (k + kScaled - 1) / kScaled + (k + span - 1) / span;
}

// Packed activations: `rows` rows in strips of nearly equal size, at most `most` rows each. A strip is [k / 2][rows]
// pairs, so one step along k reads its broadcasts from consecutive addresses.
struct Strips {  // forced inline: one copy for all instruction sets would be compiled for one of them
  int64_t rows, most;
  ALWAYS_INLINE int64_t count() const { return (rows + most - 1) / most; }
  ALWAYS_INLINE int64_t start(int64_t strip) const { return rows * strip / count(); }
  ALWAYS_INLINE int64_t size(int64_t strip) const { return start(strip + 1) - start(strip); }
  ALWAYS_INLINE int64_t of(int64_t row) const { return ((row + 1) * count() - 1) / rows; }
  // The first pair of `row`, and in `stride` the distance to its next one.
  ALWAYS_INLINE Pair* at(Pair* base, int64_t pairs, int64_t row, int64_t& stride) const {
    const int64_t strip = of(row), first = start(strip);
    stride = size(strip);
    return base + first * pairs + (row - first);
  }
};

// Element types that weights are packed from.
ENUM(ElementType, kBf16, kF32, kF16, kI8)

// Packs weights: row i of a stored matrix [n, k] becomes output offset + i. With `half`, the matrix is gate or up of
// shared panels: each 16 rows become outputs [offset, offset + 16) of one panel.
struct Pack {
  Pair* out;
  int32_t* compensation;  // of int8
  const void* source;
  ElementType stored;
  int64_t n, k, offset;
  bool half;
  FIELDS(out, NULLABLE compensation, source, stored, n, k, offset, half)
};

// Packs rows of a stored matrix [n, k] of floats as int8, rounded to bfloat16 first: symmetric, with scales of outputs.
struct PackRounded {
  Pair* out;
  int32_t* compensation;
  float* scales;
  const void* source;
  ElementType stored;
  int64_t n, k;
  FIELDS(out, compensation, scales, source, stored, n, k)
};

// Where a stored matrix has its codes: see Layout in pypto_serving/types/weights.py. FP8 weights are kBytes.
ENUM(Layout, kRows, kGptq, kAwq, kBytes)

// Packs codes or FP8 weights of a stored matrix [n, k], as Pack does. `scales` and `zero_points` are [n, groups] of
// `stored_span` inputs each, a multiple of the form's. In layouts along the outputs a row has `row` of them. `refused`
// becomes 1 + an output whose weights are not what the layout may hold, such as NaN.
struct PackQuantized {
  Pair* out;
  Form form;
  const void *source, *scales;
  const uint8_t* zero_points;
  Layout layout;
  int64_t stored_span, n, row, k, offset;
  bool half;
  int64_t* refused;
  FIELDS(out, form, source, scales, NULLABLE zero_points, layout, stored_span, n, row, k, offset, half, refused)
};

// Types of GGUF's blocks.
ENUM(Blocks, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ2_k, kQ3_k, kQ4_k, kQ5_k, kQ6_k, kIq4_nl, kIq4_xs, kMxfp4, kNvfp4)

// Packs rows of blocks [n, k], as Pack does.
struct PackBlocks {
  Pair* out;
  Form form;
  const void* source;
  Blocks type;
  int64_t n, k, offset;
  bool half;
  FIELDS(out, form, source, type, n, k, offset, half)
};

}  // namespace pypto
