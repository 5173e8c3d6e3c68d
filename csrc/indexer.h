// The lightning indexer: scores all compressed entries of a token and selects the top-k.
#pragma once

#include <bit>

#include "mla.h"

namespace ISA {

constexpr int kIndexerKeys = 128;         // keys gathered at once
constexpr int kIndexerPiece = 2048;       // entries of a token that a thread scores at once
constexpr int kIndexerRow = kMaxDim / 2;  // pairs from one gathered key to the next

struct alignas(64) IndexerScratch {
  Pair keys[kIndexerKeys * kIndexerRow];
  float dots[kIndexerKeys * kPanel];  // [keys][heads]
  float sums[kIndexerKeys * kLanes];
};

INLINE int64_t entries_of(const IndexerTopK& op, const Step& step, int64_t token) {
  return (step.positions[token] + 1) / op.keys->ratio;
}

// Adds a panel's heads to the scores of each gathered key, in 16 partial sums.
INLINE void add_heads(const IndexerTopK& op, int64_t token, int64_t panel, int64_t count, IndexerScratch& s) {
  const int64_t panels = (op.heads + kPanel - 1) / kPanel;
  const Pair* queries = op.queries + (token * panels + panel) * (op.dim / 2) * kPanel;
  const Stretch stretch{queries, queries + kLanes, op.dim / 2, {nullptr, nullptr}};
  const Strips strips{count, kMaxRows};
  for (int64_t strip = 0; strip < strips.count(); strip++) {
    const int64_t first = strips.start(strip);
    multiply<kIndexerRow>(strips.size(strip), {s.keys + first * kIndexerRow, &stretch, 1, kPanel, 128,
                                             s.dots + first * kPanel, kPanel, false});
  }
  for (int64_t head = panel * kPanel; head < min((panel + 1) * kPanel, op.heads); head += kLanes) {
    const float* weights = op.weights + token * op.stride + head;
    const Floats weight = (Floats)load_some(weights, min(kLanes, op.heads - head)) * set1(op.scale);
    for (int64_t i = 0; i < count; i++) {
      const Floats dot = larger(load(s.dots + i * kPanel + head % kPanel), Floats{});
      store(s.sums + i * kLanes, fma(weight, dot, load(s.sums + i * kLanes)));
    }
  }
}

// Scores of a token's entries [begin, end).
static void score_entries(const IndexerTopK& op, const Step& step, int64_t token, int64_t begin, int64_t end,
                          float* scores) {
  static thread_local IndexerScratch s;
  for (int64_t first = begin; first < end; first += kIndexerKeys) {
    const int64_t count = min(kIndexerKeys, end - first);
    for (int64_t i = 0; i < count; i++) {
      const int64_t position = (first + i) * op.keys->ratio;
      const Pair* key = page_row<const Pair>(*op.keys, step, step.row_of[token], position);
      std::memcpy(s.keys + i * kIndexerRow, key, op.dim * sizeof(bf16));
    }
    std::memset(s.sums, 0, sizeof s.sums);
    for (int64_t panel = 0; panel * kPanel < op.heads; panel++) add_heads(op, token, panel, count, s);
    for (int64_t i = 0; i < count; i++) scores[first + i] = sum(load(s.sums + i * kLanes));
  }
}

// Integers in the order of floats; -0 equals +0.
INLINE uint32_t ordered(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x + 0.0f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// Selects the top-k of more than k scores, ties to the lower index, in ascending order. A radix select over the upper,
// middle and lower bits finds the k-th largest score.
static void topk_entries(const float* scores, int64_t entries, int64_t topk, int32_t* indices) {
  constexpr uint32_t kBuckets = 1 << 11;
  uint32_t found = 0, known = 0;
  int64_t left = topk;
  for (const int shift : {21, 10, 0}) {
    const uint32_t mask = (shift ? kBuckets : kBuckets / 2) - 1;
    int32_t counts[kBuckets] = {};
    for (int64_t i = 0; i < entries; i++) {
      const uint32_t key = ordered(scores[i]);
      if ((key & known) == found) counts[key >> shift & mask]++;
    }
    uint32_t bucket = mask;
    for (; counts[bucket] < left; bucket--) left -= counts[bucket];
    found |= bucket << shift;
    known |= mask << shift;
  }
  for (int64_t i = 0, n = 0; n < topk; i++) {
    const uint32_t key = ordered(scores[i]);
    if (key > found || (key == found && left-- > 0)) indices[n++] = static_cast<int32_t>(i);
  }
}

// Tokens [first, first + tokens) of a step. At least one sees more than topk entries, none more than `most`.
INLINE void indexer_tokens(const IndexerTopK& op, const Step& step, int64_t first, int64_t tokens, int64_t most,
                           Member& member) {
  const int64_t pieces = (most + kIndexerPiece - 1) / kIndexerPiece;
  Share scoring(member, tokens * pieces, 1);
  while (scoring.next()) {
    const int64_t t = scoring.begin / pieces, begin = scoring.begin % pieces * kIndexerPiece;
    const int64_t entries = entries_of(op, step, first + t);
    if (entries > op.topk)
      score_entries(op, step, first + t, begin, min(begin + kIndexerPiece, entries), op.scores + t * op.max_entries);
  }
  member.barrier();
  Share selecting(member, tokens, 1);
  while (selecting.next()) {
    const int64_t t = selecting.begin, entries = entries_of(op, step, first + t);
    if (entries > op.topk)
      topk_entries(op.scores + t * op.max_entries, entries, op.topk, op.indices + (first + t) * op.topk);
  }
  member.barrier();
}

static void indexer_topk(const IndexerTopK& op, const Step& step, Member& member) {
  const int64_t end = int64_t{step.tokens} * (op.part + 1) / op.parts;
  for (int64_t first = int64_t{step.tokens} * op.part / op.parts; first < end; first += kIndexerTokens) {
    const int64_t tokens = min(kIndexerTokens, end - first);
    int64_t most = 0;
    for (int64_t t = first; t < first + tokens; t++)
      if (const int64_t entries = entries_of(op, step, t); entries > most) most = entries;
    if (most > op.topk) indexer_tokens(op, step, first, tokens, most, member);
  }
}

}  // namespace ISA
