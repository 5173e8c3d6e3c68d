// Writes keys and values of a token to the paged KV cache.
#pragma once

#include "quantizing.h"

namespace ISA {

// The word of a block in which position `offset` of a head has its first pair or quad, in a panel of keys or values.
INLINE Pair* kv_panel(const KvCache& cache, Pair* half, int64_t block, int64_t head, int64_t offset) {
  return half + block * cache.block_stride + head * cache.head_words() + offset / kPanel * cache.panel_words();
}

// A key fills the position's column of a panel.
INLINE void store_key(const KvCache& cache, int64_t block, int64_t offset, int64_t head, const float* key) {
  Pair* out = kv_panel(cache, cache.keys, block, head, offset) + offset % kPanel;
  for (int64_t i = 0; i < cache.dim; i += kLanes) store_pairs(out + i / 2 * kPanel, kPanel, load(key + i));
}

// A pair holds the values of two tokens. The last token of a row in a step zeroes the other half: an earlier owner of
// the block may have left NaN there, and attention multiplies it by zero.
INLINE void store_value(const KvCache& cache, int64_t block, int64_t offset, int64_t head, const float* value,
                        bool last) {
  bf16* panel = reinterpret_cast<bf16*>(kv_panel(cache, cache.values, block, head, offset)) +
                offset % kPanel / 2 * kPanel * 2 + offset % 2;
  const bool voids = last && offset % 2 == 0;
  for (int64_t d = 0; d < cache.dim; d += kPanel) {
    bf16* out = panel + d * kPanel;
    for (int64_t i = 0; i < kPanel; i++) {
      out[2 * i] = narrow(value[d + i]);
      if (voids) out[2 * i + 1] = 0;
    }
  }
}

// Rounds a key or value to bytes plus 128, symmetric, and returns its scale.
INLINE float round_head(const float* x, int64_t dim, uint8_t* bytes) {
  Ints top{};
  for (int64_t i = 0; i < dim; i += kLanes) top = larger_bits(top, magnitude_bits(load(x + i)));
  const Floats largest = (Floats)largest_bits(top), factor = byte_factor(largest);
  for (int64_t i = 0; i < dim; i += kLanes) store_bytes(bytes + i, round_bytes(load(x + i) * factor));
  return largest[0] / 127.0f;
}

INLINE void store_key_bytes(const KvCache& cache, int64_t block, int64_t offset, int64_t head, const float* key) {
  uint8_t bytes[kMaxDim];
  Pair* panel = kv_panel(cache, cache.keys, block, head, offset);
  float* scales = reinterpret_cast<float*>(panel + cache.number_words());
  scales[offset % kPanel] = round_head(key, cache.dim, bytes);
  Pair* out = panel + offset % kPanel;
  for (int64_t i = 0; i < cache.dim; i += 4) std::memcpy(out + i / 4 * kPanel, bytes + i, sizeof(Pair));
}

// A quad holds the values of four tokens. Whatever an earlier owner left in it is a number.
INLINE void store_value_bytes(const KvCache& cache, int64_t block, int64_t offset, int64_t head, const float* value) {
  uint8_t bytes[kMaxDim];
  Pair* panel = kv_panel(cache, cache.values, block, head, offset);
  float* scales = reinterpret_cast<float*>(panel + cache.number_words());
  scales[offset % kPanel] = round_head(value, cache.dim, bytes);
  uint8_t* out = reinterpret_cast<uint8_t*>(panel + offset % kPanel / 4 * kPanel) + offset % 4;
  for (int64_t d = 0; d < cache.dim; d += kPanel)
    for (int64_t i = 0; i < kPanel; i++) out[(d / 4 * kPanel + i) * 4] = bytes[d + i];
}

}  // namespace ISA
