#include "following.h"

#include <cstring>

namespace pypto {

Step StepArrays::step(int32_t tokens, int32_t rows, int32_t logits, int32_t slot) const {
  Step step;
  step.tokens = tokens, step.rows = rows, step.logits = logits, step.slot = slot;
  step.token_ids = token_ids, step.positions = positions, step.query_start = query_start;
  step.context_lens = context_lens, step.logits_rows = logits_rows, step.groups = groups;
  return step;
}

void Board::publish(const Order& order) {
  orders[published.count() % kOrders] = order;
  published.advance();
}

void pass(const Pass& op, const Step& step, Member& member) {
  const int64_t floats = count(step, op.rows) * op.width;
  const int64_t first = floats * op.part / op.parts, last = floats * (op.part + 1) / op.parts;
  const float* from = op.from + step.slot * op.from_slot + first;
  float* to = op.to + step.slot * op.to_slot + first;
  for (Share share(member, last - first, 4096); share.next();)
    std::memcpy(to + share.begin, from + share.begin, (share.end - share.begin) * sizeof(float));
}

void follow(Recording& recording, Recording* drafting, Board& board, const StepArrays* buffers, int32_t count) {
  for (uint32_t next = 1; board.published.await(next); next++) {
    const Order order = board.orders[(next - 1) % Board::kOrders];
    const Step step = buffers[order.buffers].step(order.tokens, order.rows, order.logits, order.buffers);
    const bool drafts = drafting && order.buffers == count - 1;
    if (!(drafts ? *drafting : recording).replay(step, nullptr)) return;
  }
}

}  // namespace pypto
