#include "attention_plan.h"

#include <algorithm>

namespace pypto {
namespace {

constexpr int64_t kItemsPerThread = 4;  // enough to balance the threads
constexpr int32_t kFewQueries = 4;  // rows with more queries are not split or shared: too many partial results
constexpr int64_t kMaxPartials = 16 << 20;  // floats of partial results; beyond that nothing is split or shared
constexpr int32_t kAimedRows = 48;  // of an item: queries, or softmax weights, and a panel fit the L1 cache
constexpr int64_t kFreeRows = 12;  // rows computed while their tile is read from memory

// In rows and tiles of one head.
int64_t work(const AttentionItem& item, int shared) {
  const int64_t tiles = std::max(1, item.tile_end - item.tile_begin), rows = int64_t{item.queries} * shared;
  return (item.head_end - item.head_begin) * tiles * std::max(rows, kFreeRows);
}

// The number of parts to split a piece of `work` into, where `total` should make `wanted` equal parts. A piece slightly
// larger than one part stays whole.
int64_t parts_of(int64_t work, int64_t wanted, int64_t total) {
  const int64_t tenths = 9 * work * wanted, whole = 10 * std::max<int64_t>(1, total);
  return std::max<int64_t>(1, (tenths + whole - 1) / whole);
}

}  // namespace

void AttentionPlan::shape(int shared, int kv_heads, int dim, int size) {
  shared_ = shared, kv_heads_ = kv_heads, dim_ = dim, size_ = size;
}

int32_t AttentionPlan::most_queries() const { return std::max(1, kAimedRows / shared_); }

// An item holds as many queries of a row as fit, and as many kv heads: the heads of a layer lie side by side in a
// block, and reading them together makes long streams. Shared prefixes come first, as items over the queries of all
// their rows (cascade attention). If there are too few items for the threads, long contexts are split (split-KV), then
// heads.
void AttentionPlan::make(Step& step, int threads) {
  if (kv_heads_ == 0) return;
  const int64_t wanted = threads > 1 ? kItemsPerThread * threads : 0;
  items_.clear(), last_.clear(), phases_.clear(), queries_.clear();
  rows_.assign(step.rows, {0, 0});
  partial_floats_ = 0;
  for (int32_t token = 0; token < step.tokens; token++) queries_.push_back({token, 0});
  share_prefixes(step);
  for (int32_t row = 0; row < step.rows; row++) add_row(step, row);
  if (wanted) cut_histories(step, wanted);
  begin_phase();
  items_.insert(items_.end(), last_.begin(), last_.end());
  begin_phase();
  if (wanted) cut_heads(wanted);
  place_partials(step);
  step.items = items_.data(), step.queries = queries_.data(), step.partials = partials_.data();
  step.phases = phases_.data(), step.num_phases = static_cast<int64_t>(phases_.size()) - 1;
}

void AttentionPlan::share_prefixes(const Step& step) {
  prefixes_.clear(size_);
  int64_t floats = 0;
  for (int32_t row = 0; row < step.rows; row++) {
    const int32_t first = step.query_start[row], queries = step.query_start[row + 1] - first;
    const bool few = queries > 0 && queries <= kFewQueries && 2 * queries <= most_queries();
    if (!few || step.positions[first] + 1 < kTile) continue;
    floats += queries * result_floats();
    if (floats > kMaxPartials) break;
    prefixes_.add(row, (step.positions[first] + 1) / kTile);
  }
  prefixes_.find(step);
  for (size_t level = 0; level + 1 < prefixes_.levels().size(); level++) {
    begin_phase();
    for (int32_t i = prefixes_.levels()[level]; i < prefixes_.levels()[level + 1]; i++)
      add_group(step, prefixes_.groups()[i]);
  }
}

// Splits a group's queries into items of about equal size, as few as fit.
void AttentionPlan::add_group(const Step& step, const Prefixes::Group& group) {
  const auto queries_of = [&](int32_t row) { return step.query_start[row + 1] - step.query_start[row]; };
  const auto begin = prefixes_.rows().begin() + group.begin, end = prefixes_.rows().begin() + group.end;
  int32_t all = 0;
  for (auto row = begin; row != end; row++) all += queries_of(*row);
  const int32_t items = (all + most_queries() - 1) / most_queries(), each = (all + items - 1) / items;
  for (auto row = begin; row != end;) {
    AttentionItem item{*row, static_cast<int32_t>(queries_.size()), 0, 0, kv_heads_, group.tile_begin, group.tile_end};
    item.write = Write::kMerged, item.resumes = group.tile_begin > 0;
    for (; row != end && item.queries < each && item.queries + queries_of(*row) <= most_queries(); row++) {
      for (int32_t i = 0; i < queries_of(*row); i++) queries_.push_back({step.query_start[*row] + i, 0});
      item.queries += queries_of(*row);
      if (rows_[*row].kept == 0) partial_floats_ += queries_of(*row) * result_floats();
      rows_[*row] = {group.tile_end, 1};
    }
    add_heads(item, items_);
  }
}

void AttentionPlan::add_row(const Step& step, int32_t row) {
  const int32_t begin = step.query_start[row], end = step.query_start[row + 1], tiles = rows_[row].tiles;
  for (int32_t first = begin; first < end; first += most_queries()) {
    const int32_t queries = std::min(most_queries(), end - first), length = step.positions[first] + queries;
    AttentionItem item{row, first, queries, 0, kv_heads_, tiles, (length + kTile - 1) / kTile};
    item.resumes = tiles > 0;
    add_heads(item, last_);
  }
}

void AttentionPlan::add_heads(AttentionItem item, std::vector<AttentionItem>& items) const {
  const int32_t heads = std::clamp(kAimedRows / (item.queries * shared_), 1, kv_heads_);
  for (int32_t head = 0; head < kv_heads_; head += heads) {
    item.head_begin = head, item.head_end = std::min(head + heads, kv_heads_);
    items.push_back(item);
  }
}

// Split-KV: moves tiles of the last items into items of their own, in the phase before the last.
void AttentionPlan::cut_histories(const Step& step, int64_t wanted) {
  int64_t total = 0;
  for (const AttentionItem& item : last_) total += work(item, shared_);
  for (AttentionItem& item : last_) {
    const int32_t begin = item.tile_begin, tiles = item.tile_end - begin;
    const int64_t parts = std::min<int64_t>(parts_of(work(item, shared_), wanted, total), tiles);
    if (parts < 2 || item.queries > kFewQueries) continue;
    Row& row = rows_[item.row];
    const int32_t merged = item.resumes ? 0 : static_cast<int32_t>(tiles / parts), kept = 1 + tiles - merged;
    const int64_t queries = step.query_start[item.row + 1] - step.query_start[item.row];
    const int64_t more = std::max(0, kept - row.kept) * queries * result_floats();
    if (partial_floats_ + more > kMaxPartials) continue;
    partial_floats_ += more;
    row.kept = std::max(row.kept, kept);
    if (phases_.empty()) begin_phase();
    for (int64_t part = 0; part < parts; part++) {
      AttentionItem piece = item;
      piece.resumes = false;
      piece.tile_begin = static_cast<int32_t>(begin + tiles * part / parts);
      piece.tile_end = static_cast<int32_t>(begin + tiles * (part + 1) / parts);
      piece.write = piece.tile_begin == 0 ? Write::kMerged : Write::kTiles;
      piece.result = 1 + piece.tile_begin - begin - merged;
      items_.push_back(piece);
    }
    item.tile_begin = item.tile_end, item.tiles = tiles - merged, item.resumes = true;
  }
}

void AttentionPlan::cut_heads(int64_t wanted) {
  pieces_.clear();
  for (size_t phase = 0; phase + 1 < phases_.size(); phase++) {
    const auto begin = items_.begin() + phases_[phase], end = items_.begin() + phases_[phase + 1];
    phases_[phase] = static_cast<int64_t>(pieces_.size());
    int64_t total = 0;
    for (auto item = begin; item != end; item++) total += work(*item, shared_);
    for (auto item = begin; item != end; item++) {
      const int64_t heads = item->head_end - item->head_begin;
      const int64_t cuts = std::min(parts_of(work(*item, shared_), wanted, total), heads);
      for (int64_t cut = 0; cut < cuts; cut++) {
        pieces_.push_back(*item);
        pieces_.back().head_begin = static_cast<int32_t>(item->head_begin + heads * cut / cuts);
        pieces_.back().head_end = static_cast<int32_t>(item->head_begin + heads * (cut + 1) / cuts);
      }
    }
  }
  phases_.back() = static_cast<int64_t>(pieces_.size());
  items_.swap(pieces_);
}

// Gives each query memory for its partial results.
void AttentionPlan::place_partials(const Step& step) {
  int64_t floats = 0;
  for (int32_t row = 0; row < step.rows; row++)
    for (int32_t token = step.query_start[row]; token < step.query_start[row + 1]; token++) {
      queries_[token].partials = floats;
      floats += rows_[row].kept * result_floats();
    }
  for (size_t i = step.tokens; i < queries_.size(); i++) queries_[i].partials = queries_[queries_[i].token].partials;
  if (static_cast<int64_t>(partials_.size()) < floats) partials_.resize(floats);
}

}  // namespace pypto
