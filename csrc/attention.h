// Paged attention with one arithmetic for prefill and decode.
//
// History is cut into tiles of kTile absolute positions. For each tile, a query has its own largest score, its sum of
// exponentials and its weighted values; tiles are merged in order of position by the online softmax (Milakov and
// Gimelshein 2018, arXiv:1805.02867), with their own maximum, so that it makes no difference whether a tile's result
// was kept in memory until all were there (decode, shared by threads) or merged at once (prefill). Scores are in base
// 2: the queries carry the factor log2(e) / sqrt(dim).
#pragma once

#include "tile.h"

namespace ISA {

constexpr int kMaxQueries = 96;  // rows of an item: queries times the heads that share a key
constexpr int kMaxDim = 256;
constexpr int kPanels = kTile / kLanes;
constexpr int kQueryRow = kMaxDim / 2, kWeightRow = kTile / 2;  // pairs from one row to the next

// Where one tile of one row's history lies, for one kv head: for every 16 positions a panel of keys, [dim / 2][16] pairs
// of dimensions, and one of values, [8][dim] pairs of positions.
struct History {
  int64_t known, panels;  // positions, and panels that hold them
  const Pair *keys[kPanels], *values[kPanels];
};

INLINE History locate(const Cache& cache, const int32_t* table, int64_t head, int64_t start, int64_t length) {
  History h;
  h.known = start < length ? min(kTile, length - start) : 0;
  h.panels = (h.known + kLanes - 1) / kLanes;
  const int64_t panel_pairs = kLanes * cache.dim / 2;
  for (int64_t i = 0; i < h.panels; i++) {
    const int64_t position = start + i * kLanes, panel = position % cache.size / kLanes;
    const int64_t block = table[position / cache.size] * cache.block_stride + head * cache.size * cache.dim;
    h.keys[i] = reinterpret_cast<const Pair*>(cache.keys + block) + panel * panel_pairs;
    h.values[i] = reinterpret_cast<const Pair*>(cache.values + block) + panel * panel_pairs;
  }
  return h;
}

// Scratch of one item.
struct AttentionScratch {
  Pair queries[kMaxQueries * kQueryRow];
  float scores[kMaxQueries * kTile];
  Pair weights[kMaxQueries * kWeightRow];
  float tile[kMaxQueries * kMaxDim];
  float out[kMaxQueries * kMaxDim];
  float peak[kMaxQueries], mass[kMaxQueries], tile_peak[kMaxQueries], tile_mass[kMaxQueries];
};

INLINE void gather_queries(const Attend& op, const AttentionItem& item, int64_t head, int64_t rows,
                           AttentionScratch& s) {
  const int64_t shared = op.heads / op.cache.kv_heads, dim = op.cache.dim;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t token = item.first + row / shared, query = head * shared + row % shared;
    std::memcpy(s.queries + row * kQueryRow, op.queries + (token * op.heads + query) * dim, dim * sizeof(bf16));
  }
}

INLINE const char* bytes(const Pair* p) { return reinterpret_cast<const char*>(p); }

// scores[row][i] = query . key i of the tile, for all of its panels. The values of the same positions are fetched
// meanwhile: as many bytes as the keys.
INLINE void score(const History& h, int64_t dim, const Strips& rows, AttentionScratch& s) {
  for (int64_t i = 0; i < h.panels; i += 2) {
    const int64_t other = i + 1 < h.panels ? i + 1 : i;
    Stretch stretch{h.keys[i], h.keys[other], dim / 2, {bytes(h.values[i]), bytes(h.values[other])}};
    for (int64_t strip = 0; strip < rows.count(); strip++) {
      const int64_t first = rows.start(strip);
      multiply<kQueryRow>(rows.size(strip), {s.queries + first * kQueryRow, &stretch, 1, kLanes, 64,
                                             s.scores + first * kTile + i * kLanes, kTile});
      stretch.ahead[0] = nullptr;
    }
  }
}

