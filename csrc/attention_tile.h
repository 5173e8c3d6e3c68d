// What attention works on: the tiles of a paged KV cache, the rows of an item, and scratch.
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
  for (int64_t i = 0; i < h.panels; i++) {
    const int64_t position = start + i * kPanel;
    const int64_t panel = table[position / cache.size] * cache.block_stride + head * cache.head_words() +
                          position % cache.size / kPanel * cache.panel_words();
    h.keys[i] = cache.keys + panel;
    h.values[i] = cache.values + panel;
  }
  return h;
}

// A row as whole numbers of 16 bits, in two signed bytes each: their unit, and -128 times their sum.
struct Fixed {
  float unit;
  int32_t offset;
};

// Scratch of one item.
struct alignas(64) AttentionScratch {
  Pair queries[kItemRows * kQueryRow];
  float scores[kItemRows * kTile];
  Pair weights[kItemRows * kWeightRow];
  float tile[kItemRows * kMaxDim];
  float out[kItemRows * kMaxDim];
  float row_max[kItemRows], row_sum[kItemRows], tile_max[kItemRows], tile_sum[kItemRows];  // rows of all heads in order
  Fixed fixed_queries[kItemRows], fixed_weights[kItemRows];  // of an int8 cache
};

// An item with its rows of the scratch, in this order: kv heads, queries, query heads of a kv head (GQA).
struct Item {
  Item(const PagedAttention& op, const Step& step, const AttentionItem& item)
      : op(op), step(step), item(item), queries(step.queries + item.first), shared(op.heads / op.cache.kv_heads),
        dim(op.cache.dim), table(step.table(0, item.row)),
        length(position(queries[item.queries - 1]) + 1), rows{item.queries * shared, kMaxRows} {}

  int64_t heads() const { return item.head_end - item.head_begin; }
  int64_t head_words() const { return op.cache.head_words(); }  // from one head of a block to the next
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

// A stretch over a whole panel. It prefetches the panel at `next`, 128 bytes per step, or nothing.
INLINE Stretch stretch_of(const Pair* panel, int64_t pairs, const Pair* next) {
  const char* ahead = reinterpret_cast<const char*>(next);
  return {panel, panel + kLanes, pairs, {ahead, ahead ? ahead + 64 : nullptr}};
}

// Calls visit(begin, end, head, following) for panels [begin, end) of a tile, `run` at a time, and for all heads of an
// item in order. `panels` are those of the first head; the panel at `following` is read afterwards, at last `next`.
template <typename Visit>
INLINE void each_run(const Item& it, const Pair* const* panels, int64_t count, int64_t run, const Pair* next,
                     Visit visit) {
  const int64_t heads = it.heads(), stride = it.head_words();
  for (int64_t begin = 0; begin < count; begin += run) {
    const Pair* behind = begin + run < count ? panels[begin + run] : next;
    for (int64_t head = 0; head < heads; head++)
      visit(begin, begin + run, head, head + 1 < heads ? panels[begin] + (head + 1) * stride : behind);
  }
}

// The same for values. Several heads alternate panel by panel, so that the values of a block are one stream. One head
// alone takes all panels at once and keeps its sums in registers.
template <typename Visit>
INLINE void each_run_of_values(const Item& it, const KvTile& h, const Pair* next, Visit visit) {
  each_run(it, h.values, h.panels, it.heads() == 1 ? h.panels : 1, next, visit);
}

// Stretches over dimensions [d, d + 32) of the values of panels [begin, end) of a head, whose words hold `kEach`
// positions. The last one prefetches the same dimensions of the panel at `next`.
template <int kEach>
INLINE void stretch_values(const Item& it, const KvTile& h, int64_t head, int64_t begin, int64_t end, int64_t d,
                           const Pair* next, Stretch* out) {
  const int64_t chunk = d / kEach * kPanel;
  for (int64_t i = begin; i < end; i++) {
    const int64_t words = (min(kPanel, h.known - i * kPanel) + kEach - 1) / kEach;
    const bool last = i + 1 == end;
    out[i - begin] =
        stretch_of(h.values[i] + head * it.head_words() + chunk, words, last && next ? next + chunk : nullptr);
  }
}

// Lanes i to i + 15 that lie before `end`.
INLINE Ints before(int64_t i, int64_t end) {
  return lane_numbers() + static_cast<int32_t>(i) < static_cast<int32_t>(end);
}

// The row max over positions [0, seen) of a tile.
INLINE float largest_score(const float* scores, int64_t seen) {
  const int64_t whole = seen / kLanes * kLanes;
  Floats top = set1(-INFINITY);
  for (int64_t i = 0; i < whole; i += kLanes) top = larger(top, load(scores + i));
  if (whole < seen) top = larger(top, before(whole, seen) ? load(scores + whole) : set1(-INFINITY));
  return seen > 0 ? largest(top) : -INFINITY;
}

// Positions of a tile that a query sees.
INLINE int64_t seen_by(const Item& it, const KvTile& h, int64_t tile, const AttentionQuery& query) {
  const int64_t seen = it.position(query) + 1 - tile * kTile;
  return seen < 0 ? 0 : min(seen, h.known);
}

}  // namespace ISA
