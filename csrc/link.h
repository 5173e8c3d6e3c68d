// Ranks on two hosts. Each host has memory of its own, laid out alike; what is written to an array on one side is sent
// over a TCP connection, and written to the same array on the other.
#pragma once

#include <thread>
#include <vector>

#include "published_steps.h"

namespace pypto {

ENUM(Extent, kTokens, kLogits, kRows, kEdges)

// An array of 32-bit words that both hosts have: `width` words for each token, logits row, row, or row and one more of a
// step, of which there are at most `most`. `sent` is what the other host has, so that only words which differ are sent;
// without it, all are.
struct Mirror {
  uint32_t* words;
  uint32_t* sent;
  int64_t width, most;
  Extent extent;
  FIELDS(words, NULLABLE sent, width, most, extent)
  // Count the words of a step; -1 if it is larger than `most`.
  int64_t live(const StepHeader& step) const;
};

// What is sent at once: the counts of a step, then for each array its words in groups of 64, a mask before each group.
// Frames are numbered, so that none can be missing in between.
struct Frame {
  struct Head {
    uint32_t number, words;
    StepHeader step;
  };
  Head head{};
  std::vector<uint32_t> words;
  void begin(const StepHeader& step);
  // Add the words that the other host lacks, and note that it has them.
  void add(const Mirror& mirror);
  // Write the words of a frame that arrived; false if it is not one of such arrays.
  bool apply(const Mirror* mirrors, int count) const;
  // The most words of a frame of these arrays; -1 if the step is too large for them.
  static int64_t room(const StepHeader& step, const Mirror* mirrors, int count);
};

// Owns one end of a connection; it fails for good once no byte moves for `patience_ms` in the middle of something.
class Link {
 public:
  Link(int fd, int patience_ms);
  ~Link();
  bool send(Frame& frame) { return transfer(&frame, nullptr, nullptr, 0, true); }
  // Wait for the next frame of these arrays, for as long as it takes, then read it.
  bool receive(Frame& frame, const Mirror* mirrors, int count) {
    return transfer(nullptr, &frame, mirrors, count, false);
  }
  // Send one frame, and receive one at the same time.
  bool swap(Frame& out, Frame& in, const Mirror* mirrors, int count) {
    return transfer(&out, &in, mirrors, count, true);
  }
  // Let all that wait, now and later, return.
  void close();

 private:
  bool transfer(Frame* out, Frame* in, const Mirror* mirrors, int count, bool hurry);

  int fd_, patience_ms_;
  uint32_t sent_ = 0, received_ = 0;  // frames
};

// Each of two hosts sends what its ranks wrote of the arrays `sent`, and takes what the other wrote of `received`.
// `counts` are closed where that fails.
struct Exchange {
  Link* link;
  const Mirror *sent, *received;
  void* counts;
  int32_t num_sent, num_received, num_counts;
  FIELDS(link, sent, received, counts, num_sent, num_received, num_counts)
};

void exchange(const Exchange& op, const Step& step, Member& member);

// Sends the array of the step's slot, one of `mirrors`, to a ReceiveThread. `counts` are closed where that fails.
struct SendSlot {
  Link* link;
  const Mirror* mirrors;
  void* counts;
  int32_t num_counts;
  FIELDS(link, mirrors, counts, num_counts)
};

void send_slot(const SendSlot& op, const Step& step, Member& member);

// Where what arrives goes: each of `slots` steps in flight has so many `arrays`. Then a step is published on `board`, or
// `counts` advance, and they are closed when nothing more can come.
struct Delivery {
  Link* link;
  const Mirror* mirrors;
  void *board, *counts;
  int32_t slots, arrays, num_counts;
  FIELDS(link, mirrors, NULLABLE board, counts, slots, arrays, num_counts)
};

// Owns a thread that takes what arrives on a link.
class ReceiveThread {
 public:
  explicit ReceiveThread(const Delivery& delivery);
  ~ReceiveThread();

 private:
  void run();
  bool deliver();

  Delivery delivery_;
  Frame frame_;
  std::thread thread_;
};

}  // namespace pypto