// Turns a row's scores of positions [0, seen) of a tile into weights 2^(score - peak) in bfloat16, with zeros up to the
// end of the last panel; the mass counts the rounded weights.
INLINE void weigh(const float* scores, int64_t seen, int64_t panels, Pair* out, float& peak, float& mass) {
  const Floats lowest = set1(-INFINITY);
  Floats top = lowest;
  for (int64_t i = 0; i < seen; i += kLanes) {
    const Ints inside = lane_numbers() + static_cast<int32_t>(i) < static_cast<int32_t>(seen);
    top = larger(top, inside ? load(scores + i) : lowest);
  }
  peak = seen > 0 ? largest(top) : -INFINITY;
  Floats total{};
  for (int64_t i = 0; i < panels * kLanes; i += kLanes) {
    const Ints inside = lane_numbers() + static_cast<int32_t>(i) < static_cast<int32_t>(seen);
    const Floats weight = inside ? exp2(load(scores + i) - set1(peak)) : Floats{};
    bf16* rounded = reinterpret_cast<bf16*>(out) + i;
    store_narrow(rounded, weight);
    total += load_widen(rounded);
  }
  mass = sum(total);
}

// tile[row] = sum over positions of weight * value. Meanwhile the keys of the next tile are fetched, a part of each
// panel with every 32 dimensions.
INLINE void mix(const History& h, const History& next, int64_t dim, const Strips& rows, AttentionScratch& s) {
  const int64_t part = kLanes / 2 * 128;
  for (int64_t d = 0; d < dim; d += kPanel) {
    Stretch stretches[kPanels];
    for (int64_t i = 0; i < h.panels; i++) {
      const char* ahead = i < next.panels ? bytes(next.keys[i]) + d / kPanel * part : nullptr;
      const int64_t pairs = min(kLanes, h.known - i * kLanes + 1) / 2;
      stretches[i] = {h.values[i] + d, h.values[i] + d + kLanes, pairs, {ahead, ahead + 64}};
    }
    for (int64_t strip = 0; strip < rows.count(); strip++) {
      const int64_t first = rows.start(strip);
      multiply<kWeightRow>(rows.size(strip), {s.weights + first * kWeightRow, stretches, h.panels, dim, 128,
                                              s.tile + first * dim + d, dim});
      for (int64_t i = 0; i < h.panels; i++) stretches[i].ahead[0] = nullptr;
    }
  }
}

INLINE float power(float x) {
  float lane[kLanes];
  store(lane, exp2(set1(x)));
  return lane[0];
}

// Takes the next tile of one query into its result. A tile of which it sees nothing changes nothing.
static __attribute__((noinline)) void merge(float* out, float& peak, float& mass, const float* tile, float tile_peak,
                                            float tile_mass, int64_t dim) {
  if (tile_peak == -INFINITY) return;
  const float higher = peak > tile_peak ? peak : tile_peak;
  const float old = peak == -INFINITY ? 0.0f : power(peak - higher), fresh = power(tile_peak - higher);
  peak = higher;
  mass = mass * old + tile_mass * fresh;
  for (int64_t i = 0; i < dim; i += kLanes)
    store(out + i, fma(load(tile + i), set1(fresh), load(out + i) * set1(old)));
}

INLINE void reset(AttentionScratch& s, int64_t rows, int64_t dim) {
  std::memset(s.out, 0, rows * dim * sizeof(float));
  for (int64_t row = 0; row < rows; row++) s.peak[row] = -INFINITY, s.mass[row] = 0.0f;
}

// Floats of a query's stored tile: peak, mass, 14 of padding, values.
INLINE int64_t partial_size(int64_t dim) { return kLanes + dim; }

INLINE float* partial(const Attend& op, const Step& step, const AttentionItem& item, int64_t head, int64_t tile,
                      int64_t rows) {
  return step.partials + item.partial + ((tile * op.cache.kv_heads + head) * rows) * partial_size(op.cache.dim);
}

INLINE int64_t length_of(const Step& step, const AttentionItem& item) {
  return step.positions[item.first] + item.queries;
}

INLINE const int32_t* table_of(const Step& step, const AttentionItem& item) {
  return step.tables + static_cast<int64_t>(item.row) * step.table_width;
}

// The first tile of the next piece of work, so that its keys come while this one ends.
INLINE History first_tile(const Attend& op, const Step& step, int64_t work) {
  if (work >= step.num_items * op.cache.kv_heads) return {};
  const AttentionItem& item = step.items[work / op.cache.kv_heads];
  return locate(op.cache, table_of(step, item), work % op.cache.kv_heads, item.tile_begin * kTile,
                length_of(step, item));
}

