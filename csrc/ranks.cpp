// The C interface of what ranks share: barrier.h, published_steps.h and link.h. The memory is theirs, zero at first.
#include "abi.h"
#include "link.h"

using namespace pypto;

API(int, count_bytes) { return sizeof(Count); }

API(int, board_bytes) { return sizeof(Board); }

// Close `count` counts of a barrier, or that of a board.
API(void, close_counts, void* counts, int count) {
  for (int i = 0; i < count; i++) static_cast<Count*>(counts)[i].close();
}

API(RankBarrier*, barrier, void* counts, int own, int first, int last) {
  return new RankBarrier(static_cast<Count*>(counts), own, first, last);
}

API(void, drop_barrier, RankBarrier* barrier) { delete barrier; }

// 1, or 0 if the barrier is closed.
API(int, wait_barrier, RankBarrier* barrier) { return barrier->wait(); }

API(void, record_barrier, Recording* recording, RankBarrier* barrier) { recording->wait(barrier); }

API(const Pass*, pass, Recording* recording, const Pass* values) { return recording->add(pass, *values); }

// Until `end_share`, operations compute this rank's share of the rows.
API(void, begin_share, Recording* recording, int part, int parts, int64_t token_cost) {
  recording->begin_share({part, parts, token_cost});
}

API(void, end_share, Recording* recording) { recording->end_share(); }

API(const CopyShare*, copy_share, Recording* recording, const CopyShare* values) {
  return recording->add(copy_share, *values);
}

API(void, publish, void* board, int32_t buffers, int32_t tokens, int32_t rows, int32_t logits) {
  static_cast<Board*>(board)->publish({buffers, tokens, rows, logits});
}

// Returns when a barrier or the board is closed.
API(void, replay_published, Recording* recording, Recording* NULLABLE drafting, void* board, const StepArrays* buffers,
    int32_t count) {
  replay_published(*recording, drafting, *static_cast<Board*>(board), buffers, count);
}

// Takes over the file descriptor of a connection.
API(Link*, link, int fd, int patience_ms) { return new Link(fd, patience_ms); }

API(void, unlink, Link* link) { delete link; }

API(const Exchange*, exchange, Recording* recording, const Exchange* values) {
  return recording->add(exchange, *values);
}

API(const SendSlot*, send_slot, Recording* recording, const SendSlot* values) { return recording->add(send_slot, *values); }

// 1, or 0 if the link has failed.
API(int, send_step, Link* link, const Mirror* mirrors, int count, int32_t buffers, int32_t tokens, int32_t rows,
    int32_t logits) {
  Frame frame;
  frame.begin({buffers, tokens, rows, logits});
  for (int i = 0; i < count; i++) frame.add(mirrors[i]);
  return link->send(frame);
}

API(ReceiveThread*, receive_thread, const Delivery* delivery) { return new ReceiveThread(*delivery); }

// Closes the link as well.
API(void, end_receive_thread, ReceiveThread* thread) { delete thread; }
