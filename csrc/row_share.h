// The rows of a step that one of several ranks computes, and how their activations come from and go to all ranks.
#pragma once

#include <vector>

#include "step.h"
#include "team.h"

namespace pypto {

// Ranks share the rows of a step: each has rows that follow each other, and all have about the same work. A token costs
// `token_cost` and one for each token of its context. Shares may be empty.
struct RowShare {
  int32_t part = 0, parts = 1;
  int64_t token_cost = 1;
  // This rank's part of `whole`, whose query starts are kept in `starts`.
  Step of(const Step& whole, std::vector<int32_t>& starts) const;
};

// Copies rows of this rank's part of a step, `width` floats each: from where those of the whole step are, or to there.
struct CopyShare {
  const float* from;
  float* to;
  int64_t width;
  int32_t returns;
  FIELDS(from, to, width, returns)
};

void copy_share(const CopyShare& op, const Step& part, Member& member);

}  // namespace pypto
