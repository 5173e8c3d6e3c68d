#include "row_share.h"

#include <algorithm>
#include <cstring>

namespace pypto {

// A row is in the part in which the middle of its cost lies.
Step RowShare::of(const Step& whole, std::vector<int32_t>& starts) const {
  const auto cost = [&](int32_t row) {
    return (whole.query_start[row + 1] - whole.query_start[row]) * (token_cost + whole.context_lens[row]);
  };
  int64_t total = 0, before = 0;
  for (int32_t row = 0; row < whole.rows; row++) total += cost(row);
  int32_t begin = 0, end = 0;
  for (int32_t row = 0; row < whole.rows; row++) {
    const int64_t middle = before + cost(row) / 2, owner = middle * parts / total;
    before += cost(row);
    if (owner < part) begin = row + 1;
    if (owner <= part) end = row + 1;
  }
  Step step = whole;
  const int32_t first = whole.query_start[begin];
  starts.resize(end - begin + 1);
  for (int32_t row = begin; row <= end; row++) starts[row - begin] = whole.query_start[row] - first;
  step.rows = end - begin, step.tokens = starts.back(), step.logits = 0;
  step.first_row = begin, step.first_token = first;
  step.token_ids += first, step.positions += first, step.query_start = starts.data(), step.context_lens += begin;
  return step;
}

void copy_share(const CopyShare& op, const Step& part, Member& member) {
  const int64_t floats = part.tokens * op.width, offset = part.first_token * op.width;
  const float* from = op.from + (op.returns ? 0 : offset);
  float* to = op.to + (op.returns ? offset : 0);
  for (Share share(member, floats, 4096); share.next();)
    std::memcpy(to + share.begin, from + share.begin, (share.end - share.begin) * sizeof(float));
}

}  // namespace pypto
