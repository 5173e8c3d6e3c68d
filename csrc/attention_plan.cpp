#include "attention_plan.h"

#include <algorithm>

namespace pypto {
namespace {

constexpr int64_t kItemsPerThread = 4;  // so many balance the threads
constexpr int32_t kMostCutQueries = 4;  // histories of longer runs are not cut: there would be much to keep
constexpr int64_t kMostPartials = 16 << 20;  // floats of tiles that wait; what would be more is not cut

}  // namespace

void AttentionPlan::shape(int shared, int kv_heads, int dim) { shared_ = shared, kv_heads_ = kv_heads, dim_ = dim; }

// An item is a row's queries, as many as fit, with as many kv heads as fit beside them: in a block of the cache the heads
// of a layer lie side by side, and reading them together makes long streams. Where that gives too few items for the
// threads, long histories are cut, and what is then still missing comes from cutting heads.
void AttentionPlan::make(Step& step, int threads) {
  items_.clear();
  if (kv_heads_ == 0) return;
  for (int32_t row = 0; row < step.rows; row++) add_row(step, row);
  const int64_t wanted = threads > 1 ? kItemsPerThread * threads : 0;
  const auto missing = [&] { return (wanted + static_cast<int64_t>(items_.size()) - 1) / items_.size(); };
  if (!items_.empty() && missing() > 1) cut_histories(missing());
  if (!items_.empty() && missing() > 1) cut_heads(missing());
  step.items = items_.data();
  step.num_items = static_cast<int64_t>(items_.size());
}

void AttentionPlan::add_row(const Step& step, int32_t row) {
  const int32_t begin = step.query_start[row], end = step.query_start[row + 1], most = std::max(1, kItemRows / shared_);
  for (int32_t first = begin; first < end; first += most) {
    const int32_t queries = std::min(most, end - first), length = step.positions[first] + queries;
    const int32_t heads = std::clamp(kItemRows / (queries * shared_), 1, kv_heads_);
    for (int32_t head = 0; head < kv_heads_; head += heads)
      items_.push_back({row, first, queries, head, std::min(head + heads, kv_heads_), 0, (length + kTile - 1) / kTile});
  }
}

void AttentionPlan::cut_heads(int64_t parts) {
  pieces_.clear();
  for (AttentionItem item : items_) {
    const int32_t begin = item.head_begin, heads = item.head_end - begin;
    const int32_t cuts = item.partial ? 1 : static_cast<int32_t>(std::min<int64_t>(parts, heads));
    for (int32_t cut = 0; cut < cuts; cut++) {
      item.head_begin = begin + heads * cut / cuts, item.head_end = begin + heads * (cut + 1) / cuts;
      pieces_.push_back(item);
    }
  }
  items_.swap(pieces_);
}

void AttentionPlan::cut_histories(int64_t parts) {
  pieces_.clear();
  std::vector<int64_t> places;  // of each piece in partials_, or -1
  int64_t floats = 0;
  for (AttentionItem item : items_) {
    const int32_t tiles = item.tile_end, heads = item.head_end - item.head_begin;
    const int64_t size = static_cast<int64_t>(tiles) * heads * item.queries * shared_ * (kPartialHead + dim_);
    const bool cuttable = item.queries <= kMostCutQueries && floats + size <= kMostPartials;
    item.parts = cuttable ? static_cast<int32_t>(std::min<int64_t>(parts, tiles)) : 1;
    for (int32_t cut = 0; cut < item.parts; cut++) {
      item.tile_begin = tiles * cut / item.parts, item.tile_end = tiles * (cut + 1) / item.parts;
      pieces_.push_back(item);
      places.push_back(item.parts > 1 ? floats : -1);
    }
    if (item.parts > 1) floats += size;
  }
  items_.swap(pieces_);
  if (static_cast<int64_t>(partials_.size()) < floats) partials_.resize(floats);
  if (finished_size_ < static_cast<int64_t>(items_.size())) {
    finished_size_ = static_cast<int64_t>(items_.size());
    finished_.reset(new std::atomic<int32_t>[finished_size_]());
  }
  for (size_t i = 0, first = 0; i < items_.size(); i++) {
    if (places[i] < 0) continue;
    if (items_[i].tile_begin == 0) first = i;  // all parts count in the place of their first
    items_[i].partial = partials_.data() + places[i];
    items_[i].finished = finished_.get() + first;
  }
}

}  // namespace pypto
