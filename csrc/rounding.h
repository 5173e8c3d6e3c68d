// Rounds weights to 4-bit codes; pypto_serving/model/convert/rounding.py says how scales are chosen, and gives the same bits.
#pragma once

#include "gemm_tile.h"

namespace ISA {

// Codes -8 to 7 of weights, as floats. Scales without an inverse make all of them 0.
INLINE Floats int4_codes(Floats weights, Floats inverse) {
  const Floats magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to integers, ties to even
  const Floats rounded = weights * inverse + magic - magic;
  return smaller(larger(rounded, set1(-8.0f)), set1(7.0f));
}

INLINE Floats inverse_of(Floats scales) {
  return select(above(set1(1.17549435e-38f), scales), Floats{}, set1(1.0f) / scales);
}

// Groups [first, first + count) of at most 16, a lane each.
static void round_groups(const RoundInt4& op, int64_t first, int64_t count) {
  const int64_t size = op.size;
  const float* rows = op.rows + first * size;
  alignas(64) float weights[kMostRounded * kLanes] = {};
  for (int64_t lane = 0; lane < count; lane++)
    for (int64_t i = 0; i < size; i++) weights[i * kLanes + lane] = rows[lane * size + i];
  Floats top{}, best = set1(-1.0f), scale = set1(1.0f);
  for (int64_t i = 0; i < size; i++) top = larger(top, larger(load(weights + i * kLanes), -load(weights + i * kLanes)));
  for (int64_t level = 0; level < op.num_levels; level++) {
    const Floats inverse = inverse_of(top / set1(op.levels[level]));
    Floats along{}, across{};
    for (int64_t i = 0; i < size; i++) {
      const Floats weight = load(weights + i * kLanes), code = int4_codes(weight, inverse);
      along += weight * code;
      across += code * code;
    }
    const Floats found = along / select(equal(across, Floats{}), set1(1.0f), across), gain = found * along;
    const Ints better = above(gain, best);
    best = select(better, gain, best);
    scale = select(better, found, scale);
  }
  alignas(64) bf16 stored[kLanes];
  const Floats inverse = inverse_of(store_rounded(stored, scale));
  std::memcpy(op.scales + first, stored, count * sizeof(bf16));
  for (int64_t i = 0; i < size; i += 8) {
    Ints word{};
    for (int64_t j = 0; j < 8; j++) {
      const Floats code = int4_codes(load(weights + (i + j) * kLanes), inverse) + set1(8.0f);
      word |= __builtin_convertvector(code, Ints) << static_cast<int>(4 * j);
    }
    alignas(64) uint32_t words[kLanes];
    std::memcpy(words, &word, sizeof words);
    for (int64_t lane = 0; lane < count; lane++) std::memcpy(op.codes + ((first + lane) * size + i) / 2, words + lane, 4);
  }
}

static void round_int4(const RoundInt4& op) {
  for (int64_t first = 0; first < op.groups; first += kLanes) round_groups(op, first, min(kLanes, op.groups - first));
}

}  // namespace ISA
