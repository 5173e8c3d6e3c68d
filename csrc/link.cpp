#include "link.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace pypto {
namespace {

constexpr int64_t kGroup = 64;
constexpr int kTries = 64;  // reads before sleeping: about as long as an answer takes that is on its way

void close_all(void* counts, int count) {
  for (int i = 0; i < count; i++) static_cast<Count*>(counts)[i].close();
}

// What is left of a buffer to read or write; false once the connection has failed.
struct Left {
  char* data;
  size_t bytes;
  bool moved(ssize_t count) {
    if (count <= 0) return count < 0 && (errno == EAGAIN || errno == EINTR);
    data += count, bytes -= count;
    return true;
  }
};

// The order in which both hosts go through the groups of an array's words.
template <typename Group>
void for_groups(int64_t words, Group group) {
  for (int64_t begin = 0; begin < words; begin += kGroup) group(begin, std::min(kGroup, words - begin));
}

uint64_t all_of(int64_t count) { return ~uint64_t{0} >> (kGroup - count); }

uint64_t differing(const uint32_t* words, const uint32_t* others, int64_t count) {
  if (!others) return all_of(count);
  if (std::memcmp(words, others, count * sizeof(uint32_t)) == 0) return 0;
  uint64_t mask = 0;
  for (int64_t i = 0; i < count; i++) mask |= static_cast<uint64_t>(words[i] != others[i]) << i;
  return mask;
}

}  // namespace

int64_t Mirror::live(const StepHeader& step) const {
  const int64_t counts[] = {step.tokens, step.logits, step.rows, step.rows + int64_t{1}};
  const int64_t count = counts[static_cast<int>(extent)];
  return count < 0 || count > most ? -1 : count * width;
}

void Frame::begin(const StepHeader& step) {
  head = {0, 0, step};
  words.clear();
}

void Frame::add(const Mirror& mirror) {
  const int64_t live = mirror.live(head.step);
  size_t end = words.size();
  words.resize(end + room(head.step, &mirror, 1));
  for_groups(live, [&](int64_t begin, int64_t count) {
    const uint32_t* from = mirror.words + begin;
    uint32_t* known = mirror.sent ? mirror.sent + begin : nullptr;
    const uint64_t mask = differing(from, known, count);
    std::memcpy(&words[end], &mask, sizeof mask);
    end += 2;
    if (mask == all_of(count)) {
      std::memcpy(&words[end], from, count * sizeof(uint32_t));
      end += count;
    } else {
      for (uint64_t left = mask; left; left &= left - 1) words[end++] = from[__builtin_ctzll(left)];
    }
    if (known && mask) std::memcpy(known, from, count * sizeof(uint32_t));
  });
  words.resize(end);
  head.words = static_cast<uint32_t>(end);
}

bool Frame::apply(const Mirror* mirrors, int count) const {
  const uint32_t *at = words.data(), *const end = at + words.size();
  bool fits = true;
  for (int i = 0; i < count && fits; i++)
    for_groups(mirrors[i].live(head.step), [&](int64_t begin, int64_t size) {
      uint64_t mask = 0;
      if (!(fits = fits && end - at >= 2)) return;
      std::memcpy(&mask, at, sizeof mask);
      at += 2;
      if (!(fits = (mask & ~all_of(size)) == 0 && end - at >= __builtin_popcountll(mask))) return;
      for (uint32_t* to : {mirrors[i].words + begin, mirrors[i].sent ? mirrors[i].sent + begin : nullptr}) {
        const uint32_t* from = at;
        if (!to) continue;
        if (mask == all_of(size)) std::memcpy(to, from, size * sizeof(uint32_t));
        else
          for (uint64_t left = mask; left; left &= left - 1) to[__builtin_ctzll(left)] = *from++;
      }
      at += __builtin_popcountll(mask);
    });
  return fits && at == end;
}

int64_t Frame::room(const StepHeader& step, const Mirror* mirrors, int count) {
  int64_t total = 0;
  for (int i = 0; i < count; i++) {
    const int64_t live = mirrors[i].live(step);
    if (live < 0) return -1;
    total += live + 2 * ((live + kGroup - 1) / kGroup);
  }
  return total;
}

Link::Link(int fd, int patience_ms) : fd_(fd), patience_ms_(patience_ms) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

Link::~Link() { ::close(fd_); }

