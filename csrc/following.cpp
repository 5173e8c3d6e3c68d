#include "following.h"

namespace pypto {

Step StepArrays::step(int32_t tokens, int32_t rows, int32_t logits) const {
  Step step;
  step.tokens = tokens, step.rows = rows, step.logits = logits;
  step.token_ids = token_ids, step.positions = positions, step.query_start = query_start;
  step.context_lens = context_lens, step.logits_rows = logits_rows, step.groups = groups;
  return step;
}

void Board::publish(const Order& order) {
  orders[published.count() % kOrders] = order;
  published.advance();
}

bool follow(Recording& recording, Board& board, const StepArrays* buffers) {
  for (uint32_t count = 1; board.published.await(count); count++) {
    const Order order = board.orders[(count - 1) % Board::kOrders];
    if (order.last) return true;
    if (!recording.replay(buffers[order.buffers].step(order.tokens, order.rows, order.logits), nullptr)) return false;
  }
  return false;
}

}  // namespace pypto
