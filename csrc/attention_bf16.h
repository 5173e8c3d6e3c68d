// Attention to a KV cache of bfloat16: scores, softmax weights and values of a tile.
#pragma once

#include "attention_tile.h"

namespace ISA {
namespace bf16_kv {

INLINE void gather_queries(const Item& it, AttentionScratch& s) {
  each_row(it, [&](int64_t row, const AttentionQuery& query, int64_t head) {
    const int64_t place = query.token * int64_t{it.op.heads} + head;
    std::memcpy(s.queries + row * kQueryRow, it.op.queries + place * it.dim, it.dim * sizeof(bf16));
  });
}

// scores[row][i] = query . key i of the tile: for each panel, all heads in order. `next` is read afterwards.
INLINE void score(const Item& it, const KvTile& h, const Pair* next, AttentionScratch& s) {
  each_run(it, h.keys, h.panels, 1, next, [&](int64_t i, int64_t, int64_t head, const Pair* following) {
    Stretch stretch = stretch_of(h.keys[i] + head * it.head_words(), it.dim / 2, following);
    for (int64_t strip = 0; strip < it.rows.count(); strip++) {
      const int64_t first = head * it.rows.rows + it.rows.start(strip);
      multiply<kQueryRow>(it.rows.size(strip), {s.queries + first * kQueryRow, &stretch, 1, kPanel, 128,
                                                s.scores + first * kTile + i * kPanel, kTile, false});
      stretch.ahead[0] = nullptr;
    }
  });
}

// Softmax numerators of a row over positions [0, seen) of a tile: 2^(score - row_max) in bfloat16, zeros up to the end
// of the last panel. row_sum adds up the rounded numbers.
INLINE void softmax(const float* scores, int64_t seen, int64_t panels, Pair* out, float& row_max, float& row_sum) {
  const int64_t whole = seen / kLanes * kLanes;  // positions [0, whole) fill all lanes
  row_max = largest_score(scores, seen);
  bf16* weights = reinterpret_cast<bf16*>(out);
  const auto weight = [&](int64_t i) { return exp2_to_126(load(scores + i) - set1(row_max)); };
  Floats total{};
  for (int64_t i = 0; i < whole; i += kLanes) total += store_rounded(weights + i, weight(i));
  for (int64_t i = whole; i < panels * kPanel; i += kLanes)
    total += store_rounded(weights + i, before(i, seen) ? weight(i) : Floats{});
  row_sum = sum(total);
}

INLINE void softmax_tile(const Item& it, const KvTile& h, int64_t tile, AttentionScratch& s) {
  each_row(it, [&](int64_t row, const AttentionQuery& query, int64_t) {
    softmax(s.scores + row * kTile, seen_by(it, h, tile, query), h.panels, s.weights + row * kWeightRow,
            s.tile_max[row], s.tile_sum[row]);
  });
}

// tile[row] = sum over positions of weight * value. `next` is read afterwards.
INLINE void multiply_values(const Item& it, const KvTile& h, const Pair* next, AttentionScratch& s) {
  each_run_of_values(it, h, next, [&](int64_t begin, int64_t end, int64_t head, const Pair* following) {
    for (int64_t d = 0; d < it.dim; d += kPanel) {
      Stretch stretches[kPanels];
      stretch_values<2>(it, h, head, begin, end, d, following, stretches);
      for (int64_t strip = 0; strip < it.rows.count(); strip++) {
        const int64_t first = head * it.rows.rows + it.rows.start(strip);
        multiply<kWeightRow>(it.rows.size(strip),
                             {s.weights + first * kWeightRow + begin * kPanel / 2, stretches, end - begin, kPanel, 128,
                              s.tile + first * it.dim + d, it.dim, begin > 0});
        stretches[end - begin - 1].ahead[0] = nullptr;
      }
    }
  });
}

}  // namespace bf16_kv
}  // namespace ISA
