// MLA over a sliding window and compressed entries: all heads of a token share the rows that it attends to, and each
// row is key and value.
//
// The rows of a token form a list: its window, oldest first, then compressed entries in ascending order. The list is
// cut into tiles of kTile. A tile is gathered from the blocks twice: as keys, row by row, and as values, in pairs of
// rows. The QK product has keys as rows and 32 heads as columns, so a head is a lane of the online softmax (Milakov and
// Gimelshein 2018, arXiv:1805.02867). Its weights are the rows of the PV product. The tile of an entry depends on the
// token alone.
#pragma once

#include "mla.h"

namespace ISA {

constexpr int kKeyRow = kMaxLatent / 2;         // pairs from one gathered key to the next
constexpr int kValueRows = kTile / 2 * kPanel;  // pairs of 32 dimensions of all values of a tile

struct alignas(64) MlaScratch {
  Pair keys[kTile * kKeyRow];
  Pair values[kMaxLatent / kPanel * kValueRows];  // [dim / 32][kTile / 2][32]
  float scores[kTile * kPanel];                   // [keys][heads]
  Pair pairs[kTile / 2 * kPanel];                 // weights of two keys, [keys / 2][heads]
  Pair weights[kTile / 2 * kPanel];               // the same in strips of heads
  float out[kMaxLatentHeads * kMaxLatent];
  float row_max[kMaxLatentHeads], row_sum[kMaxLatentHeads];
};

// The rows that a token attends to.
struct Seen {
  Seen(const MlaAttention& op, const Step& step, int64_t token)
      : op(op), step(step), row(step.row_of[token]), end(step.positions[token] + 1),
        window(min(end - op.begin, op.window)), entries(op.compressed_kv ? end / op.compressed_kv->ratio : 0) {
    if (op.indices && entries > op.topk) indices = op.indices + token * op.topk, entries = op.topk;
  }

  int64_t count() const { return window + entries; }

  const char* at(int64_t i) const {
    if (i < window) return page_row<const char>(*op.kv, step, row, end - window + i);
    const int64_t entry = indices ? indices[i - window] : i - window;
    return page_row<const char>(*op.compressed_kv, step, row, entry * op.compressed_kv->ratio);
  }

