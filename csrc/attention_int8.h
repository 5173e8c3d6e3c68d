// Attention to a KV cache of int8: scores, softmax weights and values of a tile.
//
// Queries and softmax weights, times the scales of values, become whole numbers of 16 bits, relative to the largest of
// their row. Each is two rows of signed bytes, high and low, so a product with a panel is two exact sums of bytes: high
// * 256 + low. Panels hold bytes plus 128; -128 times the sum of a row's numbers takes that back. Since sums are exact,
// all instruction sets agree on them, and it makes no difference in which parts they are added.
#pragma once

#include "attention_tile.h"
#include "quantizing.h"

namespace ISA {
namespace int8_kv {

constexpr float kLargestFixed = 127 * 256 + 127;
constexpr int kQueryHalf = kQueryRow / 2, kWeightHalf = kWeightRow / 2;  // quads from high to low bytes

struct PanelDot {  // signed bytes of a row by unsigned ones of a panel
  using Sums = PairRegister;
  static ALWAYS_INLINE Sums begin(const Tile&, int64_t, int64_t) { return Sums{}; }
  static ALWAYS_INLINE Sums add(Sums total, PairRegister panel, PairRegister x) { return dot_bytes(total, x, panel); }
  static ALWAYS_INLINE Register end(Sums total) { return (Register)total; }
};

// Rounds `count` numbers, whose largest magnitude is the largest of `tops`, to high and low bytes.
template <typename Load>
INLINE Fixed fix(int64_t count, Ints tops, Pair* high, Pair* low, Load load16) {
  const Floats largest = (Floats)largest_bits(tops);
  const Floats tiny = set1(1e-30f), most = set1(kLargestFixed);
  const Floats factor = select(at_most((Ints)largest, (Ints)tiny), Floats{}, most / largest);
  Ints sums{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints x = round_signed(load16(i) * factor), upper = (x + 128) >> 8;
    store_bytes(high + i / 4, upper);
    store_bytes(low + i / 4, x - (upper << 8));
    sums += x;
  }
  uint32_t sum = 0;
  for (int lane = 0; lane < kLanes; lane++) sum += static_cast<uint32_t>(sums[lane]);
  return {largest[0] / kLargestFixed, static_cast<int32_t>(0u - 128u * sum)};
}

INLINE void gather_queries(const Item& it, AttentionScratch& s) {
  each_row(it, [&](int64_t row, const AttentionQuery& query, int64_t head) {
    const bf16* x = it.op.queries + (query.token * int64_t{it.op.heads} + head) * it.dim;
    Ints tops{};
    for (int64_t i = 0; i < it.dim; i += kLanes) tops = larger_bits(tops, magnitude_bits(load_widen(x + i)));
    Pair* out = s.queries + row * kQueryRow;
    s.fixed_queries[row] = fix(it.dim, tops, out, out + kQueryHalf, [&](int64_t i) { return load_widen(x + i); });
  });
}

// The scales of 32 positions, after their panel.
INLINE const float* scales_of(const Item& it, const Pair* panel) {
  return reinterpret_cast<const float*>(panel + it.op.cache.number_words());
}

// The sums of a row: those of its high bytes times 256, and of its low bytes. `sums` are of 32 columns.
INLINE Ints joined(const float* sums, int64_t column) {
  return ((Ints)load(sums + column) << 8) + (Ints)load(sums + kPanel + column);
}

// scores[row][i] = query . key i of the tile: for each panel, all heads in order. `next` is read afterwards.
INLINE void score(const Item& it, const KvTile& h, const Pair* next, AttentionScratch& s) {
  const Strips strips{it.rows.rows, kMaxRows / 2};
  alignas(64) float sums[kMaxRows * kPanel];
  each_run(it, h.keys, h.panels, 1, next, [&](int64_t i, int64_t, int64_t head, const Pair* following) {
    const Pair* keys = h.keys[i] + head * it.head_words();
    const float* scales = scales_of(it, keys);
    Stretch stretch = stretch_of(keys, it.dim / 4, following);
    for (int64_t strip = 0; strip < strips.count(); strip++) {
      const int64_t first = head * strips.rows + strips.start(strip), size = strips.size(strip);
      multiply<kQueryHalf, PanelDot>(2 * size,
                                     {s.queries + first * kQueryRow, &stretch, 1, kPanel, 128, sums, kPanel, false});
      stretch.ahead[0] = nullptr;
      for (int64_t m = 0; m < size; m++) {
        const Fixed& query = s.fixed_queries[first + m];
        float* out = s.scores + (first + m) * kTile + i * kPanel;
        for (int64_t c = 0; c < kPanel; c += kLanes) {
          const Ints total = joined(sums + 2 * m * kPanel, c) + query.offset;
          store(out + c, __builtin_convertvector(total, Floats) * set1(query.unit) * load(scales + c));
        }
      }
    }
  });
}

// Softmax numerators of a row over positions [0, seen) of a tile, 2^(score - row_max), times the scales of values, in
// place of the scores; zeros up to the end of the last panel. row_sum adds up the numerators. Returns magnitudes.
INLINE Ints softmax(const Item& it, const KvTile& h, int64_t head, int64_t seen, float* scores, float row_max,
                    float& row_sum) {
  Floats total{};
  Ints tops{};
  for (int64_t i = 0; i < h.panels * kPanel; i += kLanes) {
    const float* scales = scales_of(it, h.values[i / kPanel] + head * it.head_words()) + i % kPanel;
    const Floats weight = exp2_to_126(load(scores + i) - set1(row_max));
    const Ints inside = before(i, seen);
    total += inside ? weight : Floats{};
    const Floats scaled = inside ? weight * load(scales) : Floats{};
    tops = larger_bits(tops, magnitude_bits(scaled));
    store(scores + i, scaled);
  }
  row_sum = sum(total);
  return tops;
}

INLINE void softmax_tile(const Item& it, const KvTile& h, int64_t tile, AttentionScratch& s) {
  each_row(it, [&](int64_t row, const AttentionQuery& query, int64_t head) {
    const int64_t seen = seen_by(it, h, tile, query), kv_head = head / it.shared - it.item.head_begin;
    float* scores = s.scores + row * kTile;
    s.tile_max[row] = largest_score(scores, seen);
    const Ints tops = softmax(it, h, kv_head, seen, scores, s.tile_max[row], s.tile_sum[row]);
    Pair* out = s.weights + row * kWeightRow;
    s.fixed_weights[row] =
        fix(h.panels * kPanel, tops, out, out + kWeightHalf, [&](int64_t i) { return load(scores + i); });
  });
}

// tile[row] = sum over positions of weight * value: sums of bytes in whole numbers, whose unit follows. `next` is read
// afterwards.
INLINE void multiply_values(const Item& it, const KvTile& h, const Pair* next, AttentionScratch& s) {
  const Strips strips{it.rows.rows, kMaxRows / 2};
  alignas(64) float sums[kMaxRows * kPanel];
  each_run_of_values(it, h, next, [&](int64_t begin, int64_t end, int64_t head, const Pair* following) {
    for (int64_t d = 0; d < it.dim; d += kPanel) {
      Stretch stretches[kPanels];
      stretch_values<4>(it, h, head, begin, end, d, following, stretches);
      for (int64_t strip = 0; strip < strips.count(); strip++) {
        const int64_t first = head * strips.rows + strips.start(strip), size = strips.size(strip);
        multiply<kWeightHalf, PanelDot>(2 * size, {s.weights + first * kWeightRow + begin * kPanel / 4, stretches,
                                                   end - begin, kPanel, 128, sums, kPanel, false});
        stretches[end - begin - 1].ahead[0] = nullptr;
        for (int64_t m = 0; m < size; m++) {
          float* out = s.tile + (first + m) * it.dim + d;
          for (int64_t c = 0; c < kPanel; c += kLanes) {
            const Ints earlier = begin > 0 ? (Ints)load(out + c) : Ints{};
            store(out + c, (Floats)(earlier + joined(sums + 2 * m * kPanel, c)));
          }
        }
      }
    }
  });
  each_row(it, [&](int64_t row, const AttentionQuery&, int64_t) {
    const Fixed& weights = s.fixed_weights[row];
    float* out = s.tile + row * it.dim;
    for (int64_t i = 0; i < it.dim; i += kLanes) {
      const Ints total = (Ints)load(out + i) + weights.offset;
      store(out + i, __builtin_convertvector(total, Floats) * set1(weights.unit));
    }
  });
}

}  // namespace int8_kv
}  // namespace ISA
