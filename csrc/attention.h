// Paged attention with one arithmetic for prefill and decode.
//
// The context is cut into tiles of kTile absolute positions. A query has a row max, a row sum and weighted values for
// each tile; the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) merges tiles in order of position. A
// tile is always computed with its own maximum. So the result is the same bit by bit whether tiles are merged at once
// (prefill), kept as partial results (split-KV decode), or merged onto what another thread has merged (a shared
// prefix). Scores are in base 2: queries include the factor log2(e) / sqrt(dim).
#pragma once

#include "gemm_tile.h"

namespace ISA {

constexpr int kPanels = kTile / kPanel;
constexpr int kQueryRow = kMaxDim / 2, kWeightRow = kTile / 2;  // pairs from one row to the next

// Addresses of one tile of one row's KV cache, for the first kv head of an item: a panel of keys and one of values for
// every 32 positions. The panels of the other heads follow at equal distances, so that all heads form one stream.
struct KvTile {
  int64_t known, panels;  // positions, and panels that hold them
  const Pair *keys[kPanels], *values[kPanels];
};

INLINE KvTile locate(const KvCache& cache, const int32_t* table, int64_t head, int64_t start, int64_t length) {
  KvTile h;
  h.known = start < length ? min(kTile, length - start) : 0;
  h.panels = (h.known + kPanel - 1) / kPanel;
  const int64_t panel_pairs = kPanel * cache.dim / 2;
  for (int64_t i = 0; i < h.panels; i++) {
    const int64_t position = start + i * kPanel, panel = position % cache.size / kPanel;
    const int64_t block = table[position / cache.size] * cache.block_stride + head * cache.size * cache.dim;
    h.keys[i] = reinterpret_cast<const Pair*>(cache.keys + block) + panel * panel_pairs;
    h.values[i] = reinterpret_cast<const Pair*>(cache.values + block) + panel * panel_pairs;
  }
  return h;
}

// Scratch of one item.
struct alignas(64) AttentionScratch {
  Pair queries[kItemRows * kQueryRow];
  float scores[kItemRows * kTile];
  Pair weights[kItemRows * kWeightRow];
  float tile[kItemRows * kMaxDim];
  float out[kItemRows * kMaxDim];
  float row_max[kItemRows], row_sum[kItemRows], tile_max[kItemRows], tile_sum[kItemRows];  // rows of all heads in order
};

// An item with its rows of the scratch, in this order: kv heads, queries, query heads of a kv head (GQA).
struct Item {
  Item(const PagedAttention& op, const Step& step, const AttentionItem& item)
      : op(op), step(step), item(item), queries(step.queries + item.first), shared(op.heads / op.cache.kv_heads),
        dim(op.cache.dim), table(step.groups[0].tables + item.row * step.groups[0].width),
        length(position(queries[item.queries - 1]) + 1), rows{item.queries * shared, kMaxRows} {}

  int64_t heads() const { return item.head_end - item.head_begin; }
  int64_t head_pairs() const { return op.cache.size * dim / 2; }  // from one head of a block to the next
  int64_t position(const AttentionQuery& query) const { return step.positions[query.token]; }
  KvTile tile(int64_t number) const { return locate(op.cache, table, item.head_begin, number * kTile, length); }

