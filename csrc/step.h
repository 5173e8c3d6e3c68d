// What the operations of a step work on: its arrays, and how its attention is cut into items.
#pragma once

#include <cstdint>

#include "fields.h"

namespace pypto {

// Positions per attention tile. Tiles start at multiples of it.
constexpr int kTile = 128;

// Floats in front of the values of a partial result: row max, row sum, padding.
constexpr int kPartialHead = 16;

// Most rows of an attention item: queries times query heads.
constexpr int kItemRows = 96;

// A query of an item: its token, and the offset of its partial results in Step::partials, in floats. Result 0 holds
// what has been merged so far; the others are tiles to merge after it, in order. Each result covers all heads.
struct AttentionQuery {
  int32_t token;
  int64_t partials;
};

// What an attention item writes.
enum class Write : int32_t {
  kOut,     // the attention output; this is the last item of its queries
  kMerged,  // all tiles merged, as partial result 0
  kTiles,   // each tile as a partial result, from `result` on (split-KV)
};

// Work of one thread: queries [first, first + queries) of the step's list attend with kv heads [head_begin, head_end)
// to tiles [tile_begin, tile_end) of the block table of `row`. The queries may belong to several rows that share these
// tiles; then every query sees every tile. An item that `resumes` starts from result 0 and merges the `tiles` after it.
struct AttentionItem {
  int32_t row, first, queries, head_begin, head_end, tile_begin, tile_end;
  Write write = Write::kOut;
  bool resumes = false;
  int32_t result = 0, tiles = 0;
};

// Slot mapping [tokens] and block tables of a step in one KV group; `width` ids from one row to the next.
struct GroupTables {
  const int32_t *slots, *tables;
  int64_t width;
  FIELDS(slots, tables, width)
};

// One step over `rows` rows and `tokens` tokens; see StepInputs in pypto_serving/backend/base.py for the arrays.
struct Step {
  int32_t tokens = 0, rows = 0, logits = 0;
  int32_t first_token = 0, first_row = 0;  // in the arrays of groups, which are those of the whole step
  int32_t slot = 0;  // its place among the steps in flight, of which each has buffers of its own
  const int32_t *token_ids, *positions, *query_start, *context_lens, *logits_rows;
  const GroupTables* groups;
  const int32_t* row_of = nullptr;  // [tokens]
  // Attention items [phases[i], phases[i + 1]) need the partial results of all earlier phases.
  const AttentionItem* items = nullptr;
  const AttentionQuery* queries = nullptr;
  float* partials = nullptr;
  const int64_t* phases = nullptr;
  int64_t num_phases = 0;

  const int32_t* slots(int group) const { return groups[group].slots + first_token; }
  const int32_t* table(int group, int64_t row) const {
    return groups[group].tables + (first_row + row) * groups[group].width;
  }
};

}  // namespace pypto