// Computes the item's tiles for one kv head; results go to `s`, merged, or to memory, each by itself.
INLINE void attend_tiles(const Attend& op, const Step& step, const AttentionItem& item, int64_t head,
                         const Strips& rows, const History& after, AttentionScratch& s) {
  const int64_t dim = op.cache.dim, shared = op.heads / op.cache.kv_heads;
  const int32_t* table = table_of(step, item);
  const int64_t first = step.positions[item.first], length = length_of(step, item);
  gather_queries(op, item, head, rows.rows, s);
  History here = locate(op.cache, table, head, item.tile_begin * kTile, length);
  for (int64_t tile = item.tile_begin; tile < item.tile_end; tile++) {
    const int64_t start = tile * kTile;
    const History next = tile + 1 < item.tile_end ? locate(op.cache, table, head, start + kTile, length) : after;
    score(here, dim, rows, s);
    for (int64_t row = 0; row < rows.rows; row++) {
      const int64_t seen = first + row / shared + 1 - start;
      weigh(s.scores + row * kTile, seen < 0 ? 0 : min(seen, here.known), here.panels, s.weights + row * kWeightRow,
            s.tile_peak[row], s.tile_mass[row]);
    }
    mix(here, next, dim, rows, s);
    here = next;
    for (int64_t row = 0; row < rows.rows; row++) {
      if (item.partial < 0) {
        merge(s.out + row * dim, s.peak[row], s.mass[row], s.tile + row * dim, s.tile_peak[row], s.tile_mass[row], dim);
        continue;
      }
      float* kept = partial(op, step, item, head, tile, rows.rows) + row * partial_size(dim);
      kept[0] = s.tile_peak[row], kept[1] = s.tile_mass[row];
      std::memcpy(kept + kLanes, s.tile + row * dim, dim * sizeof(float));
    }
  }
}

// Merges the tiles that all parts of a history have stored, in order.
INLINE void merge_parts(const Attend& op, const Step& step, const AttentionItem& item, int64_t head, int64_t rows,
                        AttentionScratch& s) {
  const int64_t dim = op.cache.dim, length = length_of(step, item);
  for (int64_t tile = 0; tile * kTile < length; tile++)
    for (int64_t row = 0; row < rows; row++) {
      const float* kept = partial(op, step, item, head, tile, rows) + row * partial_size(dim);
      merge(s.out + row * dim, s.peak[row], s.mass[row], kept + kLanes, kept[0], kept[1], dim);
    }
}

INLINE void store_attended(const Attend& op, const Step& step, const AttentionItem& item, int64_t head, int64_t rows,
                           const AttentionScratch& s) {
  const int64_t dim = op.cache.dim, shared = op.heads / op.cache.kv_heads;
  const Strips strips{step.tokens, kMaxRows};
  for (int64_t row = 0; row < rows; row++) {
    int64_t stride;
    Pair* out = strips.at(op.out, op.heads * dim / 2, item.first + row / shared, stride);
    out += (head * shared + row % shared) * dim / 2 * stride;
    for (int64_t i = 0; i < dim; i += kLanes)
      store_pairs(out + i / 2 * stride, stride, load(s.out + row * dim + i) / set1(s.mass[row]));
  }
}

static void attend(const Attend& op, const Step& step, Member& member) {
  static thread_local AttentionScratch s;
  const int64_t kv_heads = op.cache.kv_heads, shared = op.heads / kv_heads;
  Share share(member, step.num_items * kv_heads, 1);
  while (share.next()) {
    const AttentionItem& item = step.items[share.begin / kv_heads];
    const int64_t head = share.begin % kv_heads;
    const Strips rows{item.queries * shared, kMaxRows};
    reset(s, rows.rows, op.cache.dim);
    attend_tiles(op, step, item, head, rows, first_tile(op, step, share.begin + 1), s);
    if (item.partial >= 0) {
      std::atomic<int32_t>& finished = step.finished[item.group * kv_heads + head];
      if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 < item.parts) continue;
      finished.store(0, std::memory_order_relaxed);
      merge_parts(op, step, item, head, rows.rows, s);
    }
    store_attended(op, step, item, head, rows.rows, s);
  }
}

}  // namespace ISA