  const PagedAttention& op;
  const Step& step;
  const AttentionItem& item;
  const AttentionQuery* queries;
  int64_t shared, dim;
  const int32_t* table;
  int64_t length;  // positions known to the last query
  Strips rows;     // of one kv head
};

// Calls visit(row, its query, its head among those of queries) for all rows of the scratch.
template <typename Visit>
INLINE void each_row(const Item& it, Visit visit) {
  int64_t row = 0;
  for (int64_t head = it.item.head_begin; head < it.item.head_end; head++)
    for (int64_t query = 0; query < it.item.queries; query++)
      for (int64_t i = 0; i < it.shared; i++) visit(row++, it.queries[query], head * it.shared + i);
}

INLINE void gather_queries(const Item& it, AttentionScratch& s) {
  each_row(it, [&](int64_t row, const AttentionQuery& query, int64_t head) {
    const int64_t place = query.token * int64_t{it.op.heads} + head;
    std::memcpy(s.queries + row * kQueryRow, it.op.queries + place * it.dim, it.dim * sizeof(bf16));
  });
}

// A stretch over a whole panel. It prefetches the panel at `next`, 128 bytes per step, or nothing.
INLINE Stretch stretch_of(const Pair* panel, int64_t pairs, const Pair* next) {
  const char* ahead = reinterpret_cast<const char*>(next);
  return {panel, panel + kLanes, pairs, {ahead, ahead ? ahead + 64 : nullptr}};
}

// scores[row][i] = query . key i of the tile: for each panel, all heads in order. `next` is read afterwards.
INLINE void score(const Item& it, const KvTile& h, const Pair* next, AttentionScratch& s) {
  const int64_t heads = it.heads(), stride = it.head_pairs();
  for (int64_t i = 0; i < h.panels; i++) {
    for (int64_t head = 0; head < heads; head++) {
      const Pair* keys = h.keys[i] + head * stride;
      const Pair* following = head + 1 < heads ? keys + stride : i + 1 < h.panels ? h.keys[i + 1] : next;
      Stretch stretch = stretch_of(keys, it.dim / 2, following);
      for (int64_t strip = 0; strip < it.rows.count(); strip++) {
        const int64_t first = head * it.rows.rows + it.rows.start(strip);
        multiply<kQueryRow>(it.rows.size(strip), {s.queries + first * kQueryRow, &stretch, 1, kPanel, 128,
                                                  s.scores + first * kTile + i * kPanel, kTile, false});
        stretch.ahead[0] = nullptr;
      }
    }
  }
}

// Softmax numerators of a row over positions [0, seen) of a tile: 2^(score - row_max) in bfloat16, zeros up to the end
// of the last panel. row_sum adds up the rounded numbers.
INLINE void softmax(const float* scores, int64_t seen, int64_t panels, Pair* out, float& row_max, float& row_sum) {
  const int64_t whole = seen / kLanes * kLanes;  // positions [0, whole) fill all lanes
  const auto inside = [&](int64_t i) { return lane_numbers() + static_cast<int32_t>(i) < static_cast<int32_t>(seen); };
  Floats top = set1(-INFINITY);
  for (int64_t i = 0; i < whole; i += kLanes) top = larger(top, load(scores + i));
  if (whole < seen) top = larger(top, inside(whole) ? load(scores + whole) : set1(-INFINITY));
  row_max = seen > 0 ? largest(top) : -INFINITY;
  bf16* weights = reinterpret_cast<bf16*>(out);
  const auto weight = [&](int64_t i) { return exp2_to_126(load(scores + i) - set1(row_max)); };
  Floats total{};
  for (int64_t i = 0; i < whole; i += kLanes) total += store_rounded(weights + i, weight(i));
  for (int64_t i = whole; i < panels * kPanel; i += kLanes)
    total += store_rounded(weights + i, inside(i) ? weight(i) : Floats{});
  row_sum = sum(total);
}

// tile[row] (+)= sum over the positions of panels [begin, end) of weight * value, for the rows of one head. The panel
// at `next` is read afterwards.
INLINE void multiply_value_panels(const Item& it, const KvTile& h, int64_t head, int64_t begin, int64_t end,
                                  const Pair* next, AttentionScratch& s) {
  constexpr int64_t kChunk = kPanel / 2 * kPanel;  // pairs of 32 dimensions in a panel
  for (int64_t d = 0; d < it.dim; d += kPanel) {
    const int64_t chunk = d / kPanel * kChunk;
    Stretch stretches[kPanels];
    for (int64_t i = begin; i < end; i++) {
      const int64_t pairs = min(kPanel, h.known - i * kPanel + 1) / 2;
      const bool last = i + 1 == end;
      stretches[i - begin] =
          stretch_of(h.values[i] + head * it.head_pairs() + chunk, pairs, last && next ? next + chunk : nullptr);
    }
    for (int64_t strip = 0; strip < it.rows.count(); strip++) {
      const int64_t first = head * it.rows.rows + it.rows.start(strip);
      multiply<kWeightRow>(it.rows.size(strip),
                           {s.weights + first * kWeightRow + begin * kPanel / 2, stretches, end - begin, kPanel, 128,
                            s.tile + first * it.dim + d, it.dim, begin > 0});
      stretches[end - begin - 1].ahead[0] = nullptr;
    }
  }
}

// tile[row] = sum over positions of weight * value. Several heads alternate panel by panel, so that the values of a
// block are one stream. One head alone takes all panels at once and keeps its sums in registers. `next` is read
// afterwards.
INLINE void multiply_values(const Item& it, const KvTile& h, const Pair* next, AttentionScratch& s) {
  const int64_t heads = it.heads(), run = heads == 1 ? h.panels : 1;
  for (int64_t begin = 0; begin < h.panels; begin += run)
    for (int64_t head = 0; head < heads; head++) {
      const Pair* values = h.values[begin] + head * it.head_pairs();
      const Pair* following = head + 1 < heads ? values + it.head_pairs()
                              : begin + run < h.panels ? h.values[begin + run] : next;
      multiply_value_panels(it, h, head, begin, begin + run, following, s);
    }
}

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

INLINE void softmax_tile(const Item& it, const KvTile& h, int64_t tile, AttentionScratch& s) {
  each_row(it, [&](int64_t row, const AttentionQuery& query, int64_t) {
    const int64_t seen = it.position(query) + 1 - tile * kTile;
    softmax(s.scores + row * kTile, seen < 0 ? 0 : min(seen, h.known), h.panels, s.weights + row * kWeightRow,
          s.tile_max[row], s.tile_sum[row]);
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

// All tiles of an item; `after` is read when it is done.
INLINE void attend_tiles(const Item& it, const KvTile& after, AttentionScratch& s) {
  gather_queries(it, s);
  KvTile here = it.tile(it.item.tile_begin);
  for (int64_t tile = it.item.tile_begin; tile < it.item.tile_end; tile++) {
    const KvTile next = tile + 1 < it.item.tile_end ? it.tile(tile + 1) : after;
    score(it, here, here.values[0], s);
    softmax_tile(it, here, tile, s);
    multiply_values(it, here, next.panels > 0 ? next.keys[0] : nullptr, s);
    write_tile(it, tile, s);
    here = next;
  }
}

INLINE void store_attended(const Item& it, const Strips& tokens, const AttentionScratch& s) {
  each_row(it, [&](int64_t row, const AttentionQuery& query, int64_t head) {
    int64_t stride;
    Pair* out = tokens.at(it.op.out, it.op.heads * it.dim / 2, query.token, stride);
    out += head * it.dim / 2 * stride;
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
