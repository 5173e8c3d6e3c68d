// What happens to a row by itself: embedding, normalisation, and what makes queries, keys and values of a projection.
#pragma once

#include "tile.h"

namespace ISA {

// Rows that a member takes at once.
INLINE int64_t row_grain(int64_t rows, const Member& member) {
  const int64_t each = rows / member.count();
  return each < 1 ? 1 : min(each, kMaxRows);
}

// Zhang and Sennrich 2019, arXiv:1910.07467.
INLINE float inverse_rms(const float* x, int64_t width, float eps) {
  Floats squares{};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < width; i++) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

// Members take whole strips, or, where there are too few, a part of the columns each: no two write to one cache line.
static void norm(const Norm& op, const Step& step, Member& member) {
  const Strips strips{count(step, op.rows), kMaxRows};
  if (strips.rows == 0) return;
  const int64_t parts = strips.count() < member.count() ? member.count() : 1, width = op.width;
  const int64_t part_width = (width / kLanes + parts - 1) / parts * kLanes;
  Share share(member, strips.count() * parts, 1);
  while (share.next()) {
    const int64_t strip = share.begin / parts, part = share.begin % parts, stride = strips.size(strip);
    const int64_t begin = part * part_width, end = part + 1 == parts ? width : min(width, begin + part_width);
    for (int64_t m = 0; m < stride; m++) {
      const int64_t row = strips.start(strip) + m;
      const float* x = op.x + (op.rows == Rows::kTokens ? row : step.logits_rows[row]) * width;
      const float scale = inverse_rms(x, width, op.eps);
      Pair* out = op.out + strips.start(strip) * (width / 2) + m;
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes)
        store_pairs(out + i / 2 * stride, stride, load(x + i) * set1(scale) * load(op.weight + i));
      for (; i < end; i += 2)
        out[i / 2 * stride] = narrow(x[i] * scale * op.weight[i]) |
                              static_cast<Pair>(narrow(x[i + 1] * scale * op.weight[i + 1])) << 16;
    }
  }
}

static void embed(const Embed& op, const Step& step, Member& member) {
  Share share(member, step.tokens, row_grain(step.tokens, member));
  while (share.next()) {
    for (int64_t t = share.begin; t < share.end; t++) {
      const int64_t token = step.token_ids[t];
      float* x = op.x + t * op.width;
      if (op.table) {
        for (int64_t i = 0; i < op.width; i++) x[i] = widen(op.table[token * op.width + i]);
        continue;
      }
      const Pair* pairs = op.packed + token / kPanel * (op.width / 2) * kPanel + token % kPanel;
      for (int64_t p = 0; p < op.width / 2; p++) {
        const Pair pair = pairs[p * kPanel];
        x[2 * p] = widen(static_cast<bf16>(pair));
        x[2 * p + 1] = widen(static_cast<bf16>(pair >> 16));
      }
    }
  }
}

// RMSNorm of one head and its rotary embedding (Su et al. 2021, arXiv:2104.09864): the pair (i, i + dim / 2) turns by
// the i-th angle of the position.
INLINE void turn(const float* x, const float* weight, const float* cos, const float* sin, int64_t dim, float eps,
                 float* out) {
  const float scale = inverse_rms(x, dim, eps);
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const Floats a = load(x + i) * set1(scale) * load(weight + i);
    const Floats b = load(x + half + i) * set1(scale) * load(weight + half + i);
    store(out + i, fma(a, load(cos + i), -(b * load(sin + i))));
    store(out + half + i, fma(b, load(cos + i), a * load(sin + i)));
  }
}

INLINE void store_key(const Cache& cache, int64_t block, int64_t offset, int64_t head, const float* key) {
  bf16* keys = cache.keys + block * cache.block_stride + head * cache.size * cache.dim;
  Pair* out = reinterpret_cast<Pair*>(keys) + offset / kPanel * (cache.dim / 2) * kPanel + offset % kPanel;
  for (int64_t i = 0; i < cache.dim; i += kLanes) store_pairs(out + i / 2 * kPanel, kPanel, load(key + i));
}

// A pair holds the values of two tokens. The last token of a row in a step voids what an earlier owner of the block
// left in the other half, which is multiplied by zero and must be finite.
INLINE void store_value(const Cache& cache, int64_t block, int64_t offset, int64_t head, const float* value, bool last) {
  bf16* values = cache.values + block * cache.block_stride + head * cache.size * cache.dim;
  bf16* panel = values + offset / kPanel * kPanel * cache.dim + offset % kPanel / 2 * kPanel * 2 + offset % 2;
  const bool voids = last && offset % 2 == 0;
  for (int64_t d = 0; d < cache.dim; d += kPanel) {
    bf16* out = panel + d * kPanel;
    for (int64_t i = 0; i < kPanel; i++) {
      out[2 * i] = narrow(value[d + i]);
      if (voids) out[2 * i + 1] = 0;
    }
  }
}

static void heads(const Heads& op, const Step& step, Member& member) {
  const Cache& cache = op.cache;
  const int64_t dim = cache.dim, all = op.heads + 2 * cache.kv_heads;
  alignas(64) float turned[kMaxDim];
  Share share(member, step.tokens, row_grain(step.tokens, member));
  while (share.next()) {
    for (int64_t t = share.begin; t < share.end; t++) {
      const float* x = op.x + t * all * dim;
      const float* cos = op.cos + step.positions[t] * (dim / 2);
      const float* sin = op.sin + step.positions[t] * (dim / 2);
      const int64_t block = step.slots[t] / cache.size, offset = step.slots[t] % cache.size;
      const bool last = t + 1 == step.tokens || step.slots[t + 1] != step.slots[t] + 1;
      for (int64_t head = 0; head < op.heads; head++) {
        turn(x + head * dim, op.weights + head * dim, cos, sin, dim, op.eps, turned);
        bf16* out = op.queries + (t * op.heads + head) * dim;
        for (int64_t i = 0; i < dim; i += kLanes) store_narrow(out + i, load(turned + i));
      }
      for (int64_t head = 0; head < cache.kv_heads; head++) {
        const int64_t key = op.heads + head;
        turn(x + key * dim, op.weights + key * dim, cos, sin, dim, op.eps, turned);
        store_key(cache, block, offset, head, turned);
        store_value(cache, block, offset, head, x + (key + cache.kv_heads) * dim, last);
      }
    }
  }
}

}  // namespace ISA
