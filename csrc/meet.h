// How processes wait for each other in memory that they share, which is zero at first.
#pragma once

#include <atomic>
#include <cstdint>

namespace pypto {

// A count that one process advances and others wait for. Who sees a count also sees all that was written before it.
struct alignas(64) Count {
  std::atomic<uint32_t> value;  // twice the count; odd once it is closed
  std::atomic<uint32_t> sleepers;

  uint32_t count() const { return value.load() / 2; }
  void advance();
  // Wait until the count is at least `count`; false if it is closed.
  bool await(uint32_t count);
  // Let all that wait, now and later, return. Any process may call this.
  void close();
};

// One rank's end of a barrier of `ranks` ranks, each of which advances one of `counts`.
class Meeting {
 public:
  Meeting(Count* counts, int rank, int ranks) : counts_(counts), rank_(rank), ranks_(ranks) {}
  // Wait until every rank has come as often as this one; false if the meeting is closed.
  bool meet();
  bool closed() const { return closed_; }

 private:
  Count* counts_;
  int rank_, ranks_;
  uint32_t met_ = 0;
  bool closed_ = false;  // as far as this rank has seen
};

}  // namespace pypto
