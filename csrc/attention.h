// Paged attention with one arithmetic for prefill and decode.
//
// The context is cut into tiles of kTile absolute positions. A query has a row max, a row sum and weighted values for
// each tile; the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) merges tiles in order of position. A
// tile is always computed with its own maximum. So the result is the same bit by bit whether tiles are merged at once
// (prefill), kept as partial results (split-KV decode), or merged onto what another thread has merged (a shared
// prefix). Scores are in base 2: queries include the factor log2(e) / sqrt(dim).
#pragma once

#include "attention_bf16.h"
#include "attention_int8.h"

namespace ISA {

// Merges the next tile of one query into its result. A fully masked tile changes nothing.
static __attribute__((noinline)) void merge(float* out, float& row_max, float& row_sum, const float* tile,
                                            float tile_max, float tile_sum, int64_t dim) {
  if (tile_max == -INFINITY) return;
  const float higher = row_max > tile_max ? row_max : tile_max;
  const Floats factors = exp2_to_126(Floats{row_max - higher, tile_max - higher});
  const float old = row_max == -INFINITY ? 0.0f : factors[0], fresh = factors[1];
  row_max = higher;
  row_sum = row_sum * old + tile_sum * fresh;
  for (int64_t i = 0; i < dim; i += kLanes)
    store(out + i, fma(load(tile + i), set1(fresh), load(out + i) * set1(old)));
}

// A partial result in memory: row max, row sum, padding up to 16 floats, values.
INLINE float* partial(const Item& it, int64_t result, const AttentionQuery& query, int64_t head) {
  return it.step.partials + query.partials + (result * it.op.heads + head) * (kPartialHead + it.dim);
}

INLINE void store_partial(float* out, const float* values, float row_max, float row_sum, int64_t dim) {
  out[0] = row_max, out[1] = row_sum;
  std::memcpy(out + kPartialHead, values, dim * sizeof(float));
}

// Starts from nothing, or from the partial results of earlier phases.
INLINE void begin(const Item& it, AttentionScratch& s) {
  each_row(it, [&](int64_t row, const AttentionQuery& query, int64_t head) {
    float* out = s.out + row * it.dim;
    if (!it.item.resumes) {
      std::memset(out, 0, it.dim * sizeof(float));
      s.row_max[row] = -INFINITY, s.row_sum[row] = 0.0f;
      return;
    }
    const float* merged = partial(it, 0, query, head);
    std::memcpy(out, merged + kPartialHead, it.dim * sizeof(float));
    s.row_max[row] = merged[0], s.row_sum[row] = merged[1];
    for (int64_t tile = 1; tile <= it.item.tiles; tile++) {
      const float* next = partial(it, tile, query, head);
      merge(out, s.row_max[row], s.row_sum[row], next + kPartialHead, next[0], next[1], it.dim);
    }
  });
}

// Merges one tile into the results, or stores it as a partial result.
INLINE void write_tile(const Item& it, int64_t tile, AttentionScratch& s) {
  const int64_t result = it.item.result + tile - it.item.tile_begin;
  each_row(it, [&](int64_t row, const AttentionQuery& query, int64_t head) {
    const float* values = s.tile + row * it.dim;
    if (it.item.write == Write::kTiles) {
      store_partial(partial(it, result, query, head), values, s.tile_max[row], s.tile_sum[row], it.dim);
    } else {
      merge(s.out + row * it.dim, s.row_max[row], s.row_sum[row], values, s.tile_max[row], s.tile_sum[row], it.dim);
    }
  });
}

INLINE void gather_queries(const Item& it, AttentionScratch& s) {
  if (it.op.cache.int8) return int8_kv::gather_queries(it, s);
  bf16_kv::gather_queries(it, s);
}

// Computes a tile on its own; `next` is read afterwards.
INLINE void attend_tile(const Item& it, const KvTile& here, int64_t tile, const Pair* next, AttentionScratch& s) {
  if (it.op.cache.int8) {
    int8_kv::score(it, here, here.values[0], s);
    int8_kv::softmax_tile(it, here, tile, s);
    int8_kv::multiply_values(it, here, next, s);
  } else {
    bf16_kv::score(it, here, here.values[0], s);
    bf16_kv::softmax_tile(it, here, tile, s);
    bf16_kv::multiply_values(it, here, next, s);
  }
}

// All tiles of an item; `after` is read when it is done.
INLINE void attend_tiles(const Item& it, const KvTile& after, AttentionScratch& s) {
  gather_queries(it, s);
  KvTile here = it.tile(it.item.tile_begin);
  for (int64_t tile = it.item.tile_begin; tile < it.item.tile_end; tile++) {
    const KvTile next = tile + 1 < it.item.tile_end ? it.tile(tile + 1) : after;
    attend_tile(it, here, tile, next.panels > 0 ? next.keys[0] : nullptr, s);
    write_tile(it, tile, s);
    here = next;
  }
}

INLINE void store_attended(const Item& it, const Strips& tokens, const AttentionScratch& s) {
  each_row(it, [&](int64_t row, const AttentionQuery& query, int64_t head) {
    int64_t stride;
    Pair* out = tokens.at(it.op.out, it.op.stride, query.token, stride);
    out += (it.op.first + head * it.dim) / 2 * stride;
    for (int64_t i = 0; i < it.dim; i += kLanes)
      store_pairs(out + i / 2 * stride, stride, load(s.out + row * it.dim + i) / set1(s.row_sum[row]));
  });
}

INLINE void store_merged(const Item& it, const AttentionScratch& s) {
  each_row(it, [&](int64_t row, const AttentionQuery& query, int64_t head) {
    store_partial(partial(it, 0, query, head), s.out + row * it.dim, s.row_max[row], s.row_sum[row], it.dim);
  });
}

// One item; `after` is read when its tiles are done.
INLINE void attend_item(const Item& it, const KvTile& after, AttentionScratch& s) {
  begin(it, s);
  attend_tiles(it, after, s);
  if (it.item.write == Write::kOut) store_attended(it, {it.step.tokens, kMaxRows}, s);
  if (it.item.write == Write::kMerged) store_merged(it, s);
}

static void paged_attention(const PagedAttention& op, const Step& step, Member& member) {
  static thread_local AttentionScratch s;
  for (int64_t phase = 0; phase < step.num_phases; phase++) {
    if (phase > 0) member.barrier();
    const AttentionItem* items = step.items + step.phases[phase];
    const int64_t count = step.phases[phase + 1] - step.phases[phase];
    Share share(member, count, 1);
    while (share.next()) {
      const Item it(op, step, items[share.begin]);
      KvTile after{};
      if (share.end < count) {
        const Item following(op, step, items[share.end]);
        after = following.tile(following.item.tile_begin);
      }
      attend_item(it, after, s);
    }
  }
}

}  // namespace ISA
