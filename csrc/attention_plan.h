// Splits the attention of a step into work items for the threads; the plan serves all layers.
#pragma once

#include <vector>

#include "prefixes.h"
#include "step.h"

namespace pypto {

// Owns a step's items and their partial results.
class AttentionPlan {
 public:
  // `shared` query heads read each of `kv_heads` (GQA); blocks hold `size` positions.
  void shape(int shared, int kv_heads, int dim, int size);
  // Plan a step and give it the items, which stay until the next step.
  void make(Step& step, int threads);

 private:
  // A row's tiles that earlier phases attend to, and its partial results per query.
  struct Row {
    int32_t tiles, kept;
  };

  int64_t result_floats() const { return static_cast<int64_t>(shared_) * kv_heads_ * (kPartialHead + dim_); }
  int32_t most_queries() const;  // of an item
  void share_prefixes(const Step& step);
  void add_group(const Step& step, const Prefixes::Group& group);
  void add_row(const Step& step, int32_t row);
  void add_heads(AttentionItem item, std::vector<AttentionItem>& items) const;
  void begin_phase() { phases_.push_back(static_cast<int64_t>(items_.size())); }
  void cut_histories(const Step& step, int64_t wanted);
  void cut_heads(int64_t wanted);
  void place_partials(const Step& step);

  int shared_ = 0, kv_heads_ = 0, dim_ = 0, size_ = 1;
  Prefixes prefixes_;
  std::vector<AttentionQuery> queries_;
  std::vector<AttentionItem> items_, last_, pieces_;  // `last_` are those of the last phase
  std::vector<int64_t> phases_;
  std::vector<Row> rows_;
  std::vector<float> partials_;
  int64_t partial_floats_ = 0;
};

}  // namespace pypto
