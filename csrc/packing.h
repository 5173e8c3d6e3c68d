// Packs weights of every stored type into the panels that GEMMs read.
#pragma once

#include "quantizing.h"

namespace ISA {

template <ElementType kElement>
INLINE bf16 stored_bf16(const void* source, int64_t i) {
  if (kElement == ElementType::kBf16) return static_cast<const bf16*>(source)[i];
  if (kElement == ElementType::kF32) return narrow(static_cast<const float*>(source)[i]);
  return narrow(half_to_float(static_cast<const uint16_t*>(source)[i]));
}

template <ElementType kElement>
static void pack_rows(Pair* out, const void* source, int64_t n, int64_t k, int64_t first) {
  for (int64_t p = 0; p < k / 2; p++) {
    for (int64_t lane = 0; lane < kLanes; lane++) {
      const int64_t i = (first + lane) * k + 2 * p;
      const bool exists = first + lane < n;
      const bf16 low = exists ? stored_bf16<kElement>(source, i) : 0;
      const bf16 high = exists ? stored_bf16<kElement>(source, i + 1) : 0;
      out[p * kPanel + lane] = low | static_cast<Pair>(high) << 16;
    }
  }
}

// Int8 activations are stored plus 128. Sums start at `compensation`, which cancels that offset.
static void pack_bytes(Pair* out, int32_t* compensation, const int8_t* source, int64_t n, int64_t k, int64_t first) {
  for (int64_t lane = 0; lane < kLanes; lane++) compensation[lane] = 0;
  for (int64_t q = 0; q < k / 4; q++) {
    for (int64_t lane = 0; lane < kLanes && first + lane < n; lane++) {
      const int8_t* bytes = source + (first + lane) * k + 4 * q;
      std::memcpy(out + q * kPanel + lane, bytes, 4);
      compensation[lane] -= 128 * (bytes[0] + bytes[1] + bytes[2] + bytes[3]);
    }
    for (int64_t lane = n - first; lane < kLanes; lane++) out[q * kPanel + lane] = 0;
  }
}

// Rows [16 * group, 16 * group + 16) of a stored matrix into half a panel; rows after n become zeros.
static void pack_group(const Pack& op, int64_t group) {
  const int64_t n = op.n, k = op.k, first = group * kLanes;
  const int64_t output = op.half ? group * kPanel + op.offset : op.offset + first;
  const int64_t words = k / (op.stored == ElementType::kI8 ? 4 : 2);
  Pair* out = op.out + output / kPanel * words * kPanel + output % kPanel;
  switch (op.stored) {
    case ElementType::kBf16: return pack_rows<ElementType::kBf16>(out, op.source, n, k, first);
    case ElementType::kF32: return pack_rows<ElementType::kF32>(out, op.source, n, k, first);
    case ElementType::kF16: return pack_rows<ElementType::kF16>(out, op.source, n, k, first);
    case ElementType::kI8: break;
  }
  pack_bytes(out, op.compensation + output, static_cast<const int8_t*>(op.source), n, k, first);
}

// Rounds row `row` of a stored matrix to quads, kPanel apart.
template <ElementType kElement>
static void round_row(const PackRounded& op, int64_t row) {
  const auto weight = [&](int64_t i) { return stored_bf16<kElement>(op.source, row * op.k + i); };
  int32_t top = 0, sum = 0;
  for (int64_t i = 0; i < op.k; i++) {
    const int32_t magnitude = weight(i) & 0x7fff;
    top = magnitude > top ? magnitude : top;
  }
  const float largest = widen(static_cast<bf16>(top)), factor = byte_factor(set1(largest))[0];
  Pair* out = op.out + row / kPanel * (op.k / 4) * kPanel + row % kPanel;
  for (int64_t i = 0; i < op.k; i += 4) {
    int8_t bytes[4];
    for (int64_t j = 0; j < 4; j++) {
      const float rounded = widen(weight(i + j)) * factor + 12582912.0f;  // 1.5 * 2^23: whole numbers in the low bits
      int32_t bits;
      std::memcpy(&bits, &rounded, sizeof bits);
      sum += bytes[j] = static_cast<int8_t>(bits);
    }
    std::memcpy(out + i / 4 * kPanel, bytes, sizeof bytes);
  }
  op.scales[row] = largest / 127.0f;
  op.compensation[row] = -128 * sum;
}

static void pack_rounded(const PackRounded& op, Member& member) {
  Share share(member, op.n, kPanel);
  while (share.next())
    for (int64_t row = share.begin; row < share.end; row++) switch (op.stored) {
        case ElementType::kF32: round_row<ElementType::kF32>(op, row); break;
        case ElementType::kF16: round_row<ElementType::kF16>(op, row); break;
        default: round_row<ElementType::kBf16>(op, row);
      }
}

static void pack(const Pack& op, Member& member) {
  Share share(member, (op.n + kLanes - 1) / kLanes, 4);
  while (share.next())
    for (int64_t group = share.begin; group < share.end; group++) pack_group(op, group);
}

}  // namespace ISA
