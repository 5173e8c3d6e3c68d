#include "published_steps.h"

#include <algorithm>
#include <cstring>

namespace pypto {

Step StepArrays::step(int32_t tokens, int32_t rows, int32_t logits, int32_t slot) const {
  Step step;
  step.tokens = tokens, step.rows = rows, step.logits = logits, step.slot = slot;
  step.token_ids = token_ids, step.positions = positions, step.query_start = query_start;
  step.context_lens = context_lens, step.logits_rows = logits_rows, step.groups = groups;
  return step;
}

void Board::publish(const StepHeader& header) {
  steps[published.count() % kSteps] = header;
  published.advance();
}

void pass(const Pass& op, const Step& step, Member& member) {
  const int64_t first = op.width * op.part / op.parts, columns = op.width * (op.part + 1) / op.parts - first;
  const float* from = op.from + step.slot * op.from_slot + first;
  float* to = op.to + step.slot * op.to_slot + first;
  for (Share share(member, count(step, op.rows) * columns, 4096); share.next();)
    for (int64_t i = share.begin, size; i < share.end; i += size) {
      const int64_t row = i / columns, column = i % columns, at = row * op.width + column;
      size = std::min<int64_t>(share.end - i, columns - column);
      std::memcpy(to + at, from + at, size * sizeof(float));
    }
}

void replay_published(Recording& recording, Recording* drafting, Board& board, const StepArrays* buffers, int32_t count) {
  for (uint32_t next = 1; board.published.await(next); next++) {
    const StepHeader header = board.steps[(next - 1) % Board::kSteps];
    const Step step = buffers[header.buffers].step(header.tokens, header.rows, header.logits, header.buffers);
    const bool drafts = drafting && header.buffers == count - 1;
    if (!(drafts ? *drafting : recording).replay(step, nullptr)) return;
  }
}

}  // namespace pypto