void Link::close() { shutdown(fd_, SHUT_RDWR); }

bool Link::transfer(Frame* out, Frame* in, const Mirror* mirrors, int count, bool hurry) {
  const auto bytes = [](std::vector<uint32_t>& words) {
    return Left{reinterpret_cast<char*>(words.data()), words.size() * sizeof(uint32_t)};
  };
  Left sending[2]{}, head{}, body{};
  if (out) out->head.number = sent_++;
  if (out) sending[0] = {reinterpret_cast<char*>(&out->head), sizeof out->head};
  if (out) sending[1] = bytes(out->words);
  if (in) head = {reinterpret_cast<char*>(&in->head), sizeof in->head};
  for (int tries = 0;;) {
    bool moved = false;
    if (sending[0].bytes + sending[1].bytes) {
      iovec parts[2] = {{sending[0].data, sending[0].bytes}, {sending[1].data, sending[1].bytes}};
      msghdr message{};
      message.msg_iov = parts, message.msg_iovlen = 2;
      ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL);
      if (!(moved = sent > 0) && !sending[0].moved(sent)) return false;
      for (Left& left : sending) {
        const ssize_t own = std::min<ssize_t>(left.bytes, std::max<ssize_t>(sent, 0));
        left.data += own, left.bytes -= own, sent -= own;
      }
    }
    if (Left& reading = head.bytes ? head : body; reading.bytes) {
      const ssize_t count_read = recv(fd_, reading.data, reading.bytes, 0);
      if (!reading.moved(count_read)) return false;
      moved |= count_read > 0;
      if (count_read > 0 && &reading == &head && !head.bytes) {
        if (in->head.number != received_++) return false;
        if (in->head.words > Frame::room(in->head.step, mirrors, count)) return false;
        in->words.resize(in->head.words);
        body = bytes(in->words);
      }
    }
    if (!(sending[0].bytes + sending[1].bytes + head.bytes + body.bytes)) return true;
    if (moved || tries++ < kTries) continue;
    const bool begun = hurry || head.bytes < sizeof in->head;
    const short events = (head.bytes + body.bytes ? POLLIN : 0) | (sending[0].bytes + sending[1].bytes ? POLLOUT : 0);
    pollfd waiting{fd_, events, 0};
    const int ready = poll(&waiting, 1, begun ? patience_ms_ : -1);
    if (ready == 0 || (ready < 0 && errno != EINTR)) return false;
    tries = 0;
  }
}

void exchange(const Exchange& op, const Step& step, Member& member) {
  if (member.index() != 0) return;
  static thread_local Frame out, in;
  out.begin({step.slot, step.tokens, step.rows, step.logits});
  for (int i = 0; i < op.num_sent; i++) out.add(op.sent[i]);
  const bool met = op.link->swap(out, in, op.received, op.num_received) && in.head.step.tokens == step.tokens &&
                   in.head.step.logits == step.logits && in.apply(op.received, op.num_received);
  if (!met) close_all(op.counts, op.num_counts);
}

void send_slot(const SendSlot& op, const Step& step, Member& member) {
  if (member.index() != 0) return;
  static thread_local Frame frame;
  frame.begin({step.slot, step.tokens, step.rows, step.logits});
  frame.add(op.mirrors[step.slot]);
  if (!op.link->send(frame)) close_all(op.counts, op.num_counts);
}

ReceiveThread::ReceiveThread(const Delivery& delivery) : delivery_(delivery), thread_([this] { run(); }) {}

ReceiveThread::~ReceiveThread() {
  delivery_.link->close();
  thread_.join();
}

void ReceiveThread::run() {
  while (deliver()) {
  }
  close_all(delivery_.counts, delivery_.num_counts);
}

bool ReceiveThread::deliver() {
  const auto& [link, mirrors, board, counts, slots, arrays, num_counts] = delivery_;
  if (!link->receive(frame_, mirrors, arrays)) return false;
  const StepHeader& step = frame_.head.step;
  if (step.buffers < 0 || step.buffers >= slots) return false;
  if (!frame_.apply(mirrors + int64_t{step.buffers} * arrays, arrays)) return false;
  if (board) {
    static_cast<Board*>(board)->publish(step);
  } else {
    for (int i = 0; i < num_counts; i++) static_cast<Count*>(counts)[i].advance();
  }
  return true;
}

}  // namespace pypto
