// Packs rows of GGUF's blocks into the lines that GEMMs read, without loss. Offsets and bits are those of
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
#pragma once

#include "codes.h"
#include "packing_quantized.h"

namespace ISA {

// Weights and bytes of a block.
struct BlockSize {
  int64_t weights, bytes;
};

constexpr BlockSize block_size(Blocks type) {
  switch (type) {
    case Blocks::kQ4_0:
    case Blocks::kIq4_nl: return {32, 18};
    case Blocks::kQ4_1: return {32, 20};
    case Blocks::kQ5_0: return {32, 22};
    case Blocks::kQ5_1: return {32, 24};
    case Blocks::kQ8_0: return {32, 34};
    case Blocks::kQ2_k: return {256, 84};
    case Blocks::kQ3_k: return {256, 110};
    case Blocks::kQ4_k: return {256, 144};
    case Blocks::kQ5_k: return {256, 176};
    case Blocks::kQ6_k: return {256, 210};
    case Blocks::kIq4_xs: return {256, 136};
    case Blocks::kMxfp4: return {32, 17};
    case Blocks::kNvfp4: return {64, 36};
  }
  return {1, 1};
}

INLINE uint32_t bit_of(const uint8_t* bits, int64_t i) { return bits[i / 8] >> i % 8 & 1; }

// Code i of a run of 2 * `half`: the low halves of `half` bytes, then the high ones.
INLINE uint32_t halves_code(const uint8_t* bytes, int64_t half, int64_t i) {
  return bytes[i / (2 * half) * half + i % half] >> i / half % 2 * 4 & 15;
}

// What is packed for weight i of block b: a code of 4 bits, or a byte.
template <Blocks kType>
INLINE uint32_t packed_code(const uint8_t* b, int64_t i) {
  const int64_t part = i / 32, at = i % 32;
  switch (kType) {
    case Blocks::kQ4_0:
    case Blocks::kIq4_nl: return halves_code(b + 2, 16, i);
    case Blocks::kQ4_1: return halves_code(b + 4, 16, i);
    case Blocks::kQ5_0: return (halves_code(b + 6, 16, i) | bit_of(b + 2, i) << 4) + 112;
    case Blocks::kQ5_1: return halves_code(b + 8, 16, i) | bit_of(b + 4, i) << 4;
    case Blocks::kQ8_0: return b[2 + i] ^ 128u;
    case Blocks::kQ2_k: return b[16 + part / 4 * 32 + at] >> part % 4 * 2 & 3;
    case Blocks::kQ3_k: return (b[32 + part / 4 * 32 + at] >> part % 4 * 2 & 3) + (b[at] >> part & 1) * 4 + 4;
    case Blocks::kQ4_k: return halves_code(b + 16, 32, i);
    case Blocks::kQ5_k: return halves_code(b + 48, 32, i) | (b[16 + at] >> part & 1) << 4;
    case Blocks::kQ6_k:
      return (halves_code(b, 64, i) | (b[128 + part / 4 * 32 + at] >> part % 4 * 2 & 3) << 4) + 96;
    case Blocks::kIq4_xs: return halves_code(b + 8, 16, i);
    case Blocks::kMxfp4: return halves_code(b + 1, 16, i);
    case Blocks::kNvfp4: return halves_code(b + 4, 8, i);
  }
}

// The 6 bits of scale j of Q4_K and Q5_K, and of minimum j.
INLINE uint32_t six_bits(const uint8_t* s, int64_t j, bool minimum) {
  const uint8_t* low = s + (minimum ? 4 : 0);
  if (j < 4) return low[j] & 63;
  return (minimum ? s[j + 4] >> 4 : s[j + 4] & 15) | low[j - 4] >> 6 << 4;
}

// The scale of group j of block b as packed, or its minimum: bits of a half or of bfloat16, e8m0, or int8.
template <Blocks kType>
INLINE uint32_t packed_scale(const uint8_t* b, int64_t j, bool minimum) {
  switch (kType) {
    case Blocks::kQ2_k: return minimum ? b[j] >> 4 : b[j] & 15;
    case Blocks::kQ3_k: return ((b[96 + j % 8] >> j / 8 * 4 & 15) | (b[104 + j % 4] >> j / 4 * 2 & 3) << 4) - 32;
    case Blocks::kQ4_k:
    case Blocks::kQ5_k: return six_bits(b + 4, j, minimum);
    case Blocks::kQ6_k: return b[192 + j];
    case Blocks::kIq4_xs: return ((b[4 + j / 2] >> j % 2 * 4 & 15) | (b[2 + j / 4] >> j % 4 * 2 & 3) << 4) - 32;
    case Blocks::kMxfp4: return b[0];
    case Blocks::kNvfp4: {
      const int code = b[j] & 127;
      return code == 127 ? 0 : code < 8 ? bf16_of(code, -9) : bf16_of(8 + (code & 7), (code >> 3) - 10);
    }
    default: return b[minimum ? 2 : 0] | (b[minimum ? 3 : 1] ^ (minimum ? 128u : 0u)) << 8;  // -m: it is subtracted
  }
}

// Where the half is that multiplies scales, or minimums.
constexpr int64_t super_offset(Blocks type, bool minimum) {
  const int64_t first = type == Blocks::kQ2_k ? 80 : type == Blocks::kQ3_k ? 108 : type == Blocks::kQ6_k ? 208 : 0;
  return first + (minimum ? 2 : 0);
}

template <Blocks kType>
static void pack_block_rows(const PackBlocks& op, int64_t half) {
  constexpr BlockSize kBlock = block_size(kType);
  const Form& form = op.form;
  const int64_t output = op.half ? half * kPanel + op.offset : half * kLanes + op.offset;
  const int64_t first = half * kLanes, outputs = min(kLanes, op.n - first), row = op.k / kBlock.weights * kBlock.bytes;
  const int64_t span = form.span, heads = form.heads(), groups = form.groups(op.k), inputs = form.line_inputs();
  const int64_t each = form.scale_bytes() / kLanes, in_block = kBlock.weights / span;
  const uint8_t* source = static_cast<const uint8_t*>(op.source) + first * row;
  char* out = reinterpret_cast<char*>(op.out) + output / kLanes * form.half_bytes(op.k);
  for (int64_t begin = 0; begin < groups; begin += heads) {
    std::memset(out, 0, form.head_bytes());
    const int64_t end = min(groups, begin + heads);
    for (int64_t i = 0; i < outputs; i++) {
      const uint8_t* blocks = source + i * row;
      for (int minimum = 0; minimum <= form.minimums; minimum++) {
        char* scales = out + minimum * heads * form.scale_bytes();
        for (int64_t group = begin; group < end; group++) {
          const uint8_t* block = blocks + group / in_block * kBlock.bytes;
          const uint32_t bits = packed_scale<kType>(block, group % in_block, minimum);
          std::memcpy(scales + ((group - begin) * kLanes + i) * each, &bits, each);
        }
        if (form.scale != Scale::kSplit) continue;
        const uint8_t* super = blocks + begin / in_block * kBlock.bytes + super_offset(kType, minimum);
        std::memcpy(out + heads * form.group_bytes() + minimum * 32 + i * 2, super, 2);
      }
    }
    out += form.head_bytes();
    for (int64_t k = begin * span; k < end * span; k += inputs, out += 64) {
      alignas(64) uint32_t words[kLanes] = {};
      for (int64_t i = 0; i < outputs; i++) {
        const uint8_t* block = source + i * row + k / kBlock.weights * kBlock.bytes;
        for (int64_t j = 0; j < inputs; j++) {
          const int64_t place = inputs == 8 ? j * 4 : (j % 2 * 2 + j / 2) * 8;  // bytes of inputs 0, 2, 1, 3
          words[i] |= packed_code<kType>(block, k % kBlock.weights + j) << place;
        }
      }
      if (inputs == 8) store_codes(out, load_some(words, kLanes));
      else std::memcpy(out, words, sizeof words);
    }
  }
}

static void pack_blocks(const PackBlocks& op, Member& member) {
  Share share(member, (op.n + kLanes - 1) / kLanes, 1);
  while (share.next())
    for (int64_t half = share.begin; half < share.end; half++) switch (op.type) {
#define PACK(type) \
  case Blocks::type: pack_block_rows<Blocks::type>(op, half); break;
        PACK(kQ4_0) PACK(kQ4_1) PACK(kQ5_0) PACK(kQ5_1) PACK(kQ8_0) PACK(kQ2_k) PACK(kQ3_k) PACK(kQ4_k) PACK(kQ5_k)
        PACK(kQ6_k) PACK(kIq4_nl) PACK(kIq4_xs) PACK(kMxfp4) PACK(kNvfp4)
#undef PACK
      }
}

}  // namespace ISA
