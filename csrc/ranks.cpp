// The C interface of what ranks share; the memory is theirs, zero at first. meet.h, following.h and link.h say what it holds.
#include "abi.h"
#include "link.h"

using namespace pypto;

API(int, count_bytes) { return sizeof(Count); }

API(int, board_bytes) { return sizeof(Board); }

// Close `count` counts of a meeting, or that of a board.
API(void, close_counts, void* counts, int count) {
  for (int i = 0; i < count; i++) static_cast<Count*>(counts)[i].close();
}

API(Meeting*, meeting, void* counts, int own, int first, int last) {
  return new Meeting(static_cast<Count*>(counts), own, first, last);
}

API(void, leave, Meeting* meeting) { delete meeting; }

// 1, or 0 if the meeting is closed.
API(int, meet, Meeting* meeting) { return meeting->meet(); }

API(void, record_meeting, Recording* recording, Meeting* meeting) { recording->meet(meeting); }

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

// Returns when a meeting or the board is closed.
API(void, follow, Recording* recording, Recording* NULLABLE drafting, void* board, const StepArrays* buffers,
    int32_t count) {
  follow(*recording, drafting, *static_cast<Board*>(board), buffers, count);
}

// Takes over the file descriptor of a connection.
API(Link*, link, int fd, int patience_ms) { return new Link(fd, patience_ms); }

API(void, unlink, Link* link) { delete link; }

API(const Exchange*, exchange, Recording* recording, const Exchange* values) {
  return recording->add(exchange, *values);
}

API(const Mail*, mail, Recording* recording, const Mail* values) { return recording->add(mail, *values); }

// 1, or 0 if the link has failed.
API(int, send_step, Link* link, const Mirror* mirrors, int count, int32_t buffers, int32_t tokens, int32_t rows,
    int32_t logits) {
  Frame frame;
  frame.begin({buffers, tokens, rows, logits});
  for (int i = 0; i < count; i++) frame.add(mirrors[i]);
  return link->send(frame);
}

API(Courier*, courier, const Delivery* delivery) { return new Courier(*delivery); }

// Closes the link as well.
API(void, dismiss, Courier* courier) { delete courier; }