  const MlaAttention& op;
  const Step& step;
  int64_t row, end, window, entries;
  const int32_t* indices = nullptr;
};

// Copies keys 2 i and 2 i + 1 (which may be null), and their values in pairs.
INLINE void gather_pair(const char* even, const char* odd, int64_t i, int64_t dim, MlaScratch& s) {
  Pair* keys = s.keys + 2 * i * kKeyRow;
  std::memcpy(keys, even, dim * sizeof(bf16));
  if (odd) std::memcpy(keys + kKeyRow, odd, dim * sizeof(bf16));
  const bf16 *low = reinterpret_cast<const bf16*>(even), *high = reinterpret_cast<const bf16*>(odd);
  for (int64_t d = 0; d < dim; d += kPanel) {
    Pair* out = s.values + d / kPanel * kValueRows + i * kPanel;
    for (int64_t lane = 0; lane < kPanel; lane++)
      out[lane] = low[d + lane] | static_cast<Pair>(high ? high[d + lane] : 0) << 16;
  }
}

INLINE void gather_tile(const Seen& seen, int64_t begin, int64_t count, MlaScratch& s) {
  const char* following = seen.at(begin);
  for (int64_t i = 0; i < count; i += 2) {
    const char *even = following, *odd = i + 1 < count ? seen.at(begin + i + 1) : nullptr;
    following = i + 2 < count ? seen.at(begin + i + 2) : nullptr;
    gather_pair(even, odd, i / 2, seen.op.dim, s);
  }
}

// scores[key][head] of 32 heads.
INLINE void score_keys(const MlaAttention& op, const Pair* queries, int64_t count, MlaScratch& s) {
  const Stretch stretch{queries, queries + kLanes, op.dim / 2, {nullptr, nullptr}};
  const Strips strips{count, kMaxRows};
  for (int64_t strip = 0; strip < strips.count(); strip++) {
    const int64_t first = strips.start(strip);
    multiply<kKeyRow>(strips.size(strip), {s.keys + first * kKeyRow, &stretch, 1, kPanel, 128,
                                           s.scores + first * kPanel, kPanel, false});
  }
}

// Softmax numerators of 16 heads, 2^(score - row_max) in bfloat16, in pairs of keys. Returns the factor for the sums so
// far. row_sum adds up the rounded numbers.
INLINE Floats softmax_keys(int64_t count, int64_t lane, float* maxima, float* sums, MlaScratch& s) {
  const Floats before = load(maxima + lane);
  Floats row_max = before;
  for (int64_t i = 0; i < count; i++) row_max = larger(row_max, load(s.scores + i * kPanel + lane));
  const Floats factor = exp2_to_126(before - row_max);
  Floats row_sum = load(sums + lane) * factor;
  for (int64_t i = 0; i < count; i += 2) {
    bf16 rounded[2][kLanes] = {};
    for (int64_t odd = 0; odd < min(2, count - i); odd++)
      row_sum += store_rounded(rounded[odd], exp2_to_126(load(s.scores + (i + odd) * kPanel + lane) - row_max));
    Pair* pairs = s.pairs + i / 2 * kPanel + lane;
    for (int64_t head = 0; head < kLanes; head++)
      pairs[head] = rounded[0][head] | static_cast<Pair>(rounded[1][head]) << 16;
  }
  store(maxima + lane, row_max);
  store(sums + lane, row_sum);
  return factor;
}

// out[head] = out[head] * factor + sum over keys of weight * value.
INLINE void multiply_values(const MlaAttention& op, const Strips& heads, int64_t count, const float* factors,
                            float* out, MlaScratch& s) {
  const int64_t pairs = (count + 1) / 2;
  for (int64_t head = 0; head < heads.rows; head++) {
    if (factors[head] == 1.0f) continue;
    float* values = out + head * op.dim;
    for (int64_t i = 0; i < op.dim; i += kLanes) store(values + i, load(values + i) * set1(factors[head]));
  }
  for (int64_t strip = 0; strip < heads.count(); strip++) {
    const int64_t first = heads.start(strip), size = heads.size(strip);
    Pair* weights = s.weights + first * pairs;
    for (int64_t i = 0; i < pairs; i++)
      std::memcpy(weights + i * size, s.pairs + i * kPanel + first, size * sizeof(Pair));
  }
  for (int64_t d = 0; d < op.dim; d += kPanel) {
    const Pair* values = s.values + d / kPanel * kValueRows;
    const Stretch stretch{values, values + kLanes, pairs, {nullptr, nullptr}};
    for (int64_t strip = 0; strip < heads.count(); strip++) {
      const int64_t first = heads.start(strip);
      multiply<0>(heads.size(strip),
                  {s.weights + first * pairs, &stretch, 1, kPanel, 128, out + first * op.dim + d, op.dim, true});
    }
  }
}

INLINE int64_t heads_in(const MlaAttention& op, int64_t panel) { return min(kPanel, op.heads - panel * kPanel); }

// Applies inverse RoPE at the token's position and writes to the strips of the head's group.
INLINE void store_unrotated(const MlaAttention& op, const Step& step, int64_t token, int64_t head, const float* values,
                              float row_sum) {
  const Strips tokens{step.tokens, kMaxRows};
  const int64_t pairs = op.group * op.dim / 2, plain = op.dim - op.rope_dim, place = op.first + head;
  int64_t stride;
  Pair* out = tokens.at(op.out + place / op.group * tokens.rows * pairs, pairs, token, stride);
  out += place % op.group * (op.dim / 2) * stride;
  for (int64_t i = 0; i < op.dim; i += kLanes) {
    Floats y = load(values + i) / set1(row_sum);
    if (i >= plain) {
      const int64_t angle = step.positions[token] * int64_t{op.rope_dim / 2} + (i - plain) / 2;
      y = rope_interleaved(y, op.cos + angle, op.sin + angle, true);
    }
    store_pairs(out + i / 2 * stride, stride, y);
  }
}

// One token's heads of panels [begin, end).
static void attend_token(const MlaAttention& op, const Step& step, int64_t token, int64_t begin, int64_t end,
                         MlaScratch& s) {
  const Seen seen(op, step, token);
  const int64_t panels = (op.heads + kPanel - 1) / kPanel, panel_pairs = op.dim / 2 * kPanel;
  std::memset(s.out, 0, (end - begin) * kPanel * op.dim * sizeof(float));
  for (int64_t i = 0; i < (end - begin) * kPanel; i++) s.row_max[i] = op.sinks[begin * kPanel + i], s.row_sum[i] = 1.0f;
  for (int64_t first = 0; first < seen.count(); first += kTile) {
    const int64_t count = min(kTile, seen.count() - first);
    gather_tile(seen, first, count, s);
    for (int64_t panel = begin; panel < end; panel++) {
      const int64_t lane = (panel - begin) * kPanel;
      score_keys(op, op.queries + (token * panels + panel) * panel_pairs, count, s);
      float factors[kPanel];
      for (int64_t i = 0; i < kPanel; i += kLanes)
        store(factors + i, softmax_keys(count, i, s.row_max + lane, s.row_sum + lane, s));
      multiply_values(op, {heads_in(op, panel), kMaxRows}, count, factors, s.out + lane * op.dim, s);
    }
  }
  for (int64_t panel = begin; panel < end; panel++)
    for (int64_t i = 0; i < heads_in(op, panel); i++) {
      const int64_t place = (panel - begin) * kPanel + i;
      store_unrotated(op, step, token, panel * kPanel + i, s.out + place * op.dim, s.row_sum[place]);
    }
}

// A thread takes a token, or one panel of its heads where there are too few tokens.
static void mla_attention(const MlaAttention& op, const Step& step, Member& member) {
  static thread_local MlaScratch s;
  const int64_t panels = (op.heads + kPanel - 1) / kPanel;
  const int64_t items = step.tokens < 2 * member.count() ? panels : 1;
  Share share(member, step.tokens * items, 1);
  while (share.next()) {
    const int64_t item = share.begin % items;
    attend_token(op, step, share.begin / items, panels * item / items, panels * (item + 1) / items, s);
  }
}

}  // namespace ISA
