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

// One process's end of a barrier: it comes to count `own`, unless that is negative, and waits for counts [first, last).
// With all counts it is a full barrier; with none it only signals; with others than its own it only waits for them.
class RankBarrier {
 public:
  RankBarrier(Count* counts, int own, int first, int last) : counts_(counts), own_(own), first_(first), last_(last) {}
  // Come, and wait until those that it waits for have come as often; false if the barrier is closed.
  bool wait();
  bool closed() const { return closed_; }

 private:
  Count* counts_;
  int own_, first_, last_;
  uint32_t waits_ = 0;
  bool closed_ = false;  // as far as this rank has seen
};

}  // namespace pypto
