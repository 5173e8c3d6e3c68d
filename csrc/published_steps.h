// Steps that a leader publishes to the other ranks, which compute them without asking anybody else.
#pragma once

#include "barrier.h"
#include "recording.h"

namespace pypto {

// What is new in a step; the arrays lie where those of its `buffers` always do.
struct StepHeader {
  int32_t buffers, tokens, rows, logits;
};

// The last steps, in shared memory. A leader publishes no more steps than kSteps before all ranks have begun them.
struct Board {
  static constexpr uint32_t kSteps = 64;
  Count published;
  StepHeader steps[kSteps];
  // For the leader alone.
  void publish(const StepHeader& header);
};

// Where the arrays of a step lie; see Step.
struct StepArrays {
  const int32_t *token_ids, *positions, *query_start, *context_lens, *logits_rows;
  const GroupTables* groups;
  FIELDS(token_ids, positions, query_start, context_lens, logits_rows, groups)
  Step step(int32_t tokens, int32_t rows, int32_t logits, int32_t slot) const;
};

// Copies this rank's part of the columns of a step's rows, `width` floats each, to the next stage of a pipeline, or from
// the one before: about those that it has computed itself, so that it touches little other memory. Either side may have a
// place for each step in flight, `slot` floats apart.
struct Pass {
  const float* from;
  float* to;
  int64_t width, from_slot, to_slot;
  int32_t part, parts;
  StepRows rows;
  FIELDS(from, to, width, from_slot, to_slot, part, parts, rows)
};

void pass(const Pass& op, const Step& step, Member& member);

// Replay the steps that are published, until a barrier or the board is closed; with `drafting`, those in the last of
// `count` buffers by that.
void replay_published(Recording& recording, Recording* drafting, Board& board, const StepArrays* buffers, int32_t count);

}  // namespace pypto
