// How the attention of a step is cut into items for the threads; the same for all layers.
#pragma once

#include <memory>
#include <vector>

#include "kernels.h"

namespace pypto {

// Owns a step's items and the memory in which parts of a history wait for each other.
class AttentionPlan {
 public:
  // `shared` query heads read one of `kv_heads`.
  void shape(int shared, int kv_heads, int dim);
  // Plan a step and give it the items, which stay until the next step.
  void make(Step& step, int threads);

 private:
  void add_row(const Step& step, int32_t row);
  void cut_histories(int64_t parts);
  void cut_heads(int64_t parts);

  int shared_ = 0, kv_heads_ = 0, dim_ = 0;
  std::vector<AttentionItem> items_, pieces_;
  std::vector<float> partials_;
  std::unique_ptr<std::atomic<int32_t>[]> finished_;
  int64_t finished_size_ = 0;
};

}  // namespace pypto
